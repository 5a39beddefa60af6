"""The examples run as they are documented. This file is also what runs one: as `test_examples.py EXAMPLE REPORT FLAGS`,
in a process of its own, and writes down what is left in memory at its end.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from covey.models.loading import weights
from covey.parallel import flatten
from covey.rl.roles import Role
from covey.train.checkpoint import Checkpointer

ROOT = Path(__file__).parents[1]
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
"""As tokens: a random model writes some of them, and so earns rewards that differ."""


def observed(example: str, report: str, flags: list[str]) -> None:
    sys.argv = [example, *flags]
    left = runpy.run_path(example, run_name="__main__")
    cluster = left["cluster"]
    actor = flatten(nnx.state(cluster.actor))
    frozen = flatten(cluster.inference.params[Role.REFERENCE])
    told: dict[str, Any] = {
        "steps": left["learner"].step,
        "shapes": {name: [x.shape, x.addressable_shards[0].data.shape, str(x.dtype)] for name, x in actor.items()},
        "devices": [len(x.sharding.device_set) for x in [*actor.values(), *frozen.values()]],
        "shared": [name for name, x in frozen.items() if buffers(x) == buffers(actor[name])],
    }
    np.savez(report, **{name: np.asarray(x, np.float32) for name, x in actor.items()})
    Path(report).with_suffix(".json").write_text(json.dumps(told))


def buffers(x: jax.Array) -> list[int]:
    return [piece.data.unsafe_buffer_pointer() for piece in x.addressable_shards]


@pytest.mark.slow
def test_gsm8k_gemma2_goes_through_the_whole_notebook(
    tmp_path: Path, problems: Path, checkpoint: Callable[..., Path]
) -> None:
    model, out, report = checkpoint("gemma2", words=TAGS), tmp_path / "out", tmp_path / "left.npz"
    small = ["--steps", "3", "--test-batches", "1", "--max-prompt-length", "400", "--max-new-tokens", "12"]
    shown = run("gsm8k_gemma2.py", report, "--model", model, "--data", problems, "--out", out, *small)

    told, left = json.loads(report.with_suffix(".json").read_text()), np.load(report)
    assert told["steps"] == 3
    assert re.findall(r"^step (\d)/3", shown, re.M) == ["1", "2", "3"]
    figures = r"greedy: accuracy \d+\.\d%  within 10 % \d+\.\d%  format \d+\.\d%  reward -?\d+\.\d\d"
    assert re.findall(rf"^(before|after), {figures}$", shown, re.M) == ["before", "after"]
    assert len(re.findall(r"^> \d+\+\d+\?$", shown, re.M)) == 2
    assert "1 are too long" in shown

    # Four devices, each with a quarter of every matrix product; one base for actor and reference.
    assert set(told["devices"]) == {4}
    quarter = {
        "q_proj.kernel": (32, 16),
        "o_proj.kernel": (16, 32),
        "up_proj.kernel": (32, 12),
        "q_proj.lora.b": (64, 16),
    }
    for end, share in quarter.items():
        found = [shapes for name, shapes in told["shapes"].items() if name.endswith(end)]
        assert [tuple(piece) for _, piece, _ in found] == [share, share], end
    kernels = [name for name in left.files if ".lora." not in name]
    assert sorted(told["shared"]) == sorted(kernels)
    assert {told["shapes"][name][2] for name in kernels} == {"bfloat16"}

    # The base's checkpoint is the model that was given, and so is the base after training; its adapters have moved.
    given = flatten(nnx.state(weights.load(str(model), param_dtype="bfloat16").model))
    saved, adapters = (restored(out / name) for name in ("base", "policy"))
    assert given.keys() == saved.keys() == set(kernels)
    for name, x in given.items():
        assert np.array_equal(np.asarray(x, np.float32), left[name]), name
        assert np.array_equal(np.asarray(x, np.float32), saved[name]), name
    moved = [name for name in left.files if name.endswith("lora.b")]
    assert len(moved) == 2 * 7
    assert all(left[name].any() for name in moved)
    assert all(np.array_equal(adapters[f"params.{name}"], left[name]) for name in moved)
    assert {path.name for path in (out / "adapter").iterdir()} > {"adapter_config.json", "adapter_model.safetensors"}


def run(name: str, report: Path, *flags: object) -> str:
    """What the example says on the four virtual devices of all tests."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, __file__, str(ROOT / "examples" / name), str(report), *map(str, flags)]
    done = subprocess.run(words, env=environment, cwd=report.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def restored(folder: Path) -> dict[str, np.ndarray]:
    with Checkpointer(folder, read_only=True) as saves:
        return {name: np.asarray(x, np.float32) for name, x in flatten(saves.restore()[0]).items() if x.ndim}


if __name__ == "__main__":
    observed(*sys.argv[1:3], sys.argv[3:])
