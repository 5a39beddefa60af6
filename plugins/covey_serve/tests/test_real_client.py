"""The package tinker itself, where it is installed, against a server of its own process. `make test-newest-client` has
it in an environment of its own, whose Python TINKER_PYTHON names.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("TINKER_PYTHON", sys.executable)
LACKS = "TINKER_PYTHON" not in os.environ and importlib.util.find_spec("tinker") is None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LACKS, reason="the package tinker is not installed"),
]
SCRIPT = """\
import sys, tinker
from tinker import types
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-test")
client = service.create_lora_training_client(base_model="arithmetic-tiny", rank=2, seed=1)
inputs = {"target_tokens": [5, 6, 7], "weights": [1.0, 1.0, 1.0]}
datum = types.Datum(model_input=types.ModelInput.from_ints([4, 5, 6]), loss_fn_inputs=inputs)
losses = []
for _ in range(3):
    found = client.forward_backward([datum], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.005)).result()
    losses.append(found.result().metrics["loss:sum"])
assert losses[2] < losses[0], losses
sampler = client.save_weights_and_get_sampling_client()
prompt, params = types.ModelInput.from_ints([4]), types.SamplingParams(max_tokens=3, temperature=0.0)
tokens = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens
assert 1 <= len(tokens) <= 3, tokens
"""


def test_the_client_trains_and_samples(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "covey",
        "serve",
        "scratch:arithmetic-tiny",
        "--name",
        "arithmetic-tiny",
        "--port",
        "0",
    ]
    sizes = ["--rollout.max-prompt-length", "16", "--rollout.max-new-tokens", "8", "--slots", "2"]
    with subprocess.Popen([*command, *sizes], stdout=subprocess.PIPE, text=True) as server:
        lines: Any = server.stdout
        try:
            address = next(line.split()[-1] for line in lines if line.startswith("listening on "))
            subprocess.run([PYTHON, "-c", SCRIPT, address], check=True, timeout=300)
        finally:
            server.terminate()
