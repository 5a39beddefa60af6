"""Device meshes, the sharding of arrays over them, and transfers of arrays between them."""

from covey.parallel.arrays import DEFAULT_RULES, logical_axes, num_row_shards, row_sharding, shardings
from covey.parallel.mesh import make_mesh, mesh_from_config
from covey.parallel.reshard import flatten, mesh_of, reshard

__all__ = [
    "DEFAULT_RULES",
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
