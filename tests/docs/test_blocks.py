"""Every block of Python and YAML of the documents is executed on a tiny model, or listed here with the reason. The
commands of a first run are executed too; `test_architecture` parses all others.

What is executed here is so as it stands, but for models and numbers, which are replaced by small ones.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.config import recipe
from tests.one_layer import ONE_LAYER

ROOT = Path(__file__).parents[2]
TINY = ONE_LAYER
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))

pytestmark = pytest.mark.usefixtures("shared_programs")

# --- the one list of what is not executed here

PEER = "needs another library, which has an environment of its own"
FRAGMENT = "a fragment of a script or of the package, without what is around it"

LISTED_BLOCKS = {
    ("docs/model-family-steps.md", "def read_qwen3(c: Config)"): FRAGMENT,
    ("docs/model-family-steps.md", '"qwen3": Family('): FRAGMENT,
    ("docs/add-a-model.md", "import AutoModelForCausalLM"): PEER,
    ("docs/add-a-reward.md", "reward_fns=[brevity]"): "one line; other blocks make a learner in the same way",
    (
        "docs/reward-failures.md",
        "with RewardRunner(",
    ): "covey_sandbox/tests/test_reward_faults.py executes workers",
    ("docs/api/train_grpo.md", "train_grpo("): "README.md has the same call",
    ("docs/environment-libraries.md", "import reasoning_gym"): PEER,
    ("docs/environment-libraries.md", "import textarena"): PEER,
    ("docs/conformance-adapter.md", "def group_advantages("): "test_defects.py of covey_conformance executes the file",
    (
        "docs/verifiers.md",
        "import verifiers",
    ): "plugins/covey_envs/tests/test_verifiers.py plays it where verifiers is installed",
    ("docs/first-run.md", "import AutoModelForCausalLM"): PEER,
    ("docs/from-trl.md", "from trl import"): PEER,
    ("docs/from-tunix.md", "from tunix."): PEER,
    ("docs/from-verl.md", "def compute_score("): "verl's form of the function that the next block has in Covey's",
    ("docs/grpo-in-one-file.md", "def grpo_step("): "tests/test_one_file.py executes the file",
    ("docs/measurements.md", "preferred_element_type"): "two lines of a remark on what XLA compiles, without imports",
    ("docs/mistakes.md", ""): "files with mistakes, which tests/cli/test_mistakes.py writes",
    ("docs/mesh.md", "devices[4:8]"): "needs eight devices; tests/rl/test_cluster.py has roles on separate meshes",
}
"""Reason by page and by a part of the block."""

STORY = [
    "covey recipes",
    "covey recipes quickstart > mine.yaml",
    "covey recipes arithmetic-tiny > mine.yaml",
    "covey recipes gsm8k-nanochat",
    "covey train gsm8k-gemma2 --help",
    "covey doctor",
    "covey sft sft-tiny",
    "covey train arithmetic-tiny --out runs/sums",
    'covey generate runs/sums "17+25=" --temperature 0',
    "covey train mine.yaml --model.source runs/sft-tiny --data.task jsonl --data.path mine.jsonl --max-steps 30"
    " --out runs/mine",
    "covey report runs/mine",
    "covey export runs/mine --out exported",
]
"""Commands of the documents in an order in which each finds what it needs; they are executed one after the other."""

SMALL = shlex.split("--rollout.max-prompt-length 400 --rollout.max-new-tokens 3 --grpo.num-generations 2 --max-steps 1")
SMALL += shlex.split("--training.prompts-per-step 2 --grpo.max-sampling-rounds 1 --evaluation.prompts 2")
"""Settings that follow those of an RL command."""
SMALL_SFT = shlex.split("--max-steps 1 --batch-size 2 --rollout.max-prompt-length 99 --evaluation.prompts 2")
SMALL_SFT += shlex.split("--evaluation.answers 2")


# --- what there is


@dataclass(frozen=True)
class Block:
    """A block of code; `number` counts all blocks of its page, from 1."""

    page: str
    number: int
    language: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page}#{self.number}"

    @property
    def reason(self) -> str:
        """Reason why it is not executed; "" if it is."""
        found = [reason for (page, part), reason in LISTED_BLOCKS.items() if page == self.page and part in self.code]
        return found[0] if found else ""


def blocks() -> list[Block]:
    fence = re.compile(r"^```([^\n]*)\n(.*?)^```", re.M | re.S)
    included = re.compile(r'^--8<-- "([^"]+)"$', re.M)
    found = []
    for document in DOCUMENTS:
        text = included.sub(lambda match: (ROOT / match[1]).read_text("utf-8"), document.read_text("utf-8"))
        page = document.relative_to(ROOT).as_posix()
        for number, (language, code) in enumerate(fence.findall(text), 1):
            found.append(Block(page, number, re.sub(r"[{}. ]*(\w*).*", r"\1", language), code))
    return found


def commands() -> list[str]:
    """Return every shell command, without comments; a continued one in one line."""
    lines = [
        re.sub(r"\s+#\s.*|^#.*", "", line).strip()
        for block in blocks()
        if block.language in ("bash", "sh", "console") and not block.reason
        for line in block.code.replace("\\\n", " ").splitlines()
    ]
    return list(dict.fromkeys(re.sub(r"\s+", " ", line) for line in lines if line))


PYTHON = [block for block in blocks() if block.language == "python" and not block.reason]
YAML = [block for block in blocks() if block.language == "yaml" and not block.reason]


def test_what_the_lists_name_is_in_the_documents() -> None:
    gone = [key for key in LISTED_BLOCKS if not any(b.page == key[0] and key[1] in b.code for b in blocks())]
    assert gone == [], "a block of the list is gone"
    assert [command for command in STORY if command not in commands()] == [], "a command of STORY is gone"


def test_names_are_imported_from_covey_itself() -> None:
    """No script of the documents imports from a module of the package, but for the reason that is given here."""
    pattern = re.compile(r"^(?:from|import) covey\..*$", re.M)
    imported = {(block.page, line) for block in PYTHON for line in pattern.findall(block.code)}
    begins_processes = ("docs/scaling.md", "from covey.parallel import processes")  # before anything else is imported
    assert imported == {begins_processes}


# --- execution


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the modules that the pages write: a block that begins with `# name.py` is a part of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    modules = {"my_rewards.py": "def judge(completions):\n    return [0] * 9\n"}
    for block in PYTHON:
        if name := re.match(r"# (\w+\.py)\b", block.code):
            modules[name[1]] = modules.get(name[1], "") + "\n\n" + block.code
    for file, code in modules.items():
        (tmp_path / file).write_text(code)
    yield tmp_path
    for file in modules:  # another test may have modules of these names in a folder of its own
        sys.modules.pop(file.removesuffix(".py"), None)


def small(code: str) -> str:
    """Return a script with a tiny model and small numbers in place of its own."""
    code = re.sub(r'"(smollm2-135m|scratch:arithmetic-tiny)"', repr(str(TINY)), code).replace('"hf:', '"./')
    code = re.sub(r"prompts_per_step=\d+,?\s*", "", code).replace(
        "RLTrainingConfig(", "RLTrainingConfig(prompts_per_step=2, "
    )
    prompt = 999 if '"./' in code else 99  # the former lists tools
    numbers = {"max_steps": 1, "max_new_tokens": 3, "max_prompt_length": prompt, "num_generations": 2, "num_epochs": 1}
    for name, number in (numbers | {"temperature": 1.0}).items():  # one temperature: it is a part of the programs
        code = re.sub(rf"\b{name}=[\d.]+", f"{name}={number}", code)
    return code.replace("range(64)", "range(8)").replace("rows[:48]", "rows[:6]").replace("rows[48:]", "rows[6:]")


TRAINS = re.compile(r"\.train\(|train_grpo\(")


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.name, marks=[pytest.mark.slow] if TRAINS.search(block.code) else [])
        for block in PYTHON
    ],
)
def test_python_runs(block: Block, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And prints what a comment beside its `print` says."""
    for name in re.findall(r'"hf:([^"]+)"', block.code):  # a name in place of a download, with room for a list of tools
        shutil.copytree(TINY, folder / name)
        config = (TINY / "config.json").read_text().replace('embeddings": 512', 'embeddings": 4096')
        (folder / name / "config.json").write_text(config)
    code = small(block.code) if TRAINS.search(block.code) else block.code
    exec(compile(code, block.name, "exec"), {"__name__": "page"})
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    promised = re.findall(r"^print\(.*\) +# (.*)$", block.code, re.M)
    assert printed[: len(promised)] == promised


