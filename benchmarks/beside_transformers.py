"""`python -m benchmarks.beside_transformers PYTHON`: seconds a token of scoring and decoding beside transformers' own.

PYTHON is that of an environment with torch and transformers. Both read one folder of random weights, and take turns in
processes of their own: texts are scored (the log-prob of each token after the first), and continued greedily without a
stop token. Counted are seconds by the clock and of processors, since other work on the machine disturbs the first.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

VOCABULARY = 19
"""Tokens of the models of `small_models`."""
Works = dict[str, Callable[[], np.ndarray]]
"""Name of a work → function that does it, and returns log-probs or tokens."""


def texts(asked: argparse.Namespace) -> np.ndarray:
    """Return the texts, int64 [texts, length]."""
    return np.random.default_rng(0).integers(3, VOCABULARY, (asked.texts, asked.length))


def their_works(asked: argparse.Namespace) -> Works:
    """Return the works of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()
    tokens = torch.tensor(texts(asked))

    def score() -> np.ndarray:
        logps = model(tokens[:, :-1]).logits.log_softmax(-1)
        return logps.gather(-1, tokens[:, 1:, None])[..., 0].numpy()

    def decode() -> np.ndarray:
        prompts, options = tokens[:, : asked.prompt], {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return model.generate(prompts, max_new_tokens=asked.new, **options)[:, asked.prompt :].numpy()

    return {"score": torch.no_grad()(score), "decode": torch.no_grad()(decode)}


def our_works(asked: argparse.Namespace) -> Works:
    """Return the works of Covey: the log-probs of training, one text a row, and the engine."""
    import jax
    from flax import nnx

    from covey.config.schema import RolloutConfig
    from covey.losses.logprobs import token_logps
    from covey.models.loading.weights import load
    from covey.packing.rows import pack, unpack
    from covey.sampling.engine import Engine, Request, generate
    from covey.types import Completion, FinishReason, Group

    model, tokens = load(Path(asked.model)).model, texts(asked).astype(np.int32)
    graph, params = nnx.split(model)
    none = np.zeros(asked.length - 1, np.float32)
    groups = [Group("", text[:1], (Completion(text[1:], none, none, FinishReason.LENGTH),)) for text in tokens]
    rows = pack(groups, asked.length)
    program = jax.jit(lambda params, rows: token_logps(graph, params, rows, 1.0).logps)
    options = {"max_new_tokens": asked.new, "max_prompt_length": asked.prompt, "slots": asked.texts, "decode_chunk": 16}
    engine = Engine(model, (), RolloutConfig(temperature=0.0, **options))
    requests = [Request(text[: asked.prompt], 1, number) for number, text in enumerate(tokens)]

    def score() -> np.ndarray:
        return np.stack(unpack(rows, np.asarray(program(params, rows)), [asked.length - 1] * asked.texts))

    return {"score": score, "decode": lambda: np.stack([one.tokens for (one,) in generate(engine, requests)])}


def serve(works: Works) -> None:
    """Do the work named by each line of standard input; print its seconds, those of processors, and its result."""
    for line in sys.stdin:
        start, processor = time.perf_counter(), time.process_time()
        result = works[line.strip()]()
        seconds = time.perf_counter() - start, time.process_time() - processor
        print(json.dumps([*seconds, result.tolist()]), flush=True)


class Worker:
    """A process that does the works of one side."""

    def __init__(self, python: str, side: str, words: Sequence[str]):
        command = [python, str(Path(__file__)), python, "--side", side, *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, work: str) -> list[Any]:
        """Return seconds, those of processors, and the result of a work."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(work, file=self.process.stdin, flush=True)
        result: list[Any] = json.loads(self.process.stdout.readline())
        return result


def compare(asked: argparse.Namespace, workers: dict[str, Worker]) -> dict[str, Any]:
    """Let both sides do each work in turn; return for each work medians of microseconds a token, and their ratios."""
    facts: dict[str, Any] = {}
    for work, tokens in (("score", asked.texts * (asked.length - 1)), ("decode", asked.texts * asked.new)):
        first = {side: np.array(worker(work)[2]) for side, worker in workers.items()}  # compiles
        rounds = [{side: worker(work)[:2] for side, worker in workers.items()} for _ in range(asked.repeat)]
        for kind, name in enumerate(("clock", "processor")):
            cost = {side: median(1e6 * one[side][kind] / tokens for one in rounds) for side in workers}
            ratio = median(one["ours"][kind] / one["theirs"][kind] for one in rounds)
            facts[f"{work}, {name}"] = {side: round(x, 1) for side, x in cost.items()} | {"ratio": round(ratio, 3)}
        facts[f"{work}, difference"] = float(np.abs(first["ours"] - first["theirs"]).max())
    return facts


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print one line of JSON; with `--side`, be one of the two processes."""
    asked = _parser().parse_args(words)
    if asked.side:
        return serve({"ours": our_works, "theirs": their_works}[asked.side](asked))
    from benchmarks.small_models import write_model

    with tempfile.TemporaryDirectory(prefix="beside-") as folder:
        model, sizes = str(Path(folder) / "model"), ("texts", "length", "prompt", "new")
        weights = write_model(Path(model), asked.architecture, width=asked.width, head_dim=asked.head_dim)
        options = ["--model", model, *(f"--{name}={getattr(asked, name)}" for name in sizes)]
        pythons = {"theirs": asked.python, "ours": sys.executable}
        facts = compare(asked, {side: Worker(python, side, options) for side, python in pythons.items()})
    shape = {name: getattr(asked, name) for name in ("architecture", "width", "head_dim", *sizes)}
    print(json.dumps({"part": "beside transformers", **shape, "weights": weights, **facts}))
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside_transformers", description=__doc__)
    parser.add_argument("python", metavar="PYTHON")
    parser.add_argument("--architecture", default="qwen3.5", choices=["qwen3.5", "llama"])
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    add = partial(parser.add_argument, type=int, metavar="N")
    add("--width", default=512, help="of the model of four layers")
    add("--head-dim", default=64, help="width of heads")
    add("--texts", default=8)
    add("--length", default=512, help="tokens of a scored text")
    add("--prompt", default=64, help="tokens of a prompt that is continued")
    add("--new", default=64, help="tokens of a continuation")
    add("--repeat", default=5, help="timed rounds after the first, which compiles")
    return parser


if __name__ == "__main__":
    main()
