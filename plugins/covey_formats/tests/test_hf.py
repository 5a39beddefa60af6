"""Exports: what is written is the model, in formats that our own loader reads; nothing is ever replaced.

That transformers and PEFT read them too is shown live, by tests/parity/live_round_trip.py.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from covey.config.schema import LoRAConfig, RolloutConfig
from covey.errors import CoveyError, WeightsError
from covey.models.decoder import Decoder
from covey.models.loading import weights
from covey.models.loading.hf_config import TEXT_PARTS, text_name
from covey.models.lora import merge_lora, projections, with_lora
from covey.parallel import flatten
from covey.text.tokenizer import Tokenizer
from covey_formats import files, hf
from covey_formats.hf import write_hf

Golden = Callable[[str], weights.LoadedModel[Decoder]]
GOLDEN = Path(__file__).parents[3] / "tests" / "parity" / "golden"
TINY = GOLDEN / "tiny-llama"
MODELS = json.loads((GOLDEN / "families.json").read_text())


@pytest.fixture(scope="module")
def tiny() -> weights.LoadedModel[Decoder]:
    return weights.load(TINY)


def adapted(base: Decoder, **options: Any) -> Decoder:
    """Adapters that matter."""
    model, rng = with_lora(base, LoRAConfig(rank=3, alpha=5.0, **options)), np.random.default_rng(1)
    for linear in projections(model).values():
        if linear.lora is not None:
            linear.lora.b[...] = jnp.asarray(rng.normal(size=linear.lora.b.shape, scale=0.2), jnp.float32)
    return model


def arrays(model: Decoder) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in flatten(nnx.state(model)).items()}


def equal(one: Decoder, other: Decoder) -> None:
    ours, theirs = arrays(one), arrays(other)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(theirs[name], x, err_msg=name)


def written(folder: Path) -> dict[str, np.ndarray]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in safetensors.numpy.load_file(file).items()}


# --- a Hugging Face folder


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_what_is_read_back_is_the_model_bit_for_bit(
    name: str, golden_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """With the source's config, and with one of our own; a model of each family with adapters, which are merged."""
    folder = golden_folder(name)
    loaded = weights.load(folder)
    for out, source, model in (
        (tmp_path / "kept", folder, loaded.model),
        (tmp_path / "anew", None, loaded.model if "-" in name else adapted(loaded.model)),
    ):
        apart = write_hf(model, loaded.tokenizer, out, source=source, shard_size=9_000)
        assert apart.max_difference < 1e-4 < apart.max_logit
        again = weights.load(out)
        equal(again.model, merge_lora(model))
        assert again.config == loaded.config
    named = {text_name(tensor, TEXT_PARTS["gemma3"].others) for tensor in MODELS[name]["shapes"]}
    assert written(tmp_path / "kept").keys() == named - {None}


@pytest.mark.parametrize("size", [20_000, 60_000, 10**9])
def test_shards_are_no_larger_than_asked_and_the_index_knows_each(
    tiny: weights.LoadedModel, tmp_path: Path, size: int
) -> None:
    write_hf(tiny.model, tiny.tokenizer, tmp_path / "out", source=TINY, shard_size=size)
    shards = {file.name: safetensors.numpy.load_file(file) for file in sorted(tmp_path.glob("out/*.safetensors"))}
    assert all(sum(x.nbytes for x in shard.values()) <= size or len(shard) == 1 for shard in shards.values())
    count, index = len(shards), tmp_path / "out" / "model.safetensors.index.json"
    numbered = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert list(shards) == (numbered if count > 1 else ["model.safetensors"])
    assert index.exists() == (count > 1)
    if count > 1:
        described = json.loads(index.read_text())
        assert described["weight_map"] == {name: file for file, shard in shards.items() for name in shard}
        assert described["metadata"]["total_size"] == sum(x.nbytes for x in arrays(tiny.model).values())


