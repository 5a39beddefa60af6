"""The examples run as they are documented."""

import logging
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from covey.models.loading import weights
from covey.parallel import flatten
from covey.rl.roles import Role
from covey.train.checkpoint import Checkpointer

EXAMPLE = Path(__file__).parents[1] / "examples" / "gsm8k_gemma2.py"
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
"""As tokens: a random model writes some of them, and so earns rewards that differ."""


def buffers(x: jax.Array) -> list[int]:
    return [piece.data.unsafe_buffer_pointer() for piece in x.addressable_shards]


@pytest.mark.slow
def test_gsm8k_gemma2_goes_through_the_whole_notebook(
    tmp_path: Path,
    problems: Path,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, out = checkpoint("gemma2", words=TAGS), tmp_path / "out"
    flags = ["--model", model, "--data", problems, "--out", out, "--steps", 3, "--test-batches", 1]
    flags += ["--max-prompt-length", 400, "--max-new-tokens", 12]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, flags)])
    monkeypatch.setattr(logging.getLogger("covey"), "level", logging.NOTSET)  # it sets its own
    left = runpy.run_path(str(EXAMPLE), run_name="__main__")
    shown, cluster = capsys.readouterr().out, left["cluster"]

    assert left["learner"].step == 3
    assert re.findall(r"^step (\d)/3", shown, re.M) == ["1", "2", "3"]
    figures = r"greedy: accuracy \d+\.\d%  within 10 % \d+\.\d%  format \d+\.\d%  reward -?\d+\.\d\d"
    assert re.findall(rf"^(before|after), {figures}$", shown, re.M) == ["before", "after"]
    assert len(re.findall(r"^> \d+\+\d+\?$", shown, re.M)) == 2
    assert "1 are too long" in shown

    # Four devices, each with a quarter of every matrix product; one base for actor and reference.
    actor, frozen = flatten(nnx.state(cluster.actor)), flatten(cluster.inference.params[Role.REFERENCE])
    assert {len(x.sharding.device_set) for x in [*actor.values(), *frozen.values()]} == {4}
    quarter = {
        "q_proj.kernel": (32, 16),
        "o_proj.kernel": (16, 32),
        "up_proj.kernel": (32, 12),
        "q_proj.lora.b": (64, 16),
    }
    for end, share in quarter.items():
        pieces = [x.addressable_shards[0].data.shape for name, x in actor.items() if name.endswith(end)]
        assert pieces == [share, share], end
    kernels = [name for name in actor if ".lora." not in name]
    assert sorted(name for name, x in frozen.items() if buffers(x) == buffers(actor[name])) == sorted(kernels)
    assert {str(actor[name].dtype) for name in kernels} == {"bfloat16"}

    # The base's checkpoint is the model that was given, and so is the base after training; its adapters have moved.
    given = flatten(nnx.state(weights.load(str(model), param_dtype="bfloat16").model))
    saved, adapters = (restored(out / name) for name in ("base", "policy"))
    assert given.keys() == saved.keys() == set(kernels)
    for name, x in given.items():
        assert np.array_equal(np.asarray(x), np.asarray(actor[name])), name
        assert np.array_equal(np.asarray(x, np.float32), saved[name]), name
    moved = [name for name in actor if name.endswith("lora.b")]
    assert len(moved) == 2 * 7
    assert all(np.asarray(actor[name]).any() for name in moved)
    assert all(np.array_equal(adapters[f"params.{name}"], np.asarray(actor[name])) for name in moved)
    assert {path.name for path in (out / "adapter").iterdir()} > {"adapter_config.json", "adapter_model.safetensors"}


def restored(folder: Path) -> dict[str, np.ndarray]:
    with Checkpointer(folder, read_only=True) as saves:
        return {name: np.asarray(x, np.float32) for name, x in flatten(saves.restore()[0]).items() if x.ndim}
