"""Programs of a run: jitted functions together with the shapes of their arguments.

A program is lowered and compiled from shapes, for the devices of their shardings, which may be a description of devices
that do not exist (`jax.experimental.topologies`). Its function is the object that the run itself calls, so the plan
reads the programs that run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class Program:
    """A jitted function of a run with the arguments of one call.

    Attributes:
        name: name for people.
        function: the jitted function; the run calls this object.
        args, kwargs: shapes (`abstract`) in place of arrays; values where an argument is static or a Python number.
    """

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def lower(self, platform: str | None = None) -> jax.stages.Lowered:
        """Lower the program for the devices of its arguments; or for `platform`, without its compiler.

        Args:
            platform: `cpu`, `tpu`, `cuda` or `rocm`; the model must have been built for it too.
        """
        platforms = None if platform is None else (platform,)
        lowered: jax.stages.Lowered = self.function.trace(*self.args, **self.kwargs).lower(lowering_platforms=platforms)
        return lowered
