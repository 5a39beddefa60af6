"""Every block of code and every command of the documents is executed on a tiny model, or listed here with the reason.

What is executed here is so as it stands, but for models and numbers, which are replaced by small ones.
"""

import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.config import recipe

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "parity" / "golden" / "tiny-llama"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))

pytestmark = pytest.mark.usefixtures("shared_programs")

# --- the one list of what is not executed here

INSTALLS = "installs from a package index; a test of its own would take minutes"
ACCELERATOR = "needs devices or a scheduler that the tests do not have"
DOWNLOADS = "downloads a model; commands of the same verb are executed here on the tiny model"
PEER = "needs another library, which has an environment of its own"
BY_HAND = PEER + "; it was executed there once, on the tiny model"
BENCHMARK = "a measurement, which takes minutes"
FRAGMENT = "a fragment of a script or of the package, without what is around it"

LISTED_COMMANDS = {
    r"make (quickstart|install|test|lint)": INSTALLS,
    r"make tiny": "tests/e2e/test_tiny.py executes its two commands",
    r"make (bench|bench-peers)\b.*|(\w+=\d+ )?python -m benchmarks\b.*": BENCHMARK,
    r"\.venv/bin/python -m pip .*|\.venv/bin/pre-commit .*|source \.venv/bin/activate": INSTALLS,
    r"COVEY_KILLS=\d+ python -m pytest .*": "tests/faults/test_soak.py kills a run once",
    r"python examples/grpo_in_one_file\.py\b.*": "tests/test_one_file.py executes it with fewer steps",
    r"(XLA_FLAGS=\S+ )?python examples/gsm8k_gemma2\.py\b.*": "tests/test_examples.py executes it on a tiny Gemma 2",
    r"docker (build|run) .*": "tests/test_release.py compares the Dockerfile with the package",
    r"XLA_PYTHON_CLIENT_MEM_FRACTION=\S+ covey train quickstart": ACCELERATOR,
    r"export JAX_\w+=\S+": "tests/parallel/test_processes.py executes runs of several processes",
    r"COVEY_DISTRIBUTED=auto srun .*|gcloud .*": ACCELERATOR,
    r"covey train gsm8k-(gemma2|nanochat)\b.*": "tests/run/test_gsm8k_recipes.py executes both on tiny models",
    r"covey train gsm8k-smollm2 .*--model\.adapter .*": "tests/run/test_run.py trains on an adapter",
    r"covey train (quickstart|gsm8k-smollm2)\b.*--(mesh|model\.(source|compute-dtype))\b.*": DOWNLOADS,
    r"covey (train quickstart --grpo\.algorithm dapo|train gsm8k-smollm2|sft sft-(arithmetic|smollm2))\b.*": DOWNLOADS,
    r"covey generate smollm2-135m .*": DOWNLOADS,
    r"covey train mine\.yaml --grpo.*": "a copy of quickstart, which is executed here",
    r"covey train mine\.yaml .*--training\.checkpoint-path gs://.*": "tests/faults/test_kill_faults.py has a bucket",
    r"covey train arithmetic-tiny|covey generate runs/arithmetic-tiny-1 .*": "executed here with a folder of its own",
    r"covey train arithmetic-tiny --rewards .*": "executed here by a recipe that names the function",
    r"covey train quickstart( --(seed|checkpoint-every-n-steps) .*)?": "tests/run/test_run.py runs it on a tiny model",
    r"covey train --resume .*|covey eval runs/quickstart-1": "tests/run/test_run.py resumes and evaluates runs",
    r"covey report runs/quickstart-1.*": "executed here for another run; tests/report/test_page.py compares runs",
    r"covey watch .*": "tests/cli/test_watch.py executes it",
    r"covey validate .*": "tests/cli/test_validate.py executes it",
    r"covey train quickstart --dry-run": "tests/cli/test_dry_run.py executes it",
    r"covey rewards .*": "tests/cli/test_rewards.py executes it",
    r"covey (compare|push) .*": "tests/cli/test_runs.py executes both",
    r"covey completion .*": "tests/cli/test_completion.py executes the scripts",
    r"covey sft sft-smollm2 .*--model\.quantize .*": "tests/run/test_quantised_run.py executes quantised runs",
    r"covey sft --resume .*": "tests/run/test_sft_run.py resumes supervised runs",
    r"covey eval (RUN|hf:|runs/sft).*": DOWNLOADS,
    r"covey train tools-smollm2\b.*": DOWNLOADS,
    r"covey rollout guess-tiny .*|covey sft sft-(guess|wordle) && .*": "tests/envs plays the games of these recipes",
    r"covey launch .*": "tests/launch starts processes and writes job files",
    r"covey plan .*": "tests/plan and tests/aot execute plans",
    r"covey chat .*": "waits for lines of a user; tests/run/test_run.py talks to a run",
    r"covey export .*(merged|adapter|llama-cpp)\b.*": "tests/run/test_export_run.py executes each format",
    r"covey train arithmetic-tiny --seed 1 .*|covey sft sft-tiny --seed 1 .*": "the same as without the seed",
}
"""Reason by regular expression over a whole command; a command that is executed below is not looked up."""

