"""A model or a finished run on this machine: complete a prompt, or hold a conversation on the terminal."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from covey.config.recipe import is_run, load_any
from covey.config.schema import RolloutConfig
from covey.display import echo, show_log, typed_lines
from covey.errors import DataError
from covey.recipes.load_model import available_own_mesh, open_model
from covey.rl.rollout_worker import RolloutWorker
from covey.text.tokenizer import Tokenizer

TEXT_ONLY = "The model has no chat template: it continues each line alone"


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
    worker = RolloutWorker(model, tokenizer, replace(rollout, max_prompt_length=limit))
    messages: list[dict[str, str]] = []
    print(f"{'Say something' if tokenizer.chat_template else TEXT_ONLY}; an empty line ends the chat.", flush=True)
    for text in typed_lines():
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


def _mesh_of(source: str) -> Mesh | None:
    """Return the mesh that the run at `source` was trained on; a model that is not a run uses one device."""
    return available_own_mesh(load_any(source).model.mesh) if is_run(source) else None


def _as_chat(tokenizer: Tokenizer, text: str) -> Any:
    return [{"role": "user", "content": text}] if tokenizer.chat_template else text


def _echo(text: str) -> None:
    echo(text, keep="\n\t")


def _echo_to_stderr(text: str) -> None:
    """Print a message to standard error, for commands that print the answer alone."""
    echo(text, keep="\n\t", file=sys.stderr)
