"""Files that are not what they should be, laid out for real and met by the command: what it says, and that it says it
without a traceback and with exit code 2.
"""

import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.cli.commands import COMMANDS
from covey.cli.main import main
from covey.errors import WeightsError
from covey.models.loading import weights

TINY = Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 4096\n"
SHARD = "model-00003-of-00004.safetensors"
SETTINGS = ["rollout.max_new_tokens=4", "training.max_steps=1", "grpo.num_generations=2", "evaluation.prompts=2"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to spoil."""
    shutil.copytree(TINY, tmp_path / "model")
    return tmp_path / "model"


def refused(capsys: Any, *words: str) -> str:
    """What the command says of `covey train quickstart` with these settings, which it has to refuse."""
    assert main(["train", "quickstart", "--out", "never", *SETTINGS, *words]) == 2
    assert not Path("never").exists()
    told: str = capsys.readouterr().err
    assert "Traceback" not in told
    return told


# --- weights


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (SHARD, lambda good: good[: len(good) // 2], "not a whole safetensors file"),
        (SHARD, lambda good: POINTER, "only a pointer of Git LFS is here"),
        (SHARD, lambda good: b"", "the file is empty"),
        (SHARD, lambda good: b"\xff" * 64, "not a whole safetensors file"),
        ("tokenizer.json", lambda good: POINTER, "only a pointer of Git LFS is here"),
        ("config.json", lambda good: good[:-20], "not JSON"),
        ("config.json", lambda good: b"", "the file is empty"),
    ],
)
def test_a_file_that_is_not_whole(
    model: Path, name: str, content: Callable[[bytes], bytes], told: str, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(model.parent)
    (model / name).write_bytes(content((model / name).read_bytes()))
    said = refused(capsys, f"model.source={model}")
    assert told in said
    assert name in said


def test_a_gguf_that_is_a_pointer(tmp_path: Path) -> None:
    pytest.importorskip("covey_formats")
    (tmp_path / "model.gguf").write_bytes(POINTER)
    with pytest.raises(WeightsError, match=r"pointer(.|\n)*git lfs pull"):
        weights.load(tmp_path / "model.gguf")


@pytest.mark.parametrize("entry", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors"])
def test_an_index_that_leaves_the_folder(model: Path, entry: str) -> None:
    index = model / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    shutil.copy(model / SHARD, model.parent / "outside.safetensors")
    described["weight_map"] = {k: entry if v == SHARD else v for k, v in described["weight_map"].items()}
    index.write_text(json.dumps(described))
    with pytest.raises(WeightsError, match="leaves the folder"):
        weights.load(model)


@pytest.mark.parametrize("name", [SHARD, "tokenizer.json", "config.json", "chat_template.jinja"])
def test_a_link_that_leads_out_of_the_folder(model: Path, name: str) -> None:
    """What it leads to would be read, and end up in exports and errors."""
    outside = model.parent / f"outside-{name}"
    (model / name).rename(outside)
    (model / name).symlink_to(outside)
    with pytest.raises(WeightsError, match="a link that leads out") as caught:
        weights.load(model)
    assert caught.value.where.endswith(name)
    (model / name).unlink()
    (model / name).symlink_to(model / "nowhere" / ".." / f"inside-{name}")
    (model / "nowhere").mkdir()
    outside.rename(model / f"inside-{name}")  # a link within the folder is the folder's own affair
    weights.load(model)


def test_the_links_of_the_hubs_cache_are_followed_and_no_others_there(model: Path) -> None:
    repository = model.parent / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", str(number)))
    assert weights.load(snapshot).config.num_layers == 2
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(model / "config.json")
    with pytest.raises(WeightsError, match="a link that leads out"):
        weights.load(snapshot)


def test_a_folder_that_is_a_link_is_the_users_own_word(model: Path) -> None:
    (model.parent / "link").symlink_to(model)
    weights.load(model.parent / "link")


def test_a_tokenizer_of_another_model(model: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(model.parent)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    assert "the tokenizer has 300 tokens and the model embeds 200" in refused(capsys, f"model.source={model}")


# --- configs that describe no model


def configured(model: Path, **fields: Any) -> Path:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | fields))
    return model


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", 10**400),
        ("num_attention_heads", 0),
        ("num_attention_heads", True),
        ("num_attention_heads", 3),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", 10**9),
        ("hidden_size", None),
        ("vocab_size", 2**31),
        ("head_dim", 15),
        ("tie_word_embeddings", "false"),
        ("rope_parameters", [30000.0]),
        ("rope_parameters", {"rope_type": "default", "rope_theta": float("nan")}),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}),
        ("rope_parameters", {"rope_type": ["linear"]}),
        ("hidden_act", ["silu"]),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "chunked_attention"]),
        ("layer_types", "full_attention"),
    ],
)
def test_a_config_that_describes_no_model_is_refused_by_field(model: Path, field: str, value: Any) -> None:
    changes = {field: value} | ({"head_dim": None} if (field, value) == ("num_attention_heads", 3) else {})
    with pytest.raises(WeightsError, match=field):
        weights.FolderCheckpoint(configured(model, **changes))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_a_billion_layers_are_refused_before_anything_is_made_of_them(model: Path, family: str) -> None:
    tracemalloc.start()
    with pytest.raises(WeightsError, match="num_hidden_layers"):
        weights.FolderCheckpoint(configured(model, model_type=family, num_hidden_layers=10**9))
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


# --- the disk


@pytest.mark.slow
def test_a_new_run_where_nothing_may_be_written(capsys: Any) -> None:
    """Nobody, root included, makes a folder in sysfs."""
    assert main(["train", "quickstart", "--out", "/sys/covey", f"model.source={TINY}", *SETTINGS]) == 2
    told = capsys.readouterr().err
    assert re.search(r"^/sys/covey\S*: .*(Read-only|not permitted|denied)", told)
    assert "\n  fix: " in told
    assert "--out" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("setting", ["data.path", "model.source", "model.adapter", "out", "name"])
def test_a_path_longer_than_the_system_allows(setting: str, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    task = "jsonl" if setting == "data.path" else "first-letter"
    assert main(["train", "quickstart", f"data.task={task}", f"{setting}={'x' * 3000}"]) == 2
    told = capsys.readouterr().err
    assert "File name too long" in told
    assert "\n  fix: a shorter name" in told


@pytest.mark.parametrize("words", [["train", "x" * 3000], ["eval", "x" * 3000], ["train", "--resume", "x" * 3000]])
def test_a_name_longer_than_the_system_allows(words: list[str], capsys: Any) -> None:
    assert main(words) == 2
    assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\xff\xfe", b"- a\n- b\n", b"just text", b"name: x\n" + b"#" * 10**6])
@pytest.mark.parametrize(
    "words", [["chat", "run"], ["generate", "run", "Hi"], ["eval", "run"], ["export", "run"], ["report", "run"]]
)
def test_a_run_whose_recipe_is_none(
    content: bytes, words: list[str], capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run", "checkpoints", "00000001").mkdir(parents=True)
    Path("run", "recipe.yaml").write_bytes(content)
    if words[0] not in COMMANDS:
        pytest.skip("a command of a plugin")
    out = ["--out", "export"] if words[0] == "export" else []
    if words[0] == "report":
        pytest.importorskip("covey_report")
    assert main([*words, *out]) == 2
    assert "run" in capsys.readouterr().err


# --- data


def rows(*prompts: Any, **columns: Any) -> str:
    return "".join(json.dumps({"prompt": prompt, **columns}) + "\n" for prompt in prompts)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file is empty"),
        ("\n\n", "the file is empty"),
        (rows("a", "", "b"), "the prompt is ''"),
        (rows("a", "  \n", "b"), "row 2"),
        (rows("a", None), "the prompt is None"),
        (rows("a", []), "the prompt is []"),
        (rows("a", [{"role": "user"}]), "want"),
        ('{"promt": "a"}\n{"promt": "b"}\n', "did you mean 'promt'?"),
        (rows("a") + "{\n", "data.jsonl:2: is not JSON"),
        (rows("only one"), "one row cannot be both trained on and held out"),
    ],
)
def test_data_with_a_hole(text: str, told: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """An empty prompt, an empty set, a missing column."""
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text(text)
    assert told in refused(capsys, f"model.source={TINY}", "data.task=jsonl", "data.path=data.jsonl")


@pytest.mark.parametrize(
    ("words", "function"),
    [
        (("train", "quickstart", "--out", "never", "rewards=first_letter"), "first_letter"),
        (
            ("train", "quickstart", "--out", "never", "rewards=number_only", "evaluation.partial=arithmetic_answer"),
            "arithmetic_answer",
        ),
        (("eval", str(TINY), "--recipe", "quickstart", "rewards=arithmetic_answer"), "arithmetic_answer"),
        (("sft", "sft-smollm2", "--out", "never", "evaluation.accuracy=arithmetic_answer"), "arithmetic_answer"),
    ],
)
def test_a_column_that_the_reward_asks_for_and_the_data_lack(
    words: tuple[str, ...], function: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Told before the model is loaded, and with the columns that there are."""
    if words[0] == "sft":
        pytest.importorskip("covey_sft")
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "a", "completion": "b", "anwser": "4", "letters": "A"}
    Path("data.jsonl").write_text(f"{json.dumps(row)}\n" * 10)
    without = ["evaluation.accuracy=", "evaluation.format="] if words[0] != "sft" else []
    rest = ["data.task=jsonl", "data.path=data.jsonl", f"model.source={TINY}"]
    assert main([*words[:2], *without, *rest, *words[2:]]) == 2
    out, said = capsys.readouterr()
    assert "loading" not in out
    assert not Path("never").exists()
    asked = "answer" if function == "arithmetic_answer" else "letter"
    assert ("evaluation.partial: the" in said) == ("evaluation.partial=arithmetic_answer" in words)
    assert f"the reward function '{function}' asks for '{asked}', which no data column gives" in said
    assert "columns of the data: anwser, " in said
    assert f"did you mean '{'anwser' if asked == 'answer' else 'letters'}'?" in said
