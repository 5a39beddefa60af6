"""`python -m benchmarks.agreement MODEL [--tokens N] [--dtype D] [--only TEXT]`: measure how often two programs draw
different tokens from the same weights with the same noise.

The engine samples completions. Then it samples them in other ways: with other slots, chunks, meshes, processors. And
two more forward passes score the completions and draw each token again with its own noise, which needs no sampling. A
completion counts up to its first token that differs, since behind it contexts differ too; a scored one counts whole.
MODEL is a run or what else `model.source` takes, or `wide`: random weights with the vocabulary of SmolLM2 and an
entropy like that of a language model.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.common import machine, versions
from covey.config.schema import ModelOptions, RolloutConfig
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.parallel import make_mesh, shardings
from covey.recipes.load_model import load_source
from covey.sampling.cache import prefill_attention
from covey.sampling.engine import Engine, Request, generate
from covey.sampling.logits import SamplingParams, draw, sample_keys, token_keys

PROMPT, LENGTH, SAMPLES, BATCH = 8, 32, 8, 16
"""Tokens of a prompt and of a completion, completions of a prompt, and rows of a forward pass."""
SEED = 17
WIDE = ModelConfig(
    vocab_size=49_152, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    tie_embeddings=True,
)  # fmt: skip
WIDE_SCALE = 18.0
"""Factor of its random embedding: logits then have a standard deviation of 4 and an entropy of about 2.5."""


@dataclass(frozen=True)
class Row:
    """A way to draw the tokens of the first row again.

    Attributes:
        settings: of the rollout.
        mesh: number of devices along data, fsdp and tp; one device if not set.
        flags: of XLA, in a process of its own.
        processes: number of processes, each of which samples its share of the prompts.
        scored: name of a forward pass that scores the completions of the first row instead.
    """

    name: str
    settings: dict[str, int] = field(default_factory=dict)
    mesh: tuple[int, int, int] | None = None
    flags: str = ""
    processes: int = 0
    scored: str = ""


ROWS = (
    Row("32 slots, chunk 8"),
    Row("scoring", scored="scoring"),
    Row("prefill", scored="prefill"),
    Row("8 slots", {"slots": 8}),
    Row("64 slots", {"slots": 64}),
    Row("chunk 1", {"decode_chunk": 1}),
    Row("data 2", mesh=(2, 1, 1)),
    Row("tp 2", mesh=(1, 1, 2)),
    Row("two processes", processes=2),
    Row("AVX2", flags="--xla_cpu_max_isa=AVX2", processes=1),
)


def main(words: Sequence[str] | None = None) -> int:
    """Compare each row with the first, and print the table and a line of JSON."""
    arguments = _parser().parse_args(words)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    model, prompts = open_model(arguments.model, arguments.dtype), -(-arguments.tokens // (SAMPLES * LENGTH))
    if arguments.share:
        share, shares, file = arguments.share.split(",", 2)
        np.save(file, sample(model, prompts, ROWS[0], slice(int(share), None, int(shares))))
        return 0
    first, results = sample(model, prompts, ROWS[0]), []
    for row in (row for row in ROWS[1:] if arguments.only in row.name):
        differing, counted = compare(first, drawn_by(row, model, first, arguments), whole=bool(row.scored))
        results.append({"row": row.name, "tokens": counted, "differing": differing})
        print(f"{row.name:16} {differing:6} of {counted:7} tokens  {differing / counted:.1e}", flush=True)
    facts = {"model": arguments.model, "dtype": arguments.dtype, "machine": machine(), "versions": versions()}
    print(json.dumps({"part": "agreement", **facts, "rows": results}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("--tokens", type=int, default=100_000, metavar="N", help="that are sampled in each row")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of weights, cache and products")
    add("--only", default="", metavar="TEXT", help="only rows with this in their names")
    add("--share", default="", help=argparse.SUPPRESS)
    return parser


def open_model(source: str, dtype: str) -> Decoder:
    """Return the decoder `wide`, or that of a run or of a checkpoint."""
    if source != "wide":
        return load_source(ModelOptions(dtype=dtype, compute_dtype=dtype), source)[0]
    model = Decoder(WIDE, rngs=nnx.Rngs(0), param_dtype=dtype, compute_dtype=dtype)
    model.embed.embedding[...] = model.embed.embedding[...] * WIDE_SCALE
    return model


def prompts_of(model: Decoder, count: int) -> np.ndarray:
    """Return random prompts, int32 [count, PROMPT]."""
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (count, PROMPT))
    return tokens.astype(np.int32)


def sample(model: Decoder, prompts: int, row: Row, share: slice = slice(None)) -> np.ndarray:
    """Sample the completions of a share of the prompts as `row` says: int32 [prompts, SAMPLES, LENGTH]."""
    config = RolloutConfig(max_prompt_length=PROMPT, max_new_tokens=LENGTH, seed=SEED, **{"slots": 32, **row.settings})
    engine = Engine(model, (), config)
    if row.mesh:
        params = nnx.split(model)[1]
        engine.update_weights(jax.device_put(params, shardings(params, make_mesh(row.mesh, ("data", "fsdp", "tp")))))
    numbered = list(enumerate(prompts_of(model, prompts)))[share]
    groups = generate(engine, [Request(prompt, SAMPLES, index) for index, prompt in numbered])
    return np.array([[one.tokens for one in group] for group in groups])


def drawn_by(row: Row, model: Decoder, first: np.ndarray, arguments: argparse.Namespace) -> np.ndarray:
    """Return the tokens that a row draws, of the shape of `first`."""
    if row.scored:
        return score(model, first, row.scored)
    return sample_elsewhere(row, first, arguments) if row.processes else sample(model, len(first), row)


def sample_elsewhere(row: Row, first: np.ndarray, arguments: argparse.Namespace) -> np.ndarray:
    """Sample in processes of their own."""
    environment = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {row.flags}"}
    command = [sys.executable, "-m", "benchmarks.agreement", arguments.model]
    command += ["--tokens", str(arguments.tokens), "--dtype", arguments.dtype, "--share"]
    tokens = np.empty_like(first)
    with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
        files = [str(Path(folder) / f"{number}.npy") for number in range(row.processes)]
        shares = [f"{number},{row.processes},{file}" for number, file in enumerate(files)]
        running = [subprocess.Popen([*command, share], env=environment) for share in shares]
        if any(codes := [process.wait() for process in running]):
            raise SystemExit(f"processes of {row.name!r} ended with {codes}")
        for number, file in enumerate(files):
            tokens[number :: row.processes] = np.load(file)
    return tokens


def score(model: Decoder, first: np.ndarray, by: str) -> np.ndarray:
    """Draw each token of the completions `first` again, with its own noise, from the logits of a forward pass: that of
    training, which loops over layers, or that of a prefill.
    """
    graph, params = nnx.split(model)

    @jax.jit
    def drawn(params: Any, tokens: Any, keys: Any) -> Any:
        model, positions = nnx.merge(graph, params), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if by == "scoring":
            hidden, _ = model(tokens, positions, causal_attention(jnp.ones(tokens.shape, bool), positions))
        else:
            attend = prefill_attention(model, jnp.full(len(tokens), tokens.shape[1]), tokens.shape[1])
            hidden, _ = model(tokens, positions, attend, [None] * model.config.num_layers)
        logits = model.logits(hidden[:, PROMPT - 1 : -1]).reshape(-1, model.config.vocab_size)
        return draw(logits, keys.reshape(-1, 2), SamplingParams())[0]

    batches = [drawn(params, *batch) for batch in batches_of(model, first)]
    return np.concatenate(batches)[: first.size].reshape(first.shape)


def batches_of(model: Decoder, first: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield BATCH rows of prompts with completions, and the keys of their tokens; the last batch is filled up."""
    places = np.indices(first.shape[:2]).reshape(2, -1).T  # index of the prompt, number of the sample
    keys = sample_keys(SEED, np.pad(places, ((0, 0), (1, 0))).astype(np.uint32))
    keys = token_keys(keys[:, None], np.arange(LENGTH))
    prompts = np.repeat(prompts_of(model, len(first)), SAMPLES, axis=0)
    rows = np.concatenate([prompts, first.reshape(-1, LENGTH)], axis=1)
    for start in range(0, len(rows), BATCH):
        numbers = np.arange(start, start + BATCH) % len(rows)
        yield rows[numbers], keys[numbers]


def compare(first: np.ndarray, other: np.ndarray, whole: bool) -> tuple[int, int]:
    """Return the number of tokens that differ and of those that count: with `whole` all, and otherwise those of a
    completion up to the first that differs.
    """
    differs = first != other
    counted = differs.size if whole else int((np.cumsum(differs, axis=-1) - differs == 0).sum())
    return int(differs.sum() if whole else differs.any(-1).sum()), counted


if __name__ == "__main__":
    sys.exit(main())
