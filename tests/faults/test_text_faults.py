"""Text from models, data and environment, wherever it is shown or written: it does nothing, and tells no secret.

And nothing in the package can run what it reads: no pickle, no `eval`, no YAML with tags.
"""

import ast
import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from covey.cli.main import main
from covey.config import recipe
from covey.display import check_no_secrets, mask_secrets, printable, show_log
from covey.errors import RecipeError
from covey.monitor.formats import SampleLine
from covey.monitor.progress import Progress
from covey.monitor.run_files import SAMPLES
from covey.monitor.writer import MetricsWriter, group_lines, group_rows, read_rows
from covey.types import Completion, FinishReason, Group

PACKAGE = Path(__file__).parents[2] / "covey"
NASTY = "\x1b]0;title\x07\x1b[2J\x1b[31mred\u202egnp.exe\u2066\r\x00\x9b5m[bold]x[/bold]\ud800<script>|`"
"""What terminals obey: titles, erasing, colours, direction of writing, C1 codes; and markup of rich, HTML, Markdown."""
CONTROLS = [chr(n) for n in (*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2066, 0xD800)]
SECRET = "hf_abcdefghijklmnop"


def clean(text: str) -> bool:
    return not any(mark in text for mark in CONTROLS)


# --- terminal and files


def test_nothing_of_a_model_moves_the_cursor() -> None:
    out = io.StringIO()
    with Progress(3, Console(file=out, width=400, highlight=False)) as progress:
        progress.phase(f"loading {NASTY}")
        progress.message(NASTY)
        row = {"step": 1, "reward": 0.5}
        progress.step(row, [SampleLine(NASTY, NASTY, 1.0), SampleLine("p", "t", 0.0)])
        progress.evaluation(f"before {NASTY}", {"reward": 0.5}, [SampleLine(NASTY, NASTY, 1.0)])
        progress.evaluation("before", {f"{NASTY}/reward": 0.5}, [])
        progress.done({"before": {}, "after": {}}, f"runs/{NASTY}")
    assert clean(out.getvalue())
    assert "[bold]x[/bold]" in out.getvalue()  # shown, not obeyed


def test_an_error_shows_a_name_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    name = "x\x1b[31m\u202e.jsonl"
    Path(name).write_text('{"a\x1b[2J": 1}\n')
    assert main(["train", "quickstart", "data.task=jsonl", f"data.path={name}"]) == 2
    assert main(["train", f"no\x1b[2Jwhere{NASTY.replace(chr(0), '')}"]) == 2
    told = capsys.readouterr().err
    assert "\\x1b[31m" in told
    assert clean(told)


def test_the_names_of_metrics_move_nothing_either() -> None:
    """A reward's name is in them, and the recipe may show them."""
    for terminal in (False, True):
        out = io.StringIO()
        console = Console(file=out, width=400, force_terminal=terminal, color_system=None)
        with Progress(3, console, show=(NASTY, "[bold]b[/bold]")) as progress:
            progress.step({"step": 1, "reward": 0.5, NASTY: 1.0, "[bold]b[/bold]": 1.0})
        marks = set(CONTROLS) - ({"\x1b", "\r"} if terminal else set())  # a live view moves the cursor itself
        assert not any(mark in out.getvalue() for mark in marks)
        # A heading of the table is the last part of a name.
        assert ("bold]" if terminal else "[bold]b[/bold]") in out.getvalue()
        assert "\x1b[2J" not in out.getvalue()


def test_without_a_command_the_log_is_that_of_the_program(caplog: pytest.LogCaptureFixture) -> None:
    """A library installs no handler; a command shows each message once, and leaves the logger as it was."""
    log, found = logging.getLogger("covey"), list[str]()
    before = (log.level, log.propagate, list(log.handlers))
    assert not log.handlers
    with show_log(info=found.append, warning=lambda text: found.append(f"warning: {text}")):
        logging.getLogger("covey.run").debug("detail")
        logging.getLogger("covey.run").info("50 % done")
        logging.getLogger("covey.run").error("failed")
    assert found == ["50 % done", "warning: failed"]
    assert (log.level, log.propagate, list(log.handlers)) == before
    assert not caplog.messages
    logging.getLogger("covey.run").warning("for the program")
    assert caplog.messages == ["for the program"]


