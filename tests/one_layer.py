"""The golden `tiny-llama` cut down to its first layer, for tests of runs: most of their time goes into compiling, and
what they claim needs no second layer. Tests of models have the golden one.
"""

import atexit
import json
import shutil
import tempfile
from pathlib import Path

from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent / "parity" / "golden" / "tiny-llama"


def _cut(folder: Path) -> Path:
    """Write the model of one layer into the new folder `folder`."""
    shutil.copytree(GOLDEN, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.npz", "config.json"))
    config = json.loads((GOLDEN / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    tensors = {name: x for part in GOLDEN.glob("*.safetensors") for name, x in load_file(part).items()}
    save_file({name: x for name, x in tensors.items() if ".layers.1." not in name}, folder / "model.safetensors")
    return folder


_PLACE = Path(tempfile.mkdtemp(prefix="covey-tests-model-"))
atexit.register(shutil.rmtree, _PLACE, ignore_errors=True)
ONE_LAYER = _cut(_PLACE / GOLDEN.name)
"""One for all tests of a process, so that runs of different files compile the same programs."""
