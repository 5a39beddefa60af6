"""Device meshes, the sharding of arrays over them, and transfers of arrays between them."""

from covey.parallel.arrays import (
    DEFAULT_RULES,
    Transfer,
    flatten,
    logical_axes,
    mesh_of,
    num_row_shards,
    reshard,
    row_sharding,
    shardings,
)
from covey.parallel.mesh import make_mesh, mesh_from_config

__all__ = [
    "DEFAULT_RULES",
    "Transfer",
    "flatten",
    "logical_axes",
    "make_mesh",
    "mesh_from_config",
    "mesh_of",
    "num_row_shards",
    "reshard",
    "row_sharding",
    "shardings",
]
