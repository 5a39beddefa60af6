"""Programs compiled for TPUs that are not there, by libtpu: `make aot`. Without it, every test here is skipped."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

for name, value in {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
    os.environ.setdefault(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in (item for item in items if item.path.parent == Path(__file__).parent):
        item.add_marker("aot")
        if find_spec("libtpu") is None:
            item.add_marker(pytest.mark.skip(reason="libtpu is not installed: make aot"))


@pytest.fixture(scope="session")
def topology() -> Iterator[Callable[[str], Any]]:
    """`topology("v5e:2x2")`: descriptions of the devices."""
    import jax
    from jax.experimental import topologies

    jax.devices()  # reads the flags for the CPU, which libtpu refuses
    flags = os.environ.pop("XLA_FLAGS")
    yield lambda name: topologies.get_topology_desc(platform="tpu", topology_name=name)
    os.environ["XLA_FLAGS"] = flags
