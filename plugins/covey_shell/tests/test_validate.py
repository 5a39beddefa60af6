"""`covey validate`: all mistakes of a recipe at once, without JAX."""

import json
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from covey.cli import main as cli
from covey.config import recipe
from covey.errors import WeightsError
from covey.models.loading import weights

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a file of prompts, whose column `answer` reward functions of GSM8K need."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("bare.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    return tmp_path


def validate(capsys: Any, *words: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["validate", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", recipe.names())
def test_built_in_recipes_are_valid(name: str, capsys: Any) -> None:
    if re.search("guess|wordle|tools", name):
        pytest.importorskip("covey_envs")
    words = NEEDED.get(name, "").split()
    code, found = validate(capsys, name, *words)
    assert (code, found["recipe"], found["valid"], found["problems"]) == (0, name, True, [])
    assert {"settings", "model", "data", "run folder"} <= set(found["found"])


NEEDED = {
    "arithmetic-tiny": "--model.source smollm2-135m",
    "guess-tiny": "--model.source smollm2-135m",
    "wordle-tiny": "--model.source smollm2-135m",
    "arithmetic-gemma3": "--model.source smollm2-135m",
    "gsm8k-nanochat": "--model.source smollm2-135m",
    "gsm8k-tools": "--model.source smollm2-135m --data.task jsonl --data.path rows.jsonl --data.system S",
    "gsm8k-smollm2": "--data.task jsonl --data.path rows.jsonl",
    "sft-smollm2": "--data.path rows.jsonl --data.completion-column answer",
}
"""What a recipe needs that is not on every machine: the run of another recipe, a checkpoint, a file."""


def test_all_mistakes_are_listed_together(capsys: Any) -> None:
    Path("mine.yaml").write_text("rewards: [frst_letter, exact_answr]\nmodel: {source: ./nowhere}\nseed: 1\n")
    code, found = validate(capsys, "mine.yaml", "--data.task", "jsonl", "--data.path", "nowhere.jsonl")
    assert (code, found["valid"]) == (2, False)
    assert [one["what"] for one in found["problems"]] == [
        "no checkpoint called './nowhere': neither a known name nor a path",
        "there is no nowhere.jsonl",
        "there is no reward function 'frst_letter'",
        "there is no reward function 'exact_answr'",
    ]
    assert set(found["found"]) == {"settings", "run folder"}


def test_lines_and_columns_of_the_data_are_read(capsys: Any) -> None:
    words = ("gsm8k-smollm2", "--data.task", "jsonl", "--data.path")
    assert validate(capsys, *words, "rows.jsonl")[0] == 0
    code, found = validate(capsys, *words, "bare.jsonl")
    assert (code, "asks for 'answer'" in found["problems"][0]["what"]) == (2, True)
    with Path("rows.jsonl").open("a") as file:
        file.write('{"prompt": "x"\n')
    assert validate(capsys, *words, "rows.jsonl")[1]["problems"][0]["where"] == "rows.jsonl:21"


def test_mistakes_go_to_standard_error_and_the_rest_is_shown(capsys: Any) -> None:
    Path("runs/taken").mkdir(parents=True)
    Path("runs/taken/file\x1b[2J").touch()
    assert cli.main(["validate", "quickstart", "--out", "runs/taken"]) == 2
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1] == "ok    model      smollm2-135m"
    assert "runs/taken: this folder is not empty" in shown.err
    assert not Path("runs/quickstart-1").exists()


HOSTILE = """
from pathlib import Path

Path("executed").touch()


def judge(prompts, completions, **columns):
    return [0.0] * len(prompts)


class Game:
    pass
"""


@pytest.mark.parametrize(
    "line",
    [
        "rewards: [theirs:judge, first_letter]",
        "rewards: [first_letter]\nevaluation: {accuracy: theirs:judge}",
        "envs: {environment: theirs:Game}",
        "envs: {environment: trl:theirs:Game}",
        "envs: {environment: verifiers:theirs}",
        "rewards: [first_letter]\nenvs: {tools: [theirs:judge, calculator]}",
        "method: sft\nevaluation: {accuracy: theirs:judge}",
    ],
)
def test_without_imports_no_module_of_a_recipe_is_executed(line: str, capsys: Any) -> None:
    if "envs" in line:
        pytest.importorskip("covey_envs")
    Path("theirs.py").write_text(HOSTILE)
    Path("rows.jsonl").write_text('{"prompt": "a", "letter": "A", "completion": "b"}\n' * 4)
    Path("mine.yaml").write_text(f"{line}\nmodel: {{source: smollm2-135m}}\ndata: {{task: jsonl, path: rows.jsonl}}\n")
    code, found = validate(capsys, "mine.yaml", "--no-import")
    assert (code, found["problems"]) == (0, [])
    assert not Path("executed").exists()
    assert "theirs" in found["found"]["not imported"]
    assert "theirs" not in found["found"].get("rewards", "")
    assert cli.main(["validate", "mine.yaml", "--no-import"]) == 0
    assert "\n--    not imported" in capsys.readouterr().out
    validate(capsys, "mine.yaml")
    sys.modules.pop("theirs", None)
    assert Path("executed").exists() or "verifiers" in line  # that package is asked for first


def test_without_imports_other_mistakes_are_found(capsys: Any) -> None:
    Path("mine.yaml").write_text("rewards: [frst_letter, theirs:judge]\nmodel: {source: ./nowhere}\n")
    code, found = validate(capsys, "mine.yaml", "--no-import")
    assert (code, len(found["problems"])) == (2, 2)


def test_equal_rows_and_held_out_rows_that_are_trained_on_are_told(capsys: Any) -> None:
    """A file whose last tenth is held out, as in a run of one prompt that reached 100 % and had learnt one answer."""
    rows = [{"id": n, "prompt": "2+2?" if n % 2 else " 2+2? ", "answer": "4"} for n in range(200)]
    Path("same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["gsm8k-smollm2", "--data.task", "jsonl", "--data.path"]
    code, found = validate(capsys, *words, "same.jsonl")
    distinct = "180 training rows, 1 distinct (2 with case and white space)"
    assert code == 0
    assert found["found"]["duplicates"] == f"{distinct}; 20 of 20 held-out rows are training rows"
    assert "duplicates" not in validate(capsys, *words, "rows.jsonl")[1]["found"]


def broken(folder: Path, how: str) -> None:
    """Spoil a checkpoint."""
    tensors = {k: v for file in folder.glob("*.safetensors") for k, v in safetensors.numpy.load_file(file).items()}
    settings = json.loads((folder / "config.json").read_text())
    if how == "config":
        settings["num_attention_heads"] = 3
    if how == "head":
        tensors["score.weight"] = np.ones((1, 64), np.float32)
        del tensors["lm_head.weight"]
    if how == "names":
        del tensors["model.norm.weight"]
    if how == "shapes":
        tensors["model.norm.weight"] = np.ones(63, np.float32)
    if how == "types":
        tensors["model.norm.weight"] = np.ones(64, np.int8)
    if how == "vocabulary":
        settings["eos_token_id"] = 300
    if how == "tokenizer":
        (folder / "tokenizer.json").unlink()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("how", ["", "config", "head", "names", "shapes", "types", "vocabulary", "tokenizer"])
def test_a_folder_that_cannot_be_loaded_is_no_ok_model(how: str, capsys: Any) -> None:
    shutil.copytree(ROOT / "tests" / "parity" / "golden" / "tiny-llama", "tiny")
    broken(Path("tiny"), how)
    code, found = validate(capsys, "quickstart", "--model.source", "tiny")
    assert (code, "model" in found["found"], len(found["problems"])) == ((2, False, 1) if how else (0, True, 0))
    with pytest.raises(WeightsError) if how else nullcontext():
        weights.load("tiny")


def test_an_adapter_of_another_model_is_not_ok(capsys: Any) -> None:
    pytest.importorskip("covey_formats.peft_reader")
    golden = ROOT / "tests" / "parity" / "golden"
    words = ("--model.source", str(golden / "tiny-llama"), "--model.adapter", str(golden / "peft-llama"))
    code, found = validate(capsys, "quickstart", *words)
    assert (code, "model" in found["found"], "adapter" in found["found"]) == (2, True, False)
    assert found["problems"][0]["fix"] == "the adapter belongs to another model"


@pytest.mark.parametrize(("role", "says"), [("critic", None), ("reward_model", "language model")])
def test_models_that_score_are_checked_too(role: str, says: str | None, capsys: Any) -> None:
    golden = str(ROOT / "tests" / "parity" / "golden" / "tiny-llama")
    algorithm = ("--grpo.algorithm", "ppo") if role == "critic" else ()
    _, found = validate(capsys, "quickstart", *algorithm, f"--{role.replace('_', '-')}", golden)
    told = [problem["what"] for problem in found["problems"] if problem["where"] == golden]
    assert len(told) == (says is not None)
    assert says is None or says in told[0]


def test_a_gguf_file_that_lacks_a_tensor_is_no_ok_model(capsys: Any) -> None:
    import gguf

    model = weights.load(ROOT / "tests" / "parity" / "golden" / "tiny-llama")
    write_gguf = pytest.importorskip("covey_formats.gguf_writer").write_gguf
    write_gguf(model.model, model.tokenizer, Path("out"))
    assert validate(capsys, "quickstart", "--model.source", "out/model.gguf")[0] == 0
    held = gguf.GGUFReader("out/model.gguf")
    name = next(tensor.name for tensor in held.tensors if tensor.name.endswith("ffn_up.weight")).encode()
    data = Path("out/model.gguf").read_bytes().replace(name, name.replace(b"ffn_up", b"ffn_xx"))
    Path("other.gguf").write_bytes(data)
    code, found = validate(capsys, "quickstart", "--model.source", "other.gguf")
    assert (code, "model" in found["found"]) == (2, False)
    assert "ffn_up.weight is missing" in found["problems"][0]["what"]
