"""`Recipe` and `SFTRecipe`: all settings of a run, as one frozen tree.

`load` reads a built-in recipe or a YAML file, applies overrides from the command line and returns a checked tree.
`to_yaml` writes it in full, so that the file in a run folder repeats the run. The recipe's `method` selects one of the
two classes. This module does not import JAX.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from covey.config import algorithms, metrics, strict_yaml
from covey.config.keywords import Config
from covey.config.overrides import apply
from covey.config.ranges import Problem, out_of_range
from covey.config.reward_safety import RewardSafetyConfig
from covey.config.schema import (
    LORA_TARGETS,
    DataConfig,
    EvalConfig,
    GRPOConfig,
    ModelOptions,
    RLTrainingConfig,
    RolloutConfig,
    SFTConfig,
    SFTDataConfig,
    SFTEvalConfig,
)
from covey.errors import RecipeError, nearest

BUILT_IN = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class AnyRecipe(Config):
    """Settings that every run has."""

    name: str = "custom"
    """Names the run folder when --out is not given."""
    method: Literal["rl", "sft"] = "rl"
    """rl: compare sampled answers (covey train). sft: imitate given ones (covey sft)."""
    description: str = ""
    """One sentence for the table of recipes."""
    needs: str = ""
    """What has to be there: weights, data, hardware, memory."""
    expect: str = ""
    """What it reaches, and how long that takes."""
    seed: int = 0
    """Seed of the samples drawn; with the same seed a run repeats exactly."""
    out: str | None = None
    """Run folder; runs/<name>-<n> when not set."""
    tracking: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Who gets the metrics, beside the run folder, where the package is installed."""
    model: ModelOptions = field(default_factory=ModelOptions)


@dataclass(frozen=True)
class Recipe(AnyRecipe):
    """One run, from the checkpoint it starts with to the evaluation at its end.

    The run's seed is also the rollout's: `rollout.seed` follows `seed` and is no setting of a recipe.
    """

    method: Literal["rl"] = "rl"
    data: DataConfig = field(default_factory=DataConfig)
    rewards: tuple[str, ...] = ()
    """Reward functions by name; their weighted sum is the reward."""
    reward_model: str | None = None
    """A sequence-classification checkpoint whose score is one more reward, weighed last."""
    reward_safety: RewardSafetyConfig = field(default_factory=RewardSafetyConfig)
    critic: str | None = None
    """ppo: the checkpoint of the critic; a copy of the model with a new head when not set."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    training: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout", replace(self.rollout, seed=self.seed))


@dataclass(frozen=True)
class SFTRecipe(AnyRecipe):
    """One run of supervised training, from the checkpoint it starts with to the evaluation at its end."""

    method: Literal["sft"] = "sft"
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    training: SFTConfig = field(default_factory=SFTConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    evaluation: SFTEvalConfig = field(default_factory=SFTEvalConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout", replace(self.rollout, seed=self.seed))


RecipeT = TypeVar("RecipeT", Recipe, SFTRecipe)


def names(kind: type[AnyRecipe] = AnyRecipe) -> list[str]:
    """Return the names of the built-in recipes of one kind, by default of both."""
    found = sorted(path.stem for path in BUILT_IN.glob("*.yaml"))
    return found if kind is AnyRecipe else [name for name in found if kind_of(name) is kind]


def find(source: str | Path) -> Path:
    """Return the file of the recipe `source`: a built-in name, a YAML file, or a run folder (its resolved recipe).

    Raises:
        RecipeError: `source` is neither a built-in name nor a file.
    """
    if str(source) in names():
        return BUILT_IN / f"{source}.yaml"
    path = Path(source)
    path = path / "recipe.yaml" if path.is_dir() else path
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml") or path.name != str(source):
        near = [other.name for other in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        fix = nearest(path.name, near) if near else "covey recipes lists the built-in ones"
        raise RecipeError("there is no such recipe file", fix=fix, where=str(path))
    raise RecipeError(
        f"there is no recipe {str(source)!r}", want="a built-in name or a YAML file", fix=nearest(str(source), names())
    )


def is_run(folder: str | Path) -> bool:
    """Return whether `folder` is a run folder: it has a resolved recipe."""
    return (Path(folder) / "recipe.yaml").is_file()


def load(
    source: str | Path,
    overrides: Sequence[str] = (),
    kind: type[RecipeT] = Recipe,  # type: ignore[assignment]  # mypy knows no default for what a variable stands for
) -> RecipeT:
    """Read, override and check a recipe.

    Args:
        source: a built-in name, a YAML file, or a run folder.
        overrides: as on the command line: `--grpo.beta 0.1`, `--grpo.beta=0.1`, `grpo.beta=0.1`.
        kind: class that the recipe must have.

    Raises:
        RecipeError: the recipe is of the other kind; or, with file and line, all mistakes of the first check that fails
            (reading, names and types, ranges).
    """
    text, name = _text(source)
    if (found := _kind(text, name)) is not kind:
        command = f"{COMMANDS[found.method]} {source}"
        unnamed = str(source) not in names() and not re.search("^method:", text, re.M)
        fix = f"{command}, or write method: {kind.method} at its top" if unnamed else command
        raise RecipeError(f"this is a recipe for {COMMANDS[found.method]}", fix=fix, where=name)
    return parse(text, overrides, name, kind)


def load_any(source: str | Path, overrides: Sequence[str] = ()) -> Recipe | SFTRecipe:
    """Load a recipe of either kind; arguments and errors are those of `load`."""
    return load(source, overrides, SFTRecipe) if kind_of(source) is SFTRecipe else load(source, overrides)


def section_of(source: str | Path, section: str) -> strict_yaml.Item:
    """Read one section of the recipe at `source` without checking it; it is empty if the recipe does not have it."""
    item = strict_yaml.read(*_text(source))
    if not isinstance(item.value, dict):
        return item  # not a recipe: `strict_yaml.build` reports it
    return strict_yaml.Item({name: entry for name, entry in item.value.items() if name == section}, item.where)


def kind_of(source: str | Path) -> type[Recipe] | type[SFTRecipe]:
    """Return the class of the recipe at `source`; only its `method` is read."""
    return _kind(*_text(source))


def _text(source: str | Path) -> tuple[str, str]:
    """Read the text of a recipe; return it with the recipe's name in errors."""
    path = find(source)
    name = str(path) if path.parent != BUILT_IN else path.name
    return strict_yaml.text_of(path, name), name


