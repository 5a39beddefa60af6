"""Use a model or a finished run: evaluate, play episodes, generate, chat."""

import dataclasses
import io
import logging
import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Mesh
from rich.console import Console

from covey.config.recipe import Recipe, SFTRecipe, is_run
from covey.config.recipe import load_any as load_recipe
from covey.config.schema import RLTrainingConfig, RolloutConfig
from covey.data import sources as data_source
from covey.data.loader import FittedPrompts, fit_prompts
from covey.data.rows import Row
from covey.display import echo, show_log
from covey.envs.registry import environment_name
from covey.envs.runner import open_environments
from covey.errors import DataError
from covey.models.decoder import Decoder
from covey.monitor.formats import completion_text, prompt_text
from covey.monitor.progress import Progress
from covey.monitor.writer import Correct
from covey.parallel import checks, distributed
from covey.rewards import RewardFn, RewardRunner, check_columns, check_evaluation_columns, environment_reward
from covey.rl.evaluate import evaluate as evaluate_model
from covey.rl.rollout import RolloutWorker
from covey.run.load_model import available_own_mesh, load_for, open_model
from covey.run.settings import check_same_recipe
from covey.sampling.responder import ResponderFactory
from covey.text.tokenizer import Tokenizer
from covey.types import Completion, FinishReason, Group

log = logging.getLogger(__name__)
PLAIN = (
    "prompts are plain text, and the model has a chat template",
    "a chat model that gets no template may stop at once, with empty completions; a base model may not",
    "rows with messages, or --data.system TEXT, which makes a chat of each prompt",
)
"""Title, reason and remedy of the finding that prompts lack the model's chat template."""
TEXT_ONLY = "The model has no chat template: it continues each line alone"


def evaluate(source: str, recipe: Recipe) -> dict[str, Any]:
    """Evaluate the model or run at `source` on the held-out prompts of `recipe`; print and return the metrics.

    Each of several processes samples and evaluates its share of the prompts, with a copy of the model on its devices.
    """
    held_out = data_source.load_data(recipe.data).test
    check_same_inputs(recipe, held_out)
    check_columns(recipe.rewards, held_out)
    check_evaluation_columns(recipe.evaluation, held_out)
    with Progress(0, console_of_process()) as progress, show_log(progress.phase, progress.message):
        model, tokenizer, _ = load_for(recipe, available_own_mesh(recipe.model.mesh), source)
        progress.phase("sampling answers")
        with RewardRunner(recipe.reward_safety) as runner, open_environments(recipe.envs) as environments:
            worker = RolloutWorker(model, tokenizer, recipe.rollout, environments)
            functions = scoring_functions(recipe)
            weights = recipe.grpo.reward_weights  # the last may be that of a reward model, which is not loaded here
            evaluation = evaluate_model(
                worker,
                fit_rows(held_out, tokenizer, environments, recipe.rollout, recipe.training).rows,
                recipe.evaluation,
                recipe.rollout,
                functions,
                weights and weights[: len(functions)],
                progress.advance,
                runner,
            )
        progress.evaluation(source, evaluation.summary())
    return evaluation.summary()


def scoring_functions(recipe: Recipe) -> list[RewardFn | str]:
    """Return the functions that score the completions of a run: the environment's reward, if any, and the others."""
    name = recipe.envs.environment
    return [*([environment_reward(environment_name(name))] if name else []), *recipe.rewards]


def check_same_inputs(recipe: Recipe | SFTRecipe, held_out: Sequence[Row]) -> None:
    """Refuse processes that evaluate by another recipe, or on other data, than process 0.

    Raises:
        RecipeError: they do.
    """
    same = "the same command and data for all"
    check_same_recipe(recipe, same)
    checks.check_same("held-out data", lambda: zlib.crc32(repr(list(held_out)).encode()), same)


def console_of_process() -> Console | None:
    """Return the console of a progress display: the standard one, or in processes after the first a quiet one."""
    return None if distributed.is_first() else Console(quiet=True)


