"""Models of which no host holds the whole: shapes alone, divided over hundreds of devices that are not there. The
configs are those that Meta published for Llama 3.1.
"""

import json
import math
from pathlib import Path

import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from covey.models import families
from covey.models.decoder import abstract_decoder
from covey.parallel.arrays import flatten, partition_spec

CONFIGS = Path(__file__).parent / "configs"


@pytest.mark.parametrize(
    ("name", "parameters", "fsdp", "tp"),
    [("llama-3.1-8b", 8_030_261_248, 4, 4), ("llama-3.1-70b", 70_553_706_496, 64, 4)],
)
def test_a_device_holds_its_part_of_the_weights(name: str, parameters: int, fsdp: int, tp: int) -> None:
    """All matrices are divided by all devices; norms, whole on each, are the rest."""
    config = families.read_config(json.loads((CONFIGS / f"{name}.json").read_text()))
    how = {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}
    model = abstract_decoder(config, None, **how, remat=True, remat_keeps="products")
    shapes = flatten(nnx.state(model))
    assert sum(math.prod(x.shape) for x in shapes.values()) == parameters
    norms = 2 * (2 * config.num_layers + 1) * config.hidden_size
    mesh = AbstractMesh((fsdp, tp), ("fsdp", "tp"))
    held = [
        2 * math.prod(NamedSharding(mesh, partition_spec(path, x.shape, mesh)).shard_shape(x.shape))
        for path, x in shapes.items()
    ]
    assert sum(held) == (2 * parameters - norms) / (fsdp * tp) + norms
