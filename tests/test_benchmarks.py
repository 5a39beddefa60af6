"""A benchmark runs, its variants compute the same, and it ends in the line of JSON that all parts promise.

Only the part that compiles least: the others share all but their own few lines with it. Of the comparison with peers:
the driver with our own worker, and the checkpoint that makes lengths ragged. The peers themselves are not installed.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from covey.models.attention import causal
from covey.models.config import ModelConfig
from covey.models.weights import load

MODEL = ModelConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    tie_embeddings=True,
)  # fmt: skip
SHAPE = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "rope_theta": 1e4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))


@pytest.mark.slow
def test_a_part_ends_in_its_line_of_json(monkeypatch, capsys):
    from benchmarks import common
    from benchmarks.__main__ import main

    smallest = common.Size(MODEL, 2, 4, prompt_length=16, mean_length=8, max_new_tokens=24, slots=4)
    monkeypatch.setitem(common.SIZES, "smallest", smallest)
    assert main(["logprobs", "--size", "smallest", "--repeat", "1"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    asked = {"part": "logprobs", "size": "smallest", "ragged": True, "lora": 0, "repeat": 1}
    assert told.items() >= asked.items()
    assert told.keys() == asked.keys() | {"tokens", "variants", "checks", "machine", "versions"}
    assert told["machine"].keys() == {"device", "devices", "cpu", "cores", "load"}
    assert told["versions"].keys() == {"python", "jax", "jaxlib", "flax", "numpy"}
    assert list(told["variants"]) == ["dense, plain", "dense, chunked", "groups, plain", "groups, chunked"]
    for figures in told["variants"].values():
        assert figures.keys() == {"seconds", "tokens_per_second", "speedup", "rows", "padding", "temp_mb"}
        assert figures["seconds"].keys() == figures["speedup"].keys() == {"median", "low", "high"}
    assert told["checks"].keys() == {"logps_difference", "gradient_difference"}
    assert max(told["checks"].values()) < 1e-5


@pytest.mark.slow
def test_peers_take_the_same_steps_in_turn(capsys):
    from benchmarks.peers.__main__ import compare, tell
    from benchmarks.peers.work import Work

    sizes = {"prompts": 2, "samples": 2, "prompt_length": 4, "max_prompt_length": 8, "max_new_tokens": 6}
    work = Work("smallest", "lora", "fixed", 500, **sizes, lora_rank=2, micro_prompts=2)
    tell(compare(work, SHAPE, 2, {"covey": sys.executable}), work)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told.keys() == {"part", "work", "results", "machine"}
    ours = told["results"]["covey"]
    assert [step["lengths"] for step in ours["steps"]] == [[6] * 4] * 3
    assert ours["times_covey"] == {"median": 1, "low": 1, "high": 1}
    assert 0 < ours["rollout"] < ours["seconds"]["high"] < ours["first_step"]
    sides = [64 + 64, 64 + 32, 64 + 32, 64 + 64, *[64 + 96] * 3]  # of the projections of a layer
    assert ours["parameters"] > ours["trainable"] == 2 * 2 * sum(sides)


@pytest.mark.slow
@pytest.mark.parametrize("probability", [0.0, 0.02, 0.3])
def test_the_stop_token_has_its_probability_at_every_step(tmp_path, probability):
    from benchmarks.peers.checkpoint import write
    from benchmarks.peers.work import PAD, STOP

    write(tmp_path, SHAPE, probability)
    loaded = load(tmp_path)
    assert loaded.tokenizer.stop_ids == (STOP,)
    tokens = np.random.default_rng(0).integers(2, SHAPE["vocab_size"], (4, 40)).astype(np.int32)
    positions = np.broadcast_to(np.arange(40), tokens.shape)
    hidden, _ = loaded.model(tokens, positions, causal(jnp.ones(tokens.shape, bool), positions))
    shares = jax.nn.softmax(loaded.model.logits(hidden))
    np.testing.assert_allclose(shares[..., STOP], probability, rtol=0.02, atol=1e-9)
    assert shares[..., PAD].max() < 1e-9
    assert shares[..., 2:].max() < 5 / SHAPE["vocab_size"]  # and no other token stands out


def test_ragged_lengths_are_a_third_of_the_most():
    from benchmarks.peers.work import SHARE, Work

    work = Work.of("tiny", "lora", "ragged")
    drawn = np.random.default_rng(0).geometric(work.stop_probability, 100_000)
    assert np.minimum(drawn, work.max_new_tokens).mean() == pytest.approx(SHARE * work.max_new_tokens, rel=0.02)
    assert Work.of("tiny", "full", "fixed").stop_probability == 0


def test_a_peer_without_environment_is_named_with_the_way_to_make_it(capsys):
    from benchmarks.peers.__main__ import main

    assert main(["--peers", "covey,tunix", "--tunix-python", "no/such/python"]) == 1
    said = capsys.readouterr().err
    assert all(part in said for part in ("tunix has no environment", "no/such/python", "make bench-peers"))
