"""One process is the plain case: it has everything, meets nobody, and needs no package for it."""

import importlib.metadata

import jax
import numpy as np
import pytest

from covey.config.processes import ADDRESS, COUNT, MODE, NUMBER
from covey.errors import CoveyError
from covey.parallel import processes


def test_one_process_has_every_item_and_exchanges_nothing() -> None:
    here, value = processes.here(), object()
    assert (here.index, here.count, here.is_first, here.seconds_to_end) == (0, 1, True, 0.0)
    assert here.local_slice("abc") == (0, "abc")
    assert here.all_gather(value, "x")[0] is value
    assert here.broadcast(value, "x") is value
    assert here.gather_items([1, 2], "x") == here.gather_parts([1, 2], [0, 1], "x") == [1, 2]  # type: ignore[list-item]
    assert here.compare(value, "x") == {}
    routes, values = here.routes(None, None, None), [np.arange(2)]
    assert (routes.rows, routes.rows_to_sum) == (None, slice(None))
    assert routes.prompts_to_rows(values) is routes.to_rows(values, np.int32, "x") is values
    assert routes.to_groups(values, "x") == values
    with here.together("x"), here.phase("update", 1), here.phase("update", 0):
        assert here.in_order("x", value) is value
    here.check_same("x", lambda: 1 / 0, "")
    here.leave(1)
    x = jax.numpy.arange(4)
    assert np.array_equal(here.to_host(here.put_host(here.put(x, x.sharding), x.sharding)), np.arange(4))


def test_what_names_one_process_opens_nothing() -> None:
    with processes.start({}), processes.start({MODE: "off", ADDRESS: "here:1", COUNT: "2", NUMBER: "0"}):
        assert processes.here() is processes.ALONE


def test_several_processes_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.registry.entry_points", lambda **_: importlib.metadata.EntryPoints())
    with pytest.raises(CoveyError, match=r"needs a package that offers 'start' by the entry point covey\.processes"):
        processes.start({ADDRESS: "here:1", COUNT: "2", NUMBER: "0"})


def test_several_processes_are_refused_where_nothing_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(CoveyError, match=r"with processes\.start"):
        processes.here()
