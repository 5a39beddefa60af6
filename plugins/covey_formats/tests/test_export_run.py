"""`covey export` on runs: what comes out is what the run learnt, its card says how, and an adapter goes on where it
was.
"""

import io
import json
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from covey import recipes
from covey.cli.main import main
from covey.config import recipe
from covey.config.schema import ModelOptions
from covey.errors import ResumeError
from covey.models.loading import weights
from covey.models.lora import has_lora, projections
from covey_formats.files import causal_logits
from covey_formats.peft_reader import load_adapter
from tests.one_layer import ONE_LAYER

TESTS = Path(__file__).parents[3] / "tests"
TINY = str(ONE_LAYER)
TOKENS = np.random.RandomState(0).randint(0, 300, (2, 24))
SETTINGS = [
    *(TESTS / "faults" / "small_run.txt").read_text().split(),
    "data.task=jsonl",
    f"data.path={TESTS / 'letters.jsonl'}",
    "rollout.temperature=2",
    "training.max_steps=2",
    "training.actor_optimizer.learning_rate=1e-2",
]
LORA = ("model.lora.rank=4", "model.lora.targets=[q_proj, '.*mlp.*']", "model.lora.dropout=0.1")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs")]


def ready(source: str, *more: str) -> recipe.Recipe:
    return recipe.load("quickstart", [f"model.source={source}", *SETTINGS, *more])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with adapters and dropout."""
    out = tmp_path_factory.mktemp("runs") / "first"
    recipes.train(ready(TINY, *LORA), out)
    return out


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with what each format writes of the run, and what the commands print."""
    out, shown = tmp_path_factory.mktemp("exported"), io.StringIO()
    with redirect_stdout(shown):
        for kind in ("hf", "peft", "gguf"):
            assert main(["export", str(trained), "--out", str(out / kind), "--format", kind]) == 0
    return out, shown.getvalue()


