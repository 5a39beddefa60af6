"""What uses a model or a finished run: evaluate, generate, chat."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from covey.configs import ModelOptions, RolloutConfig
from covey.data import source as data_source
from covey.data.rows import Row
from covey.evaluate import Evaluation, Generates
from covey.evaluate import evaluate as judge
from covey.recipe import Recipe, SFTRecipe
from covey.rl.rollout import RolloutWorker
from covey.run.opening import open_model
from covey.tokenizer import Tokenizer
from covey.train.progress import Progress, printable
from covey.types import Group


def evaluate(source: str, ready: Recipe) -> dict[str, Any]:
    """Evaluates the model or run at `source` on the held-out prompts of `ready`, prints and returns the figures."""
    held_out = data_source.load(ready.data).test
    with Progress(0) as progress:
        model, tokenizer = open_model(source, ready.model, progress.phase)
        worker = RolloutWorker(model, tokenizer, ready.rollout)
        progress.phase("sampling answers")
        found = judge_held_out(worker, fitting(held_out, tokenizer, ready), ready, progress)
        progress.evaluation(source, found.summary())
    return found.summary()


def generate(source: str, prompt: str, samples: int, rollout: RolloutConfig) -> list[str]:
    """`samples` answers of the model or run at `source` to one user message."""
    model, tokenizer = open_model(source, ModelOptions(), _quiet)
    worker = RolloutWorker(model, tokenizer, rollout)
    (group,) = worker.generate([{"prompt": _as_chat(tokenizer, prompt)}], samples)
    return [completion.text for completion in group.completions]


def chat(source: str, rollout: RolloutConfig) -> None:
    """A conversation on the terminal; an empty line or end of input leaves it."""
    model, tokenizer = open_model(source, ModelOptions(), lambda text: print(text, flush=True))
    limit = max(1, model.config.max_positions - rollout.max_new_tokens)
    worker = RolloutWorker(model, tokenizer, dataclasses.replace(rollout, max_prompt_length=limit))
    messages: list[dict[str, str]] = []
    print("Say something; an empty line ends the chat.", flush=True)
    while text := _read_line():
        messages.append({"role": "user", "content": text})
        while tokenizer.chat_template and len(tokenizer.encode_prompt(messages)) > limit and len(messages) > 1:
            messages = messages[2:]
            print("(the oldest turn is forgotten: the conversation has outgrown the model)", flush=True)
        prompt = messages if tokenizer.chat_template else text
        (group,) = worker.generate([{"prompt": prompt}], 1, step=len(messages))
        answer = group.completions[0].text
        messages.append({"role": "assistant", "content": answer})
        print(printable(answer, keep="\n\t"), flush=True)


def fitting(rows: Sequence[Row], tokenizer: Tokenizer, ready: Recipe) -> Sequence[Row]:
    """The rows whose prompt is not too long, where the recipe says to leave the others out; else all of them."""
    if ready.training.too_long == "error":
        return rows
    most = ready.rollout.max_prompt_length
    return [row for row in rows if len(tokenizer.encode_prompt(row["prompt"])) <= most]


def judge_held_out(model: Generates, held_out: Sequence[Any], ready: Recipe, progress: Progress) -> Evaluation:
    """The evaluation that the recipe `ready` asks for."""
    weights = ready.grpo.reward_weights
    return judge(model, held_out, ready.evaluation, ready.rollout, ready.rewards, weights, progress=progress.advance)


def answer_examples(
    worker: RolloutWorker, examples: Sequence[Row], ready: SFTRecipe, progress: Progress
) -> tuple[dict[str, Any], Sequence[Group]]:
    """Answers to the first few of `examples` that have a prompt, and how they were judged; nothing when there are
    none.
    """
    asked = [row for row in examples if row["prompt"]][: ready.evaluation.answers]
    if not asked:
        return {}, ()
    longest = max(len(worker.tokenizer.encode_prompt(row["prompt"])) for row in asked)
    rollout = dataclasses.replace(ready.rollout, max_prompt_length=max(ready.rollout.max_prompt_length, longest))
    every = dataclasses.replace(ready.evaluation, prompts=0)
    found = judge(worker, asked, every, rollout, progress=progress.advance)
    return found.summary(), found.groups


def _as_chat(tokenizer: Tokenizer, text: str) -> Any:
    return [{"role": "user", "content": text}] if tokenizer.chat_template else text


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _quiet(text: str) -> None:
    """For commands whose output is the answer alone."""
