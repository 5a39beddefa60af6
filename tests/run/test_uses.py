"""Every use of a recipe gets model and tokenizer from one place, and shows the model the same prompt.

The chat template prints its variables. A tokenizer with this template comes from `load_for` and `abstract_for` alone:
the checkpoint has another, so a use that loads a tokenizer in any other way shows another text.
"""

import ast
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from covey import recipes
from covey.config import recipe
from covey.config.recipe import Recipe, SFTRecipe
from covey.config.schema import RolloutConfig
from covey.parallel import flatten
from covey.recipes import load_model
from covey.recipes import use as using
from covey.recipes.load_model import load_for
from covey.rl import rollout_worker
from covey.sampling.engine import Request
from covey.text.tokenizer import Tokenizer
from covey.types import Completion, FinishReason
from tests.one_layer import ONE_LAYER

EXPORTING = [import_module("covey_formats.export")] if find_spec("covey_formats") else []
SFT = [import_module(f"covey_sft.{name}") for name in ("learner", "run") if find_spec("covey_sft")]
PLANNING = [import_module(f"covey_plan.{name}") for name in ("plan", "preview") if find_spec("covey_plan")]
TESTS = Path(__file__).parents[1]
TINY = str(ONE_LAYER)
READER = Tokenizer.from_folder(TINY)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    "tools={% for t in tools or [] %}{{ t.function.name }}{% endfor %} "
    "generation={{ add_generation_prompt }} bos={{ bos_token }} eos={{ eos_token }}"
)
"""Template that prints every variable that it gets."""
ROW = "[system] SYSTEM [user] ROW"
DATA = ["data.task=jsonl", f"data.path={TESTS / 'letters.jsonl'}", f"model.source={TINY}", "data.system=SYSTEM"]
SMALL = ["training.max_steps=1", "evaluation.prompts=1", "rollout.max_prompt_length=128", "rollout.max_new_tokens=8"]
TOOLS = ("envs.tools=[calculator]", "envs.tool_format=hermes")


class SeenError(Exception):
    """Ends a use when its prompts have been seen."""


def rl_recipe(*more: str) -> Recipe:
    return recipe.load("quickstart", [*DATA, *SMALL, "training.prompts_per_step=1", *more])


def sft_recipe() -> SFTRecipe:
    return recipe.load("sft-smollm2", [*DATA, "training.max_steps=1", "evaluation.prompts=1"], SFTRecipe)


def play(ready: Recipe) -> None:
    pytest.importorskip("covey_envs.play").play(ready, 1)


def prints(messages: str, tools: str = "") -> re.Pattern[str]:
    """Pattern of a prompt; ROW stands for the text of a row of the data."""
    text = f"{messages} tools={tools} generation=True bos=<|endoftext|> eos=<|im_end|>"
    return re.compile(re.escape(text).replace("ROW", r"[A-Z]: \w+"))


def read(tokens: np.ndarray) -> str:
    return READER.decode(tokens, skip_special=False)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Text of each prompt that is sampled after or learnt from. The second sampling of a use ends it, as its first
    examples do in supervised training.
    """
    texts: list[str] = []
    later = iter([False])

    def generate(engine: Any, requests: Sequence[Request], progress: Any) -> list[list[Completion]]:
        texts.extend(read(request.prompt) for request in requests)
        if next(later, True):
            raise SeenError
        one = Completion(np.ones(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.float32), FinishReason.STOP)
        return [[one] * request.samples for request in requests]

    def groups_of(*args: Any) -> Any:
        texts.extend(read(group.prompt_tokens) for group in learnt(*args))
        raise SeenError

    monkeypatch.setattr(rollout_worker, "generate", generate)
    for learner in SFT[:1]:
        learnt = learner.groups_of
        monkeypatch.setattr(learner, "groups_of", groups_of)
    return texts


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that were asked for a model; its tokenizer has the template that prints its variables.

    All that take a function by its name are imported before it is patched: a module that is first imported later would
    keep the patched one for the rest of the process.
    """
    names: list[str] = []

    def printing(name: str, load: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **keywords: Any) -> Any:
            names.append(name)
            loaded = load(*args, **keywords)
            loaded[1].chat_template = TEMPLATE
            return loaded

        return wrapped

    for module in (load_model, using, *EXPORTING, *SFT[1:]):
        monkeypatch.setattr(module, "load_for", printing("load_for", module.load_for))
    shapes = printing("abstract_for", load_model.abstract_for)
    for module in (load_model, *PLANNING):
        monkeypatch.setattr(module, "abstract_for", shapes)
    return names


def sample_training_prompts(ready: recipe.Recipe) -> None:
    pytest.importorskip("covey_report.first_samples").sample_training_prompts(ready, 1)