def test_a_recipe_is_printed_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("covey_shell")
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("name: x\n# \x1b[2J \x9b31m \u202e\n", encoding="utf-8")
    assert main(["recipes", "r.yaml"]) == 0
    assert clean(told := capsys.readouterr().out)
    assert told.startswith("name: x\n# \\x1b[2J ")
    Path("r.yaml").write_bytes(b"\xff")
    assert main(["recipes", "r.yaml"]) == 2


def test_samples_are_one_json_object_a_line_whatever_is_in_them(tmp_path: Path) -> None:
    none = np.zeros(1)
    group = Group(NASTY, np.array([1]), (Completion(none, none, none, FinishReason.STOP, NASTY + "\u2028\n"),))
    with MetricsWriter(tmp_path) as writer:
        writer.lines("samples.jsonl", group_lines(group_rows, 1, [group], [0]))
    (row,) = read_rows(tmp_path / SAMPLES)
    assert row["text"] == NASTY + "\u2028\n"
    raw = (tmp_path / SAMPLES).read_bytes()
    assert raw.count(b"\n") == 1
    assert clean(raw[:-1].decode())  # what a terminal obeys stands as an escape of JSON's own


def test_a_model_card_is_text(tmp_path: Path) -> None:
    """Of a recipe that came from elsewhere, in a run folder that did."""
    exporting = pytest.importorskip("covey_formats.export")
    run = tmp_path / "run"
    run.mkdir()
    described = json.dumps(f"{NASTY}\n\n<img src=x onerror=y>\n| a | b |")
    source = json.dumps(f"{tmp_path}/base`<b>\x1b[2J")
    (run / "recipe.yaml").write_text(
        f"rewards: [first_letter]\ndescription: {described}\nmodel: {{source: {source}}}\n"
    )
    (run / "summary.json").write_text(json.dumps({"before": {f"a|{NASTY}": 1.0}, "after": {f"a|{NASTY}": 2.0}}))
    card = exporting.model_card(exporting.Lineage.of(str(run)), "gguf")
    assert clean(card)
    assert "<script>" not in card
    assert "<img" not in card
    assert "| a |" not in card
    assert all(line.replace("\\|", "").count("|") in (0, 3, 4) for line in card.splitlines())


LINKS = (
    "https://evil.example/?a=b&c",
    "HTTP://evil.example",
    "www.evil.example",
    "ftp://evil.example",
    "me@evil.example",
)


def without_code(card: str) -> str:
    return re.sub(r"`[^`\n]+`", "", re.sub(r"```.*?```", "", card, flags=re.S))


@pytest.mark.parametrize("link", LINKS)
def test_a_model_card_has_no_links_but_that_of_its_base(link: str, tmp_path: Path) -> None:
    """Markdown makes links of bare addresses; in code it does not."""
    exporting = pytest.importorskip("covey_formats.export")
    run = tmp_path / "run"
    run.mkdir()
    ready = {"rewards": ["first_letter"], "description": f"See <{link}>, ({link}) and `{link}`.", "critic": None}
    (run / "recipe.yaml").write_text(json.dumps(ready | {"model": {"source": f"hf:org/name) {link}"}}))
    summary = {"model": f"hf:org/x`{link}`\n\n{link}", "before": {f"a {link}": 1.0}, "after": {}}
    (run / "summary.json").write_text(json.dumps(summary))
    card = exporting.model_card(exporting.Lineage.of(str(run)), "transformers")
    assert f"`{link}`" in card
    assert link not in without_code(card)
    assert "](https://huggingface.co/org/name)" not in card
    alone = exporting.model_card(exporting.Lineage((), "models/www.evil.example <b>x`"), "gguf")
    assert not any(mark in without_code(alone) for mark in ("<b>", "evil.example"))