def _kind(text: str, name: str) -> type[Recipe] | type[SFTRecipe]:
    item = strict_yaml.read(text, name)
    given = item.value.get("method") if isinstance(item.value, dict) else None
    method = "rl" if given is None else str(given.value)
    if given is not None and method not in METHODS:
        raise RecipeError(f"there is no method {method!r}", fix=nearest(method, METHODS), where=given.where)
    return METHODS[method]


def parse(
    text: str,
    overrides: Sequence[str] = (),
    name: str = "recipe",
    kind: type[RecipeT] = Recipe,  # type: ignore[assignment]
) -> RecipeT:
    """Load a recipe from YAML text as `load` does from a file; `name` stands for the file in errors."""
    item = apply(kind, strict_yaml.read(text, name), overrides, HIDDEN)
    hidden = [
        RecipeError(f"{key} {HIDDEN[key]}", where=at) for key, at in strict_yaml.places(item).items() if key in HIDDEN
    ]
    strict_yaml.raise_together(hidden)
    recipe = strict_yaml.build(kind, item)
    validate(recipe, strict_yaml.places(item))
    return recipe


def to_yaml(recipe: AnyRecipe) -> str:
    """Write every setting of `recipe` as YAML, from which `parse` makes an equal recipe."""
    return strict_yaml.dump(_plain(asdict(recipe)))


def validate(settings: object, where: Mapping[str, str] | None = None) -> None:
    """Check ranges, and in a whole recipe also that settings do not contradict each other.

    Args:
        settings: a recipe, or a dataclass with some of a recipe's parts under the same names.
        where: file and line, or flag, by dotted name, for the error text.

    Raises:
        RecipeError: settings are invalid; the error lists all problems.
    """
    found = islice(_problems(settings), strict_yaml.MAX_LISTED + 1)
    strict_yaml.raise_together(
        [RecipeError(what, want=want, where=(where or {}).get(key, "")) for key, what, want in found]
    )


def _problems(settings: object) -> Iterator[Problem]:
    yield from out_of_range(settings)
    if grpo := getattr(settings, "grpo", None):
        yield from ((f"grpo.{name}", what, want) for name, what, want in algorithms.problems(grpo))
    yield from _unsafe(getattr(settings, "reward_safety", RewardSafetyConfig()))
    if isinstance(settings, Recipe):
        yield from _contradictions(settings)
    if isinstance(settings, SFTRecipe):
        yield from _no_examples(settings)
    if isinstance(settings, Recipe | SFTRecipe):
        yield from _general_contradictions(settings)
        yield from _unknown_metrics(settings)