def test_the_sources_own_files_go_along(tiny: weights.LoadedModel, tmp_path: Path) -> None:
    source = shutil.copytree(TINY, tmp_path / "source")
    kept = json.loads((source / "config.json").read_text()) | {"a_field_of_theirs": [1, 2]}
    code = {"auto_map": {"AutoConfig": "their_code.Config"}, "_name_or_path": "theirs/model"}
    (source / "config.json").write_text(json.dumps(kept | code))
    (source / "merges.txt").write_text("a b\n")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | code))
    write_hf(tiny.model, tiny.tokenizer, tmp_path / "out", source=source, card="# A card\n")
    older = {"rope_theta": 30000.0, "eos_token_id": [2, 0], "dtype": "float32"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == kept | older
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == settings
    for name in ("tokenizer.json", "chat_template.jinja", "merges.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert (tmp_path / "out" / "README.md").read_text() == "# A card\n"
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # safetensors alone would lock others out


def test_an_export_stops_and_samples_as_the_run_did(tiny: weights.LoadedModel, tmp_path: Path) -> None:
    """The base names one stop token and penalties; the run stopped at two, and sampled its own way."""
    source = shutil.copytree(TINY, tmp_path / "source")
    named = {"eos_token_id": 2, "repetition_penalty": 1.05, "temperature": 0.6, "bos_token_id": 0}
    (source / "generation_config.json").write_text(json.dumps(named))
    template = "{{ messages[0]['content'] }}"
    ours = Tokenizer(tiny.tokenizer.inner, eos_id=2, stop_ids=[0, 9], bos_id=tiny.tokenizer.bos_id)
    ours.add_bos, ours.chat_template = tiny.tokenizer.add_bos, template
    sampling = RolloutConfig(temperature=0.7, top_k=5, max_new_tokens=12)
    write_hf(tiny.model, ours, tmp_path / "out", source=source, sampling=sampling)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    used = {"do_sample": True, "temperature": 0.7, "top_p": 1.0, "top_k": 5, "min_p": 0.0, "max_new_tokens": 12}
    assert generation == used | {"eos_token_id": [2, 0, 9], "bos_token_id": 0, "pad_token_id": ours.pad_id}
    again = Tokenizer.from_folder(tmp_path / "out")
    assert (again.stop_ids, again.chat_template) == ((0, 2, 9), template)
    write_hf(tiny.model, ours, tmp_path / "plain", source=source)
    generation = json.loads((tmp_path / "plain" / "generation_config.json").read_text())
    assert generation == named | {"eos_token_id": [2, 0, 9], "pad_token_id": ours.pad_id}
    write_hf(tiny.model, ours, tmp_path / "greedy", sampling=RolloutConfig(temperature=0.0))
    generation = json.loads((tmp_path / "greedy" / "generation_config.json").read_text())
    assert generation["do_sample"] is False
    assert "temperature" not in generation


def test_scaled_rope_is_named_for_older_readers(tiny: weights.LoadedModel, tmp_path: Path) -> None:
    source = shutil.copytree(TINY, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    scaling = {"rope_type": "linear", "factor": 4.0}
    parameters = {"rope_theta": 30000.0, **scaling}
    (source / "config.json").write_text(json.dumps(config | {"rope_parameters": parameters}))
    loaded = weights.load(source)
    write_hf(loaded.model, loaded.tokenizer, tmp_path / "out", source=source)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rope_parameters"], config["rope_theta"], config["rope_scaling"]) == (parameters, 30000.0, scaling)


@pytest.mark.slow
@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_weights_in_bfloat16_are_rounded_once(held: str, tmp_path: Path) -> None:
    base = weights.load(TINY, param_dtype=held)
    model = adapted(base.model)
    apart = write_hf(model, base.tokenizer, tmp_path / "out", source=TINY, dtype="bfloat16")
    assert 0 < apart.max_difference < 0.1 * apart.max_logit
    linear = projections(model)["layers.1.mlp.up_proj"]
    w, a, b = (np.asarray(x[...], np.float64) for x in (linear.kernel, linear.lora.a, linear.lora.b))
    stored = written(tmp_path / "out")["model.layers.1.mlp.up_proj.weight"]
    assert stored.dtype == jnp.bfloat16
    np.testing.assert_allclose(stored.astype(np.float64).T, w + linear.lora.scale * a @ b, rtol=2**-8, atol=1e-6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


# --- what would be wrong is found, and leaves nothing


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A place to write to; whatever the test does, nothing half written is left beside it."""
    (tmp_path / "room").mkdir()
    yield tmp_path / "room" / "out"
    assert [path.name for path in (tmp_path / "room").iterdir() if path.name != "out"] == []


def test_numbers_in_another_order_are_found(
    tiny: weights.LoadedModel, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap: safetensors writes the memory of an array that is not C-contiguous as it lies."""
    monkeypatch.setattr(files.np, "ascontiguousarray", lambda x: x)
    with pytest.raises(WeightsError, match="was not written as it is in memory"):
        write_hf(tiny.model, tiny.tokenizer, out, source=TINY)
    assert not out.exists()


def test_another_model_is_found(tiny: weights.LoadedModel, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap: adapters merged by a transpose, which a square matrix does not notice."""
    wrong = lambda linear, dtype: linear.kernel[...].T if len(set(linear.kernel.shape)) == 1 else linear.kernel[...]  # noqa: E731
    monkeypatch.setattr(files, "merge_kernel", wrong)
    with pytest.raises(WeightsError, match="what was written is another model"):
        write_hf(tiny.model, tiny.tokenizer, out, source=TINY)
    assert not out.exists()


def test_what_is_there_stays(tiny: weights.LoadedModel, out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(CoveyError, match="something is already here"):
        write_hf(tiny.model, tiny.tokenizer, out)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    shutil.rmtree(out)
    out.write_text("a file")
    with pytest.raises(CoveyError, match="something is already here"):
        write_hf(tiny.model, tiny.tokenizer, out)
    assert out.read_text() == "a file"


def test_what_came_while_writing_stays_too(
    tiny: weights.LoadedModel, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*_: Any) -> files.Difference:
        out.mkdir()
        (out / "other.txt").touch()
        return files.Difference(0, 1)

    monkeypatch.setattr(hf, "compare_logits", compare)
    with pytest.raises(CoveyError, match="something is already here"):
        write_hf(tiny.model, tiny.tokenizer, out, source=TINY)
    assert [path.name for path in out.iterdir()] == ["other.txt"]


def test_an_empty_folder_is_taken_and_parents_are_made(tiny: weights.LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "a" / "b"):
        write_hf(tiny.model, tiny.tokenizer, place)
        assert (place / "config.json").is_file()


def test_a_place_that_cannot_be_written_is_named(tiny: weights.LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CoveyError, match="cannot be written"):
        write_hf(tiny.model, tiny.tokenizer, tmp_path / "file" / "out")
