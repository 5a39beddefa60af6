"""`covey models`: what it says of known models holds, and one model is described without its weights."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.models.decoder import abstract_decoder, num_parameters
from covey.models.families import FAMILIES, INSTALLED, read_config
from covey.models.loading.sources import NAMED_MODELS
from covey.models.scratch import SCRATCH_MODELS, scratch_names
from covey_formats.catalogue import MODELS, memory_of

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "tests" / "parity" / "golden" / "tiny-llama")
SHAPES = {
    "hf:meta-llama/Llama-3.1-8B-Instruct": "llama-3-1-8b",
    "hf:Qwen/Qwen3-0.6B": "qwen3-0-6b",
    "hf:Qwen/Qwen3-4B": "qwen3-4b",
}
"""Known models of which benchmarks/published.toml has the config."""


def test_every_family_and_every_name_is_in_the_table() -> None:
    sources = {model.source for model in MODELS}
    assert {model.kind for model in MODELS} == {*FAMILIES, *INSTALLED.names()}
    assert {*scratch_names(), *NAMED_MODELS} <= sources
    assert len(sources) == len(MODELS)


@pytest.mark.slow
def test_sizes_are_those_of_the_shapes() -> None:
    published = tomllib.loads((ROOT / "benchmarks" / "published.toml").read_text())["models"]
    common = {"rms_norm_eps": 1e-5, "hidden_act": "silu"}
    configs = {source: read_config({**common, **published[name]}) for source, name in SHAPES.items()}
    configs |= {f"scratch:{name}": spec.config for name, spec in SCRATCH_MODELS.items()}
    options = {"param_dtype": "float32", "compute_dtype": "float32"}
    counted = {source: num_parameters(abstract_decoder(config, None, **options)) for source, config in configs.items()}
    assert counted == {model.source: model.parameters for model in MODELS if model.source in counted}


@pytest.mark.slow
def test_the_table_needs_no_jax_and_its_json_has_the_same() -> None:
    code = (
        "import sys; from covey.cli.main import main; main(['models', *sys.argv[1:]]); assert 'jax' not in sys.modules"
    )
    shown, written = (
        subprocess.run([sys.executable, "-c", code, *more], capture_output=True, text=True, check=True).stdout
        for more in ([], ["--json"])
    )
    rows = json.loads(written)
    assert [row["source"] for row in rows] == [model.source for model in MODELS]
    assert all(f"\n{row['source']} " in shown for row in rows)
    smollm = next(row for row in rows if row["source"] == "smollm2-135m")
    assert (smollm["full_bytes"], smollm["lora_bytes"]) == memory_of(134_515_008)


def test_one_model_is_described_without_its_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("covey.models.loading.weights.load", None)
    assert main(["models", TINY, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    config = json.loads((Path(TINY) / "config.json").read_text())
    assert (facts["family"], facts["layers"]) == (FAMILIES["llama"].name, config["num_hidden_layers"])
    assert facts["vocabulary"] == config["vocab_size"]
    assert main(["models", "smolm2-135m"]) == 2
    assert "did you mean 'smollm2-135m'?" in capsys.readouterr().err
