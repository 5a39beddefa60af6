"""Use a model or a finished run: evaluate, generate, chat."""

import dataclasses
import io
import logging
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from covey.config.recipe import Recipe, SFTRecipe, is_run
from covey.config.recipe import load_any as load_recipe
from covey.config.schema import EnvsConfig, RLTrainingConfig, RolloutConfig
from covey.config.schema.envs import metric_name
from covey.data import PromptLoader
from covey.data import sources as data_source
from covey.data.loader import FittedPrompts, fit_prompts
from covey.data.rows import Row
from covey.display import echo, show_log
from covey.errors import DataError
from covey.models.decoder import Decoder
from covey.monitor.progress import Progress
from covey.monitor.writer import Correct
from covey.parallel import checks, distributed
from covey.registry import offered
from covey.rewards import RewardFn, RewardRunner, check_columns, check_evaluation_columns, environment_reward
from covey.rl.evaluate import evaluate as evaluate_model
from covey.rl.rollout import RolloutWorker
from covey.run.load_model import available_own_mesh, load_for, open_model
from covey.run.settings import check_same_recipe
from covey.sampling.responder import ResponderFactory
from covey.text.tokenizer import Tokenizer
from covey.types import Group, Prompt

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
        with open_worker(recipe, source) as worker, RewardRunner(recipe.reward_safety) as runner:
            progress.phase("sampling answers")
            functions = scoring_functions(recipe)
            weights = recipe.grpo.reward_weights  # the last may be that of a reward model, which is not loaded here
            evaluation = evaluate_model(
                worker,
                fit_rows(held_out, worker, recipe.training).rows,
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
    return [*([environment_reward(metric_name(name))] if name else []), *recipe.rewards]


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


def sample_training_prompts(recipe: Recipe, count: int) -> Sequence[Group]:
    """Sample groups for the first `count` training prompts of a run of `recipe`, with its untouched model. As far as
    they are prompts of its first step, these are the completions that the run begins with.
    """
    rows = data_source.load_data(recipe.data).train
    check_columns(recipe.rewards, rows)
    console = Console(stderr=True, highlight=False)
    with (
        Progress(0, console) as progress,
        show_log(progress.phase, progress.message),
        open_worker(recipe) as worker,
    ):
        fitted = fit_rows(rows, worker, recipe.training)
        first = next(PromptLoader(fitted.rows, count, seed=recipe.seed))
        progress.phase("sampling")
        return worker.generate(first, recipe.grpo.num_generations, progress=progress.advance)


@contextmanager
def open_worker(recipe: Recipe, source: str | None = None) -> Iterator[RolloutWorker]:
    """Load the model at `source`, or that the recipe begins with, and open the recipe's environment or tools."""
    model, tokenizer, _ = load_for(recipe, available_own_mesh(recipe.model.mesh), source)
    with open_environments(recipe.envs) as environments:
        yield RolloutWorker(model, tokenizer, recipe.rollout, environments)


def open_environments(config: EnvsConfig) -> AbstractContextManager[ResponderFactory | None]:
    """Open the runner of the environment or the tools that `config` names; None if it names none.

    Raises:
        CoveyError: it names one that does not exist, or no installed package runs environments.
    """
    named = config.environment or config.tools
    return offered("covey.responders", "envs")(config=config) if named else nullcontext()


def prompt_encoder(config: EnvsConfig, tokenizer: Tokenizer) -> Callable[[Prompt], np.ndarray]:
    """Return the function that encodes a row's prompt as a sample begins: with the list of the tools, if `config` names
    any. What an environment adds to the prompt is known only when its episode begins.
    """
    with open_environments(config) if config.tools else nullcontext() as tools:
        return (tools and tools.prompt_encoder(tokenizer)) or tokenizer.encode_prompt


def fit_rows(rows: Sequence[Row], worker: RolloutWorker, training: RLTrainingConfig) -> FittedPrompts:
    """Leave out or cut prompts that are too long, with the list of the tools if there are any."""
    encode = worker.environments and worker.environments.prompt_encoder(worker.tokenizer)
    limit = worker.config.max_prompt_length
    return fit_prompts(rows, encode or worker.tokenizer.encode_prompt, limit, training.too_long)


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
