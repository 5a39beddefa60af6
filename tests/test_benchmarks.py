"""A benchmark runs, its variants compute the same, and it ends in the line of JSON that all parts promise.

Only the part that compiles least: the others share all but their own few lines with it.
"""

import json
from pathlib import Path

import pytest

from covey.models.config import ModelConfig

MODEL = ModelConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    tie_embeddings=True,
)  # fmt: skip


@pytest.mark.slow
def test_a_part_ends_in_its_line_of_json(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
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