def test_a_run_goes_out_whole_and_as_an_adapter(trained: Path, exported: tuple[Path, str]) -> None:
    out, shown = exported
    model = recipes.open_model(str(trained), ModelOptions())[0]
    learnt, start = causal_logits(model, TOKENS), weights.load(TINY).model
    assert has_lora(model)
    assert np.abs(learnt - causal_logits(start, TOKENS)).max() > 1e-3
    assert shown.count("logits of what was read back differ by") == 3
    whole = [weights.load(out / "hf").model, weights.load(out / "gguf" / "model.gguf").model]
    for again in (*whole, load_adapter(start, out / "peft")):
        np.testing.assert_allclose(causal_logits(again, TOKENS), learnt, atol=1e-4)
    config = json.loads((out / "peft" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    assert config["lora_dropout"] == 0.1


def test_no_exported_file_names_a_path_of_this_machine(trained: Path, exported: tuple[Path, str]) -> None:
    """The base is called by its folder's name, and whoever exports is told so."""
    out, shown = exported
    for kind in ("hf", "peft", "gguf"):
        held = b"".join(file.read_bytes() for file in (out / kind).iterdir())
        assert not [path for path in (trained.parent, out, Path(TINY).parent) if str(path).encode() in held]
    config = json.loads((out / "peft" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny-llama"
    assert "adapter_config.json calls the base 'tiny-llama'" in shown


def test_a_tokenizer_that_gguf_cannot_hold_is_refused_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys.modules["covey_formats.export"], "load_for", lambda *_: pytest.fail("the weights were read")
    )
    words = ["export", "scratch:arithmetic-tiny", "--out", str(tmp_path / "x"), "--format", "gguf"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "no GGUF file can hold this tokenizer" in told
    assert "fix: --format hf, which transformers" in told


def test_the_card_tells_the_run(trained: Path, exported: tuple[Path, str]) -> None:
    card, summary = (exported[0] / "hf" / "README.md").read_text(), json.loads((trained / "summary.json").read_text())
    for words in ("library_name: transformers", "Base model: `tiny-llama`", "quickstart", "| algorithm | grpo |",
                  "LoRA, rank 4, alpha 32", "2 steps", "| seed | 0 |"):  # fmt: skip
        assert words in card
    before, after = (f"{summary[when]['accuracy']:.4g}" for when in ("before", "after"))
    assert f"| accuracy | {before} | {after} |" in card
    assert str(Path(TINY).parent) not in card  # nothing of this machine


def test_an_adapter_is_trained_on_from_where_it_was(trained: Path, exported: tuple[Path, str], tmp_path: Path) -> None:
    """And the base of what comes out is still the base; a run begun with it goes on with no other."""
    adapter = shutil.copytree(exported[0] / "peft", tmp_path / "adapter")
    settings = ready(TINY, f"model.adapter={adapter}", "model.lora.rank=0")
    recipes.train(settings, tmp_path / "second")
    first, second = (recipes.open_model(str(folder), ModelOptions())[0] for folder in (trained, tmp_path / "second"))
    pairs = list(zip(projections(first).values(), projections(second).values(), strict=True))
    assert [a.lora is None for a, _ in pairs] == [b.lora is None for _, b in pairs]
    moved = [float(np.abs(np.asarray(a.lora.b[...] - b.lora.b[...])).max()) for a, b in pairs if a.lora is not None]
    assert 0 < max(moved) < 0.1  # two steps at 1e-2 from where it was
    assert main(["export", str(tmp_path / "second"), "--out", str(tmp_path / "again"), "--format", "peft"]) == 0
    again = load_adapter(weights.load(TINY).model, tmp_path / "again")
    np.testing.assert_allclose(causal_logits(again, TOKENS), causal_logits(second, TOKENS), atol=1e-4)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
    with pytest.raises(ResumeError, match="began with the weights"):
        recipes.resume(tmp_path / "second", ["training.max_steps=4"])


def test_a_run_on_a_run_is_told_and_written_whole(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own adapters belong on the first run's model, which nobody else has: the answer names the command that
    merges, and it works.
    """
    recipes.train(ready(str(trained), *LORA, "name=second"), tmp_path / "second")
    out = tmp_path / "merged"
    words = ["export", str(tmp_path / "second"), "--out", str(out)]
    capsys.readouterr()
    assert main([*words, "--format", "peft"]) == 2
    answer = capsys.readouterr()
    assert "belong on the model that the run 'first' left" in answer.err
    assert "loading" not in answer.out
    assert " ".join(["covey", *words]) in answer.err
    assert not out.exists()
    assert main(words) == 0
    learnt = recipes.open_model(str(tmp_path / "second"), ModelOptions())[0]
    np.testing.assert_allclose(causal_logits(weights.load(out).model, TOKENS), causal_logits(learnt, TOKENS), atol=1e-4)
    card = (out / "README.md").read_text()
    assert card.index("## Recipe quickstart") < card.index("## Recipe second")


EXPORT, TRAIN = ["export", TINY], ["train", "quickstart", f"--model.source={TINY}"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*EXPORT, "--format", "hf"], "no folder is given to export to"),
        ([*EXPORT, "--out", "x", "--format", "onnx"], "wanted: hf, peft, gguf"),
        ([*EXPORT, "--out", "x", "--format", "peft"], "no LoRA adapters"),
        ([*EXPORT, "--out", "x", "--format", "peft", "--dtype", "bfloat16"], "--dtype has no meaning for adapters"),
        ([*EXPORT, "--out", "x", "--dtype", "q8_0"], "wanted: for --format hf one of: float32, bfloat16"),
        ([*EXPORT, "--out", "x", "--format", "gguf", "--dtype", "q4_k_m"], "llama-quantize model.gguf OUT.gguf Q4_K_M"),
        ([*EXPORT, "--out", "x", "--shard-size", "5XB"], "--shard-size is '5XB'"),
        ([*EXPORT, "--out", "x", "--shard-size", "0"], "--shard-size is '0'"),
        ([*EXPORT, "--out", "x", "--quantise", "q4"], "--quantise"),
        ([*TRAIN, "model.adapter=there", "model.lora.rank=4"], "model.adapter brings its own"),
        ([*TRAIN, "model.adapter=there", "model.lora.rank=0"], "no adapter_config.json here"),
        ([*TRAIN, "model.lora.targets=[q_porj]"], "did you mean 'q_proj'"),
        ([*TRAIN, "model.lora.dropout=1"], "model.lora.dropout is 1"),
    ],
)
def test_mistakes_are_answered_and_nothing_is_written(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