USES: dict[str, Callable[..., Any]] = {
    "training": lambda out, *more: recipes.train(rl_recipe(*more), out / "run"),
    "eval": lambda out, *more: recipes.evaluate(TINY, rl_recipe(*more)),
    "rollout": lambda out, *more: play(rl_recipe(*more)),
    "rewards": lambda out: sample_training_prompts(rl_recipe()),
    "sft": lambda out: recipes.train(sft_recipe(), out / "run"),
    "sft eval": lambda out: recipes.evaluate(TINY, sft_recipe()),
}
"""Uses of a recipe that ask or train the model."""


@pytest.mark.parametrize(
    ("use", "tools"), [*((use, ()) for use in USES), ("training", TOOLS), ("eval", TOOLS), ("rollout", TOOLS)]
)
def test_a_use_of_a_recipe_shows_the_model_its_variables(
    use: str, tools: tuple[str, ...], tmp_path: Path, shown: list[str], loads: list[str]
) -> None:
    for package, is_needed in {"covey_envs": tools, "covey_sft": use.startswith("sft")}.items():
        if is_needed:
            pytest.importorskip(package)
    with suppress(SeenError):
        USES[use](tmp_path, *tools)
    wanted = prints(ROW, "calculator" if tools else "")
    assert shown
    assert [text for text in shown if not wanted.fullmatch(text)] == []
    assert len(shown) > 1 or use != "training", "an evaluation, and the first step"
    assert loads == ["load_for"]


def test_what_a_user_writes_is_shown_with_the_variables(
    shown: list[str], loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["F: milk", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    model = pytest.importorskip("covey_shell.model")
    model.generate(TINY, "F: milk", 1, RolloutConfig(max_new_tokens=2))
    with suppress(SeenError):
        model.chat(TINY, RolloutConfig(max_new_tokens=2))
    assert [bool(prints("[user] F: milk").fullmatch(text)) for text in shown] == [True, True]
    assert loads == ["load_for"] * 2


@pytest.mark.parametrize(("make", "tools"), [(rl_recipe, ()), (rl_recipe, TOOLS), (sft_recipe, ())])
def test_a_preview_shows_the_prompt_of_the_run(
    make: Callable[..., Any], tools: tuple[str, ...], loads: list[str]
) -> None:
    preview = pytest.importorskip("covey_plan.preview")
    found = preview.preview(make(*tools))
    wanted = prints(ROW, "calculator" if tools else "")
    assert wanted.fullmatch(read(np.array(found.tokens)))
    assert wanted.fullmatch(found.prompt)
    assert loads == ["abstract_for"]


def test_a_plan_and_an_export_load_there_too(loads: list[str], tmp_path: Path) -> None:
    plan = pytest.importorskip("covey_plan.plan")
    plan.policy_programs(rl_recipe(), jax.devices()[0], total_steps=1)
    plan.supervised_programs(sft_recipe(), jax.devices()[0], total_steps=1)
    EXPORTING[0].export(TINY, tmp_path / "export", "hf", None, 10**9)
    recipes.open_model(TINY)
    assert loads == ["abstract_for"] * 2 + ["load_for"] * 2


def test_nothing_else_reads_a_model_under_a_recipe() -> None:
    """A new use is found here: it calls `load_for`, or `abstract_for`."""
    folders = (
        *(TESTS.parent / "covey" / name for name in ("recipes", "run", "cli")),
        *(TESTS.parent / "plugins").iterdir(),
    )
    lower = {"load_source", "open_source", "open_checkpoint", "from_folder"}
    calls = {
        (file.stem, node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
        for folder in folders
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    }
    assert {(file, name) for file, name in calls if name in lower} == {
        ("load_model", "load_source"), ("load_model", "open_source"),
        ("hf", "from_folder"),  # the tokenizer of the source, whose files an export copies if the run's is the same
    }  # fmt: skip


def arrays(model: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in flatten(nnx.state(model)).items()}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Models that sample."""
    models: list[Any] = []

    def worker(model: Any, *_: Any) -> Any:
        models.append(model)
        raise SeenError

    monkeypatch.setattr(using, "RolloutWorker", worker)
    return models


@pytest.mark.parametrize("use", [play, sample_training_prompts])
def test_what_precedes_a_run_asks_the_model_that_the_run_begins_with(use: Callable[..., Any], asked: list[Any]) -> None:
    """A model from scratch is drawn from the run's seed."""
    scratch = recipe.load("arithmetic-tiny", ["seed=7", "model.source=scratch:arithmetic-tiny"])
    with suppress(SeenError):
        use(scratch)
    begun, drawn = (arrays(model) for model in (load_for(scratch)[0], asked[0]))
    assert all(np.array_equal(x, drawn[name]) for name, x in begun.items())