def _contradictions(recipe: Recipe) -> Iterator[Problem]:
    rollout, grpo = recipe.rollout, recipe.grpo
    if not recipe.rewards and recipe.reward_model is None:
        yield "rewards", "rewards is empty: nothing would be learnt", "the name of at least one reward function"
    if len(set(recipe.rewards)) < len(recipe.rewards):
        yield "rewards", "rewards names a function twice", "each once; weigh it with grpo.reward_weights"
    scores = len(recipe.rewards) + (recipe.reward_model is not None)
    if grpo.reward_weights is not None and len(grpo.reward_weights) != scores:
        what = f"grpo.reward_weights has {len(grpo.reward_weights)} numbers for {scores} reward functions"
        yield "grpo.reward_weights", what, "one for each, the reward model's last"
    buffer = algorithms.algorithm_of(grpo).overlong_buffer
    if buffer > rollout.max_new_tokens:
        what = f"grpo.overlong_buffer is {buffer:g} tokens, and a completion has at most {rollout.max_new_tokens}"
        yield "grpo.overlong_buffer", what, "at most rollout.max_new_tokens; below 1 it is a share of them"
    if recipe.critic is not None and not algorithms.algorithm_of(grpo).has_critic:
        yield "critic", f"critic is set, and {grpo.algorithm} has none", "null, or grpo.algorithm ppo"
    copied = algorithms.algorithm_of(grpo).has_critic and recipe.critic is None and recipe.model.adapter
    if copied and recipe.model.quantize != "none":
        what = "the critic would be a copy of the base, all of it trained, and a quantised base cannot be"
        yield "critic", what, "a checkpoint for it, or model.quantize none"
    if rollout.temperature == 0:
        yield "rollout.temperature", "rollout.temperature is 0: all samples of a group would be the same", "more than 0"
    yield from _unknown_functions(recipe)


def _unsafe(safety: RewardSafetyConfig) -> Iterator[Problem]:
    if safety.timeout and not safety.workers:
        what = f"reward_safety.timeout is {safety.timeout:g}, and reward_safety.workers is 0"
        yield "reward_safety.timeout", what, "workers of 1 or more: a call in the run's own process cannot be stopped"


