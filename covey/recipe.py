"""`Recipe`: everything a run needs to know, as one frozen tree of settings.

In: the name of a built-in recipe or a YAML file, and overrides from the command line. Out: a checked `Recipe`, which
`to_yaml` writes in full, so that the file in a run folder repeats the run. No JAX here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path

from covey import strictyaml
from covey.configs import (
    LORA_TARGETS,
    DataConfig,
    EvalConfig,
    GRPOConfig,
    ModelOptions,
    RLTrainingConfig,
    RolloutConfig,
)
from covey.errors import RecipeError, nearest
from covey.overrides import apply

BUILT_IN = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Recipe:
    """One run, from the checkpoint it starts with to the evaluation at its end.

    The run's seed is also the rollout's: `rollout.seed` follows `seed` and is no setting of a recipe.
    """

    name: str = "custom"
    """Names the run folder when --out is not given."""
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
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataConfig = field(default_factory=DataConfig)
    rewards: tuple[str, ...] = ()
    """Reward functions by name; their weighted sum is the reward."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    training: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout", replace(self.rollout, seed=self.seed))


def names() -> list[str]:
    """The built-in recipes."""
    return sorted(path.stem for path in BUILT_IN.glob("*.yaml"))


def find(source: str | Path) -> Path:
    """The file of the recipe `source`: a built-in name, a YAML file, or a run folder (its resolved recipe).

    Raises:
        RecipeError: neither a built-in name nor a file.
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
    """Whether `folder` is that of a run: it has a resolved recipe."""
    return (Path(folder) / "recipe.yaml").is_file()


def load(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe.

    Args:
        source: a built-in name, a YAML file, or a run folder.
        overrides: as on the command line: `--grpo.beta 0.1`, `--grpo.beta=0.1`, `grpo.beta=0.1`.

    Raises:
        RecipeError: with file and line, every mistake of the first kind found (reading, names and types, ranges).
    """
    path = find(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot be read: {error}", where=str(path)) from None
    return parse(text, overrides, name=str(path) if path.parent != BUILT_IN else path.name)


def parse(text: str, overrides: Sequence[str] = (), name: str = "recipe") -> Recipe:
    """As `load`, from the YAML text itself; `name` stands for the file in errors."""
    item = apply(Recipe, strictyaml.read(text, name), overrides, HIDDEN)
    hidden = [
        RecipeError(f"{key} {HIDDEN[key]}", where=at) for key, at in strictyaml.places(item).items() if key in HIDDEN
    ]
    strictyaml.raise_together(hidden)
    recipe = strictyaml.build(Recipe, item)
    validate(recipe, strictyaml.places(item))
    return recipe


def to_yaml(recipe: Recipe) -> str:
    """Every setting of `recipe`, written out; `parse` gives an equal recipe back."""
    return strictyaml.dump(_plain(asdict(recipe)))


def validate(settings: object, where: Mapping[str, str] | None = None) -> None:
    """Check ranges, and for a whole recipe its settings against each other.

    Args:
        settings: a `Recipe`, or a dataclass with some of a recipe's parts under the same names.
        where: dotted name → place it was given, for the error text.

    Raises:
        RecipeError: all problems at once.
    """
    found = [*_out_of_range(settings)]
    found += _contradictions(settings) if isinstance(settings, Recipe) else ()
    strictyaml.raise_together(
        [RecipeError(what, want=want, where=(where or {}).get(key, "")) for key, what, want in found]
    )


Problem = tuple[str, str, str]
"""A setting's dotted name, what is wrong with it, and what would be right."""


def _out_of_range(tree: object) -> Iterator[Problem]:
    for key in (k for k in strictyaml.leaves(type(tree)) if k in RANGES):
        value, interval = attrgetter(key)(tree), RANGES[key]
        if value is not None and not _inside(value, interval):
            yield key, f"{key} is {value}", _in_words(interval)


def _contradictions(recipe: Recipe) -> Iterator[Problem]:
    rollout, grpo, data, lora = recipe.rollout, recipe.grpo, recipe.data, recipe.model.lora
    if not re.fullmatch(r"\w[\w.-]*", recipe.name):
        yield "name", f"name is {recipe.name!r}", "letters, digits, '-', '_' and '.': it names a folder"
    if not recipe.rewards:
        yield "rewards", "rewards is empty: nothing would be learnt", "the name of at least one reward function"
    if len(set(recipe.rewards)) < len(recipe.rewards):
        yield "rewards", "rewards names a function twice", "each once; weigh it with grpo.reward_weights"
    if grpo.reward_weights is not None and len(grpo.reward_weights) != len(recipe.rewards):
        what = f"grpo.reward_weights has {len(grpo.reward_weights)} numbers for {len(recipe.rewards)} reward functions"
        yield "grpo.reward_weights", what, "one for each"
    needed = rollout.max_prompt_length + rollout.max_new_tokens
    if rollout.kv_cache_size is not None and rollout.kv_cache_size < needed:
        what = f"rollout.kv_cache_size is {rollout.kv_cache_size}, and a sample may have {needed} tokens"
        yield "rollout.kv_cache_size", what, f"null, or at least max_prompt_length + max_new_tokens = {needed}"
    if rollout.temperature == 0:
        yield "rollout.temperature", "rollout.temperature is 0: all samples of a group would be the same", "more than 0"
    if data.task in ("gsm8k", "jsonl") and not data.path:
        yield "data.task", f"data.task {data.task} needs data.path, which is not set", DATA_PATHS[data.task]
    for target in lora.targets:
        if target not in LORA_TARGETS:
            yield "model.lora.targets", f"model.lora.targets has no {target!r}", nearest(target, LORA_TARGETS)
    if lora.rank > 0 and not lora.targets:
        yield "model.lora.targets", "model.lora.targets is empty: nothing would be trained", "at least one projection"


def _inside(value: float, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)


def _in_words(interval: str) -> str:
    low, high = interval[1:-1].split(", ")
    lower = f"at least {low}" if interval[0] == "[" else f"more than {low}"
    upper = f" and at most {high}" if interval[-1] == "]" else f" and less than {high}"
    return lower + ("" if high == "inf" else upper)


def _plain(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    """The tree without hidden settings, tuples as lists."""
    plain: dict[str, object] = {}
    for name, value in tree.items():
        if prefix + name in HIDDEN:
            continue
        if isinstance(value, dict):
            value = _plain(value, f"{prefix}{name}.")
        plain[name] = list(value) if isinstance(value, tuple) else value
    return plain


HIDDEN = {"rollout.seed": "follows the run's seed; set seed instead"}
"""Settings of the config classes that a recipe does not have, and why."""

DATA_PATHS = {
    "gsm8k": "the folder with GSM8K's train.jsonl and test.jsonl: --data.path FOLDER",
    "jsonl": "the training file: --data.path FILE.jsonl",
}

RANGES = {
    "seed": "[0, 2147483647]",
    "model.lora.rank": "[0, inf)",
    "model.lora.alpha": "(0, inf)",
    "data.train_fraction": "(0, 1]",
    "data.seed": "[0, 2147483647]",
    "rollout.max_prompt_length": "[1, inf)",
    "rollout.max_new_tokens": "[1, inf)",
    "rollout.temperature": "[0, inf)",
    "rollout.top_p": "(0, 1]",
    "rollout.top_k": "[0, inf)",
    "rollout.slots": "[1, inf)",
    "rollout.decode_chunk": "[1, inf)",
    "grpo.num_generations": "[2, inf)",
    "grpo.num_iterations": "[1, inf)",
    "grpo.beta": "[0, inf)",
    "grpo.epsilon": "(0, 1]",
    "grpo.epsilon_high": "(0, inf)",
    "training.max_steps": "[1, inf)",
    "training.num_epochs": "[1, inf)",
    "training.prompts_per_step": "[1, inf)",
    "training.actor_optimizer.learning_rate": "[0, inf)",
    "training.actor_optimizer.b1": "[0, 1)",
    "training.actor_optimizer.b2": "[0, 1)",
    "training.actor_optimizer.eps": "(0, inf)",
    "training.actor_optimizer.weight_decay": "[0, inf)",
    "training.actor_optimizer.warmup_ratio": "[0, 1)",
    "training.actor_optimizer.max_grad_norm": "[0, inf)",
    "training.eval_every_n_steps": "[0, inf)",
    "training.checkpoint_every_n_steps": "[0, inf)",
    "training.max_to_keep": "[1, inf)",
    "training.row_length": "[1, inf)",
    "training.tokens_per_micro_batch": "[1, inf)",
    "evaluation.prompts": "[0, inf)",
    "evaluation.samples": "[1, inf)",
    "evaluation.temperature": "[0, inf)",
    "evaluation.top_p": "(0, 1]",
    "evaluation.top_k": "[0, inf)",
}
"""Dotted name → the interval its value lies in."""