LISTED_BLOCKS = {
    ("README.md", "[   0.0s] loading smollm2-135m"): "output",
    ("docs/add-a-model.md", "def read_qwen3(c: Config)"): FRAGMENT,
    ("docs/add-a-model.md", '"qwen3": Family('): FRAGMENT,
    ("docs/add-a-reward.md", "reward_fns=[brevity]"): "one line; other blocks make a learner in the same way",
    ("docs/add-a-reward.md", "[project.entry-points"): "tests/test_registry.py installs such a package",
    ("docs/add-a-reward.md", "with RewardRunner("): "tests/faults/test_reward_faults.py executes runners with workers",
    ("docs/environments.md", "with EnvironmentRunner("): FRAGMENT,
    (
        "docs/environments.md",
        "played the same row with the same replies twice",
    ): "an error, which tests/envs/test_rehearsal.py provokes",
    ("docs/environments.md", "import reasoning_gym"): BY_HAND,
    ("docs/environments.md", "import textarena"): BY_HAND,
    ("docs/environments.md", "import verifiers"): "tests/envs/test_verifiers.py plays it where verifiers is installed",
    ("docs/first-run.md", "import AutoModelForCausalLM"): BY_HAND,
    ("docs/from-trl.md", "environment_factory=IncrementEnv"): PEER,
    ("docs/from-trl.md", "from trl import"): BY_HAND,
    ("docs/from-tunix.md", "from tunix."): BY_HAND,
    ("docs/from-verl.md", "verl.trainer.main_ppo"): PEER,
    ("docs/from-verl.md", "def compute_score("): "verl's form of the function that the next block has in Covey's",
    ("docs/grpo-in-one-file.md", "def grpo_step("): "tests/test_one_file.py executes the file",
    ("docs/measurements.md", "preferred_element_type"): "two lines of a remark on what XLA compiles, without imports",
    ("docs/mistakes.md", ""): "files with mistakes, which tests/cli/test_mistakes.py writes",
    ("docs/quickstart.md", "format_accuracy 59.0%"): "output",
    ("docs/quickstart.md", "zero std"): "output",
    ("docs/scaling.md", "#SBATCH"): "a job file; tests/launch/test_jobs.py checks those that are written",
    ("docs/scaling.md", "devices[4:8]"): "needs eight devices; tests/rl/test_cluster.py has roles on separate meshes",
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


BLOCKS = [block for block in blocks() if block.language not in ("bash", "sh", "console")]
PYTHON = [block for block in BLOCKS if block.language == "python" and not block.reason]
YAML = [block for block in BLOCKS if block.language == "yaml" and not block.reason]


def test_every_block_is_executed_or_listed() -> None:
    left = [block.name for block in BLOCKS if block not in PYTHON + YAML and not block.reason]
    assert left == [], "make it Python or YAML, which is executed, or add it to LISTED_BLOCKS with a reason"
    gone = [key for key in LISTED_BLOCKS if not any(b.page == key[0] and key[1] in b.code for b in blocks())]
    assert gone == [], "a block of the list is gone"


def test_every_command_is_executed_or_listed() -> None:
    rest = [command for command in commands() if command not in STORY]
    unlisted = [one for one in rest if not any(re.fullmatch(pattern, one) for pattern in LISTED_COMMANDS)]
    assert unlisted == [], "add it to STORY, where it is executed, or to LISTED_COMMANDS with a reason"
    assert [command for command in STORY if command not in commands()] == [], "a command of STORY is gone"
    stale = [pattern for pattern in LISTED_COMMANDS if not any(re.fullmatch(pattern, one) for one in rest)]
    assert stale == [], "a command of the list is gone"


def test_tests_that_the_lists_name_exist() -> None:
    reasons = [*LISTED_COMMANDS.values(), *LISTED_BLOCKS.values()]
    named = {path for reason in reasons for path in re.findall(r"tests/[\w/]+(?:\.py)?", reason)}
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


# --- execution


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the reward functions and the data that the pages write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = [block.code for block in PYTHON if block.code.startswith("# my_rewards.py\n")]
    (tmp_path / "my_rewards.py").write_text("\n".join(code) + "\n\ndef judge(completions):\n    return [0] * 9\n")
    return tmp_path


def small(code: str) -> str:
    """Return a script with a tiny model and small numbers in place of its own."""
    code = re.sub(r'"(smollm2-135m|scratch:arithmetic-tiny)"', repr(str(TINY)), code).replace('"hf:', '"./')
    code = re.sub(r"prompts_per_step=\d+,?\s*", "", code).replace(
        "RLTrainingConfig(", "RLTrainingConfig(prompts_per_step=2, "
    )
    prompt = 999 if '"./' in code else 99  # the former lists tools
    numbers = {"max_steps": 1, "max_new_tokens": 3, "max_prompt_length": prompt, "num_generations": 2, "num_epochs": 1}
    for name, number in numbers.items():
        code = re.sub(rf"\b{name}=\d+", f"{name}={number}", code)
    return code.replace("range(64)", "range(8)").replace("rows[:48]", "rows[:6]").replace("rows[48:]", "rows[6:]")


TRAINS = re.compile(r"\.train\(")


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