def _unknown_functions(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of functions in `on_error_of` that the recipe does not name."""
    judges = (recipe.evaluation.accuracy, recipe.evaluation.partial, recipe.evaluation.format)
    named = {*recipe.rewards, *filter(None, judges), *(["reward_model"] if recipe.reward_model else [])}
    for name in recipe.reward_safety.on_error_of:
        if name not in named | {other.rpartition(":")[2] for other in named}:
            what = f"reward_safety.on_error_of names {name!r}, which is none of the recipe's reward functions"
            yield "reward_safety.on_error_of", what, nearest(name, named)


def _unknown_metrics(recipe: Recipe | SFTRecipe) -> Iterator[Problem]:
    """Yield problems of metrics in `show` and `keep_best` that a run of the recipe never logs."""
    functions = (
        [*recipe.rewards, *(["reward_model"] if recipe.reward_model else [])] if isinstance(recipe, Recipe) else ()
    )
    training = recipe.training
    for setting, names in (("show", training.show), ("keep_best", [training.keep_best] if training.keep_best else ())):
        for name in names:
            if not metrics.is_logged(name, recipe.method, functions):
                choices = list(metrics.names(recipe.method, functions))
                want = " or ".join(one for one in choices if one.endswith(f"/{name}")) or nearest(name, choices)
                what = f"training.{setting} names {name!r}, which is no metric of {COMMANDS[recipe.method]}"
                yield f"training.{setting}", what, want


def _no_examples(recipe: SFTRecipe) -> Iterator[Problem]:
    if recipe.data.task == "first-letter":
        what = "data.task first-letter has no worked answers to learn from"
        yield "data.task", what, "jsonl, arithmetic, sums or gsm8k"


def _general_contradictions(recipe: Recipe | SFTRecipe) -> Iterator[Problem]:
    rollout, data, lora = recipe.rollout, recipe.data, recipe.model.lora
    if not re.fullmatch(r"\w[\w.-]*", recipe.name):
        yield "name", f"name is {recipe.name!r}", "letters, digits, '-', '_' and '.': it names a folder"
    needed = rollout.max_prompt_length + rollout.max_new_tokens
    if rollout.kv_cache_size is not None and rollout.kv_cache_size < needed:
        what = f"rollout.kv_cache_size is {rollout.kv_cache_size}, and a sample may have {needed} tokens"
        yield "rollout.kv_cache_size", what, f"null, or at least max_prompt_length + max_new_tokens = {needed}"
    if data.task in ("gsm8k", "jsonl") and not data.path:
        yield "data.task", f"data.task {data.task} needs data.path, which is not set", DATA_PATHS[data.task]
    yield from unread_settings(data)
    for target in lora.targets:
        if target.isidentifier() and target not in LORA_TARGETS:
            yield "model.lora.targets", f"model.lora.targets has no {target!r}", nearest(target, LORA_TARGETS)
    if recipe.model.adapter and lora.rank:
        what = f"model.lora.rank is {lora.rank}, and model.adapter brings its own"
        yield "model.adapter", what, "model.lora.rank 0 beside an adapter"
    if lora.rank > 0 and not lora.targets:
        yield "model.lora.targets", "model.lora.targets is empty: nothing would be trained", "at least one projection"
    yield from _quantised_contradictions(recipe.model)
    yield from _evaluation_contradictions(recipe.evaluation)


def unread_settings(data: DataConfig) -> Iterator[Problem]:
    """Yield problems of settings of `data` that its task does not read: they would be silently ignored."""
    unread = {"prompt_column", "completion_column"} if data.task != "jsonl" else set()
    unread |= {"path", "test_path"} if data.task not in DATA_PATHS else set()
    for name in (f.name for f in fields(data) if f.name in unread and getattr(data, f.name) != f.default):
        what = f"data.{name} is {getattr(data, name)}, and data.task {data.task} does not read it"
        yield f"data.{name}", what, f"--data.task jsonl, to read rows of your own, or no data.{name}"


def _quantised_contradictions(model: ModelOptions) -> Iterator[Problem]:
    if model.quantize != "none" and not (model.lora.rank or model.adapter):
        what = f"model.quantize is {model.quantize} without adapters, and a quantised base cannot be trained"
        yield "model.quantize", what, "none; or adapters: a model.lora.rank above 0, or model.adapter"
    if model.quantize != "nf4" and model.quantize_block != ModelOptions.quantize_block:
        what = f"model.quantize_block is {model.quantize_block}, and model.quantize is {model.quantize}"
        yield "model.quantize_block", what, f"model.quantize nf4; else {ModelOptions.quantize_block}, its default"
    if model.quantize_block % 2:
        yield "model.quantize_block", f"model.quantize_block is {model.quantize_block}", "an even number"


def _evaluation_contradictions(config: EvalConfig) -> Iterator[Problem]:
    if config.pass_k > config.samples:
        what = f"evaluation.pass_k is {config.pass_k}, and {config.samples} completions of each prompt are sampled"
        yield "evaluation.pass_k", what, f"at most {config.samples}, or an evaluation.samples of {config.pass_k}"
    if config.pass_k and not config.accuracy:
        what = "evaluation.pass_k is set, and nothing says what is right"
        yield "evaluation.pass_k", what, "0, or the name of a reward function in evaluation.accuracy"
    for name in ("temperature", "top_p", "top_k"):
        if config.preset and getattr(config, name) is not None:
            what = f"evaluation.{name} is set, and evaluation.preset {config.preset} sets it too"
            yield f"evaluation.{name}", what, "null for one of the two"


def _plain(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Return the tree without hidden settings, with tuples as lists."""
    plain: dict[str, object] = {}
    for name, value in tree.items():
        if prefix + name in HIDDEN:
            continue
        if isinstance(value, dict):
            value = _plain(value, f"{prefix}{name}.")
        plain[name] = list(value) if isinstance(value, tuple) else value
    return plain


HIDDEN = {"rollout.seed": "follows the run's seed; set seed instead"}
"""Settings of the config classes that a recipe cannot set, each with the reason."""

DATA_PATHS = {
    "gsm8k": "--data.path FOLDER with train.jsonl and test.jsonl (or Kaggle's CSV), hf:openai/gsm8k, or tfds:gsm8k",
    "jsonl": "the training file: --data.path FILE.jsonl, or hf:org/name",
}

METHODS: dict[str, type[Recipe] | type[SFTRecipe]] = {"rl": Recipe, "sft": SFTRecipe}
COMMANDS = {"rl": "covey train", "sft": "covey sft"}
"""Command that trains by each method."""