# --- secrets


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("MY_SECRET_2", SECRET[::-1])
    monkeypatch.setenv("SSH_KEY_FILE", str(PACKAGE))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return SECRET


def test_secrets_are_shown_nowhere(secret: str, tmp_path: Path) -> None:
    out = io.StringIO()
    with Progress(1, Console(file=out, width=400)) as progress:
        progress.phase(f"fetching x?token={secret}")
        progress.message(f"401 for {secret}")
        progress.step({"step": 1, "reward": 1.0}, [SampleLine(secret, secret[::-1], 1.0)])
    assert secret not in out.getvalue()
    assert secret[::-1] not in out.getvalue()
    assert mask_secrets({"a": [secret, (f"x{secret}", 1)]}) == {"a": ["***", ["x***", 1]]}
    assert printable(f"{PACKAGE} false") == f"{PACKAGE} false"  # paths and short words are no secrets


def test_an_error_shows_no_secret(secret: str, capsys: Any) -> None:
    assert main(["train", f"https://user:{secret}@example.test/recipe.yaml"]) == 2
    assert secret not in capsys.readouterr().err


def test_a_recipe_with_a_secret_is_not_written_down(secret: str, tmp_path: Path) -> None:
    from covey import recipes

    source = str(PACKAGE.parent / "tests" / "parity" / "golden" / "tiny-llama")
    ready = recipe.load("quickstart", [f"model.source={source}", f"description=from x?token={secret}"])
    with pytest.raises(RecipeError, match="the value of the environment variable HF_TOKEN") as caught:
        recipes.train(ready, tmp_path / "run")
    assert secret not in str(caught.value)
    assert not (tmp_path / "run").exists()
    check_no_secrets(recipe.to_yaml(recipe.load("quickstart", [f"model.source={PACKAGE}"])))


# --- nothing is run that was read


FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "torch",
    "multiprocessing",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("os", "system")}


def offences(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                found.append(node.func.id)
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                found += ["attribute"] if (node.func.value.id, node.func.attr) in FORBIDDEN_ATTRIBUTES else []
            for word in node.keywords:
                is_true = isinstance(word.value, ast.Constant) and word.value.value is True
                found += [str(word.arg)] if word.arg in ("allow_pickle", "shell") and is_true else []
    return found


@pytest.mark.parametrize(
    "line", ["import pickle", "from torch.nn import x", "eval(x)", "yaml.load(x)", "np.load(f, allow_pickle=True)"]
)
def test_an_offence_is_seen(line: str) -> None:
    assert offences(ast.parse(line))


@pytest.mark.slow
def test_the_package_runs_nothing_that_it_reads() -> None:
    """Pickle runs what a file says, and so do `eval` and YAML's tags; `multiprocessing` pickles. Only the locked-in
    child of the Python tool executes what a model has written, and nothing imports it. Nor does anything import TRL's
    adapter, which the Python of TRL's environment executes.
    """
    root = PACKAGE.parent
    sources = [file for folder in ("covey", "plugins") for file in (root / folder).rglob("*.py")]
    files = {f.relative_to(root).as_posix(): ast.parse(f.read_text()) for f in sources if "tests" not in f.parts}
    found = {name: offences(tree) for name, tree in files.items()}
    executing = {name: what for name, what in found.items() if what}
    assert executing == {
        "plugins/covey_sandbox/python_tool/native_child.py": ["exec", "compile"],
        "plugins/covey_conformance/adapters/trl.py": ["torch"],
    }
    imports = [
        node for tree in files.values() for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not [node for node in imports if "native_child" in ast.unparse(node)]