def play(recipe: Recipe, episodes: int) -> None:
    """Sample one completion or episode for each of the first training prompts with the model that `recipe` begins with,
    and print them as turns.
    """
    rows = data_source.load_data(recipe.data).train[:episodes]
    with show_log(info=lambda _: None, warning=_echo_to_stderr):
        model, tokenizer, _ = load_for(recipe, available_own_mesh(recipe.model.mesh))
        with open_environments(recipe.envs) as environments:
            worker = RolloutWorker(model, tokenizer, recipe.rollout, environments)
            groups = worker.generate(rows, 1)
    for number, group in enumerate(groups, 1):
        _echo(f"--- {number} of {len(groups)}\n{prompt_text(group.prompt)}")
        for completion in group.completions:
            _echo(f"{completion_text(completion)}\n{_outcome(completion)}\n")


def _outcome(completion: Completion) -> str:
    """Describe the end of a completion or of an episode in one line."""
    tokens, episode = f"{completion.num_sampled} tokens of the model", completion.episode
    if episode is None:
        return f"({tokens}, finish {completion.finish})"
    ended = episode.failure or ENDINGS[completion.finish]
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:g}"
    return f"({reward}, {len(episode.turn_ends)} turns, {tokens}, {ended})"


ENDINGS = {
    FinishReason.STOP: "ended by the environment",
    FinishReason.TURNS: "ended by envs.max_turns",
    FinishReason.LENGTH: "cut by a limit of tokens",
}
"""Ends of an episode that did not fail."""


def generate(source: str, prompt: str, samples: int, rollout: RolloutConfig) -> list[str]:
    """Generate `samples` completions of one user message with the model or run at `source`."""
    with show_log(info=lambda _: None, warning=_echo_to_stderr):
        model, tokenizer = open_model(source, mesh=_mesh_of(source))
    worker = RolloutWorker(model, tokenizer, rollout)
    (group,) = worker.generate([{"prompt": _as_chat(tokenizer, prompt)}], samples)
    return [completion.text for completion in group.completions]


def chat(source: str, rollout: RolloutConfig) -> None:
    """Hold a conversation on the terminal; an empty line or end of input ends it."""
    with show_log(info=_echo, warning=_echo):
        model, tokenizer = open_model(source, mesh=_mesh_of(source))
    limit = max(1, model.config.max_positions - rollout.max_new_tokens)
    worker = RolloutWorker(model, tokenizer, dataclasses.replace(rollout, max_prompt_length=limit))
    messages: list[dict[str, str]] = []
    if isinstance(sys.stdin, io.TextIOWrapper):  # invalid bytes are read as U+FFFD instead of raising
        sys.stdin.reconfigure(errors="replace")
    print(f"{'Say something' if tokenizer.chat_template else TEXT_ONLY}; an empty line ends the chat.", flush=True)
    while text := _read_line():
        try:
            messages = _reply(worker, messages, text, limit)
        except DataError as error:
            _echo(f"this line is left out: {error}")
        else:
            _echo(messages[-1]["content"])


def _reply(worker: RolloutWorker, before: Sequence[dict[str, str]], text: str, limit: int) -> list[dict[str, str]]:
    """Return the conversation `before` with `text` and the model's reply, without its oldest turns if it is longer than
    `limit` tokens.

    Raises:
        DataError: the text cannot be a prompt: it is too long by itself, or the chat template refuses it.
    """
    tokenizer = worker.tokenizer
    size = len(tokenizer.encode_prompt(_as_chat(tokenizer, text)))
    if size > limit:
        raise DataError(f"it has {size:,} tokens", want=f"at most {limit:,}", fix="say it in fewer words")
    messages = [*before, {"role": "user", "content": text}]
    while tokenizer.chat_template and len(messages) > 1 and len(tokenizer.encode_prompt(messages)) > limit:
        messages = messages[2:]
        _echo("(the oldest turn is forgotten: the conversation has outgrown the model)")
    (group,) = worker.generate([{"prompt": messages if tokenizer.chat_template else text}], 1, step=len(messages))
    return [*messages, {"role": "assistant", "content": group.completions[0].text}]


