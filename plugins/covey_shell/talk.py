"""Execute `covey generate` and `covey chat`. JAX is imported once their words and settings are checked."""

from covey.cli.checks import check_not_recipe, check_one_process, check_source
from covey.cli.commands import ChatOptions
from covey.cli.parse import Line, build_settings, missing_argument
from covey.display import echo
from covey.registry import offered
from covey_shell.command import GenerateOptions


def generate(line: Line) -> None:
    """Execute `covey generate RUN_OR_MODEL "PROMPT" [settings]`."""
    source = line.arguments[0]
    if len(line.arguments) == 1:
        check_not_recipe(source)  # it is the mistake, and not the prompt that is missing
        raise missing_argument(line.command)
    options = build_settings(GenerateOptions, line, source)
    check_one_process("covey generate")
    check_source(source)
    from covey_shell import model

    answers = model.generate(source, line.arguments[1], options.n, options.rollout)
    for number, text in enumerate(answers, start=1):
        if len(answers) > 1:
            echo(f"--- {number} of {len(answers)}")
        echo(text, keep="\n\t")


def chat(line: Line) -> None:
    """Execute `covey chat RUN_OR_MODEL [settings]`, or `covey chat --server URL [MODEL] [settings]`."""
    source, server = "".join(line.arguments), line.options.get("--server")
    if not source and server is None:
        raise missing_argument(line.command)
    options = build_settings(ChatOptions, line, source)
    if server is not None:
        offered("covey.chats", "server")(server, source, options.rollout)
        return
    check_one_process("covey chat")
    check_source(source)
    from covey_shell import model

    model.chat(source, options.rollout)