@pytest.mark.parametrize("block", YAML, ids=lambda block: block.name)
def test_yaml_is_part_of_a_recipe(block: Block, folder: Path) -> None:
    given = "" if re.search(r"^rewards:", block.code, re.M) else "rewards: [first_letter]\n"
    (folder / "part.yaml").write_text(f"name: part\n{given}{block.code}")
    assert recipe.load("part.yaml").name == "part"


@pytest.fixture
def runs(folder: Path) -> Path:
    """The working folder of the commands, with the file of prompts that a page writes."""
    [writes] = [block.code for block in PYTHON if '"mine.jsonl", "w"' in block.code]
    exec(compile(writes, "page", "exec"), {})
    return folder


@pytest.mark.slow
def test_commands_run(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on a tiny model, for one step, in one working folder."""
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # another test's, of another working folder
    for command in STORY:
        line, _, file = command.partition(" > ")
        words = shlex.split(line)[1:]
        assert main([*words, *more(words)]) == 0, command
        shown = capsys.readouterr().out
        if file:
            Path(file).write_text(shown.replace("[arithmetic_answer]", '["my_rewards:close"]'))
    made = {"sft-tiny", "sums", "mine"}
    assert {path.name for path in (runs / "runs").iterdir()} == made
    assert all((runs / "runs" / name / "report.html").exists() for name in made)
    assert (runs / "exported" / "model.safetensors").exists()


def more(words: list[str]) -> list[str]:
    """Return the settings that make a command small."""
    if "--help" in words or words[0] not in ("train", "sft", "generate"):
        return []
    if words[0] == "generate":
        return ["--max-new-tokens", "3"]
    model = ["--model.source", str(TINY)] if words[1] == "sft-tiny" else []
    return [*model, *(SMALL_SFT if words[0] == "sft" else SMALL)]