def fit_rows(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    environments: ResponderFactory | None,
    rollout: RolloutConfig,
    training: RLTrainingConfig,
) -> FittedPrompts:
    """Leave out or cut prompts that are too long, with the list of the tools if there are any."""
    encode = environments.prompt_encoder(tokenizer) if environments else None
    return fit_prompts(rows, encode or tokenizer.encode_prompt, rollout.max_prompt_length, training.too_long)


def count_plain(rows: Iterable[Row], tokenizer: Tokenizer, environment: Any = None, warn: bool = True) -> int:
    """Return the number of prompts that are plain text though the model has a chat template; warn if there are some. An
    environment may begin with messages of its own.
    """
    texts = (row["prompt"] for row in rows if tokenizer.chat_template and not environment)
    if (count := sum(isinstance(text, str) and text != "" for text in texts)) and warn:
        log.warning(f"{count:,} {PLAIN[0]}: {PLAIN[1]}. Change: {PLAIN[2]}")
    return count


def answering_worker(model: Decoder, tokenizer: Tokenizer, rollout: RolloutConfig) -> RolloutWorker:
    """Build a worker for answers to held-out examples: a prompt may be as long as the model and its cache allow beside
    an answer, whatever `max_prompt_length` is.
    """
    positions = model.config.max_positions
    answer = min(rollout.max_new_tokens, positions - 1)
    return RolloutWorker(
        model,
        tokenizer,
        dataclasses.replace(
            rollout,
            max_new_tokens=answer,
            max_prompt_length=max(1, min(positions, rollout.cache_limit or positions) - answer),
        ),
    )


def select_answerable(worker: RolloutWorker, examples: Sequence[Row], count: int) -> list[Row]:
    """Return the first `count` of `examples` whose prompt leaves room for an answer; log the others."""
    answerable: list[Row] = []
    too_long: list[int] = []
    for row in (row for row in examples if row["prompt"]):
        if len(answerable) == count:
            break
        tokens = len(worker.tokenizer.encode_prompt(row["prompt"]))
        if tokens <= worker.config.max_prompt_length:
            answerable.append(row)
        else:
            too_long.append(tokens)
    if too_long:
        log.warning(_describe_too_long(too_long, worker.config))
    return answerable


def _describe_too_long(tokens: Sequence[int], config: RolloutConfig) -> str:
    room = config.max_prompt_length + config.max_new_tokens
    which = "1 held-out example is" if len(tokens) == 1 else f"{len(tokens)} held-out examples are"
    asked = f"{max(tokens)} tokens and rollout.max_new_tokens = {config.max_new_tokens}"
    why = f"{asked} are more than the {room} that there is room for"
    fix = f"; --rollout.max-new-tokens {room - max(tokens)} would do" if room > max(tokens) else ""
    return f"{which} not answered: {why}{fix}"


def answer_examples(
    worker: RolloutWorker, examples: Sequence[Row], recipe: SFTRecipe, progress: Progress
) -> tuple[dict[str, Any], Sequence[Group], Correct]:
    """Generate answers to `examples` and score them; the result is empty when there are none.

    Returns:
        The metrics, the completions, and which of these are right.
    """
    if not examples:
        return {}, (), {}
    every = dataclasses.replace(recipe.evaluation, prompts=0)
    evaluation = evaluate_model(worker, examples, every, worker.config, progress=progress.advance)
    return evaluation.summary(), evaluation.groups, evaluation.correct


def _mesh_of(source: str) -> Mesh | None:
    """Return the mesh that the run at `source` was trained on; a model that is not a run uses one device."""
    return available_own_mesh(load_recipe(source).model.mesh) if is_run(source) else None


def _as_chat(tokenizer: Tokenizer, text: str) -> Any:
    return [{"role": "user", "content": text}] if tokenizer.chat_template else text


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _echo(text: str) -> None:
    echo(text, keep="\n\t")


def _echo_to_stderr(text: str) -> None:
    """Print a message apart from the output, for commands whose output is the answer alone."""
    echo(text, keep="\n\t", file=sys.stderr)
