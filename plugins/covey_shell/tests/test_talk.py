"""`covey generate` and `covey chat`: their words and settings, and what they print."""

import io
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.config import recipe
from covey.display import echo, show_log
from covey.rl.rollout_worker import RolloutWorker
from covey_shell import model
from covey_shell.command import GenerateOptions

MODEL = "smollm2-135m"
NASTY = "\x1b]0;title\x07\x1b[2J\x1b[31mred\u202egnp.exe\r\x00\x9b5m"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of the calls of stand-ins, which complete a prompt in two ways."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(model, "generate", lambda *words: made.append(words) or ["first\x1b[2J", "second\nline"])
    monkeypatch.setattr(model, "chat", lambda *words: made.append(words))
    return made


def test_generate_and_chat_start_from_the_rollout_of_the_run(
    calls: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "00000008").mkdir(parents=True)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(recipe.load("quickstart", ["rollout.temperature=0.7"])))
    run = str(tmp_path)
    assert main(["generate", run, "a=b --hello", "--n", "2", "--max-new-tokens", "9", "--seed", "3"]) == 0
    source, prompt, count, rollout = calls[0]
    assert (source, prompt, count) == (run, "a=b --hello", 2)
    assert (rollout.temperature, rollout.max_new_tokens, rollout.seed) == (0.7, 9, 3)
    assert capsys.readouterr().out == "--- 1 of 2\nfirst\\x1b[2J\n--- 2 of 2\nsecond\nline\n"
    assert main(["generate", MODEL, "--temperature=0", "--", "--what?"]) == 0
    assert (calls[1][1], calls[1][3].temperature) == ("--what?", 0.0)
    assert main(["chat", run, "--top-p", "0.9"]) == 0
    assert (calls[2][0], calls[2][1].top_p, calls[2][1].temperature) == (run, 0.9, 0.7)
    assert main(["generate", MODEL, "x", "--max-new-tokens", "0"]) == 2
    assert "--max-new-tokens" in capsys.readouterr().err
    assert replace(GenerateOptions(), seed=9).rollout.seed == 9


@pytest.mark.parametrize(("name", "value"), [("JAX_NUM_PROCESSES", "2"), ("COVEY_DISTRIBUTED", "auto")])
@pytest.mark.parametrize("words", [["generate", MODEL, "Hi"], ["chat", MODEL]])
def test_a_command_of_one_process_is_refused_in_several(
    words: list[str], name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert main(words) == 2
    told = capsys.readouterr().err
    assert f"covey {words[0]} runs in one process, and {name} is {value}" in told
    assert "COVEY_DISTRIBUTED=off" in told


@pytest.mark.slow
def test_a_chat_goes_on_after_a_line_that_cannot_be_answered(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Bytes that are no UTF-8 are answered; what is too long is refused by itself, and what was said before stays."""
    asked: list[list[dict[str, str]]] = []
    generate = RolloutWorker.generate

    def heard(self: RolloutWorker, prompts: Any, *args: Any, **more: Any) -> Any:
        asked.append(list(prompts[0]["prompt"]))
        return generate(self, prompts, *args, **more)

    monkeypatch.setattr(RolloutWorker, "generate", heard)
    lines = b"caf\xe9\n" + b"x" * 2_000_000 + b"\n" + "é \x9b. ".encode() * 300 + b"\nand then?\n\nnever read\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    source = str(Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama")
    assert main(["chat", source, "--max-new-tokens", "4", "--slots", "1"]) == 0
    told = capsys.readouterr().out
    assert told.count("> ") == 5
    assert told.count("this line is left out: ") == 2
    assert "tokens\n  wanted: at most " in told
    assert [message["content"] for message in asked[0]] == ["caf\ufffd"]
    assert [message["content"] for message in asked[-1]][::2] == ["caf\ufffd", "and then?"]


def test_what_is_told_about_a_source_is_escaped(capsys: Any) -> None:
    """Its name, and what a hub or an index says of it."""
    log = logging.getLogger("covey.models.loading.sources")
    with show_log(info=echo, warning=model._echo):
        log.info(NASTY)
        log.warning(NASTY)
    model._echo_to_stderr(NASTY)
    log.info(NASTY)
    told = "".join(capsys.readouterr())
    assert told.count("red\\u202egnp") == 3
    assert not {"\x1b", "\x07", "\u202e", "\r", "\x00", "\x9b"} & set(told)
