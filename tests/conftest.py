"""Set before anything imports JAX: the CPU, split into four devices, so that meshes can be tested anywhere."""

import os
import sys

import hypothesis

assert "jax" not in sys.modules, "JAX was imported before its flags were set"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", ""
)  # off: what is tested was compiled now; name a folder to save time
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

# The first example of a test may compile, so no deadline. CI draws the same examples each time.
hypothesis.settings.register_profile("covey", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("covey")
