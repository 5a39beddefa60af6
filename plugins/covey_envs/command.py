"""Execute `covey rollout`: play a few episodes of a recipe before it is trained."""

from covey.cli.checks import check_one_process, check_run
from covey.cli.commands import Command, Option
from covey.cli.parse import Line
from covey.config import recipe

DEFAULT_EPISODES = 4
"""Number of episodes that `covey rollout` plays."""

COMMAND = Command(
    "rollout", "covey_envs.command:rollout", "NAME_OR_YAML",
    "play a few episodes of a recipe before it is trained",
    """\
Samples a few prompts of a recipe with the model that it begins with, and prints the conversations, turn by turn:
what the model and the environment say, the reward, and how each episode ended. Nothing is trained or written.""",
    """\
examples
  covey rollout quickstart
  covey rollout guess-tiny --episodes 8 --rollout.temperature 0.5

The settings are those of covey train.""",
    options=(Option("--episodes", "N", "number of episodes, each for another prompt; 4 when not given"),),
    settings_of=("train",),
    follows="eval",
)  # fmt: skip


def rollout(line: Line) -> None:
    """Execute `covey rollout NAME_OR_YAML [--episodes N] [settings]`."""
    settings, episodes = recipe.load(line.arguments[0], line.settings), line.whole_number("--episodes")
    check_one_process("covey rollout")
    check_run(settings)
    from covey_envs.play import play  # late: it needs JAX

    play(settings, episodes or DEFAULT_EPISODES)
