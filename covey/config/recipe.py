"""`Recipe` and `SFTRecipe`: all settings of a run, as one frozen tree.

`load` reads a built-in recipe or a YAML file, applies overrides from the command line and returns a checked tree.
`to_yaml` writes it in full, so that the file in a run folder repeats the run. The recipe's `method` selects one of the
two classes. This module does not import JAX.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from covey.config import metrics, strict_yaml
from covey.config.algorithms import algorithm_of, config_for, off_policy_problems
from covey.config.base import (
    Config,
    NonNegativeInt,
    PositiveInt,
    Problem,
    UsedWhen,
    all_contradictions,
    refuse_if,
    setting,
    unused_settings,
)
from covey.config.overrides import apply
from covey.config.schema import (
    DataConfig,
    EnvsConfig,
    EvalConfig,
    GRPOConfig,
    ModelOptions,
    PPOConfig,
    RewardSafetyConfig,
    RLTrainingConfig,
    RoleMeshes,
    RolloutConfig,
    SFTConfig,
    SFTDataConfig,
    SFTEvalConfig,
)
from covey.config.schema.data import DATA_PATHS, FROM_PYTHON
from covey.config.schema.envs import metric_name
from covey.config.strict_yaml import BUILT_IN
from covey.errors import RecipeError, nearest, raise_together
from covey.files import has_file

RUN_RECIPE = "recipe.yaml"
"""Name of the recipe in a run folder."""


class AnyRecipe(Config, on_resume="ignore"):
    """Settings that every run has."""

    name: str = "custom"
    """Name of the recipe, and of the run folder when --out is not given."""
    method: Literal["rl", "sft"] = setting("rl", on_resume="report")
    """rl: compare sampled answers (covey train). sft: imitate given ones (covey sft)."""
    description: str = ""
    """One sentence for the table of recipes."""
    needs: str = ""
    """Requirements: weights, data, hardware, memory."""
    expect: str = ""
    """Expected result, and the time that it takes."""
    seed: NonNegativeInt = setting(0, on_resume="refuse")
    """Seed of the samples drawn; with the same seed a run repeats exactly."""
    out: str | None = None
    """Run folder; runs/<name>-<n> when not set."""
    tracking: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get the metrics, in addition to the run folder, if their packages are installed."""
    model: ModelOptions = field(default_factory=ModelOptions)


class Recipe(AnyRecipe):
    """One run, from the checkpoint it starts with to the evaluation at its end.

    The run's seed is also the rollout's: `rollout.seed` follows `seed` and is no setting of a recipe. `grpo` is a
    `PPOConfig` if its algorithm has a critic.
    """

    method: Literal["rl"] = setting("rl", on_resume="report")
    data: DataConfig = field(default_factory=DataConfig)
    rewards: tuple[str, ...] = setting((), on_resume="report")
    """Reward functions by name; their weighted sum is the reward."""
    envs: EnvsConfig = field(default_factory=EnvsConfig)
    reward_model: str | None = setting(None, on_resume="report")
    """A sequence-classification checkpoint whose score is one more reward; its weight is the last one."""
    reward_safety: RewardSafetyConfig = field(default_factory=RewardSafetyConfig)
    critic: str | None = setting(None, on_resume="report")
    """ppo: checkpoint of the critic; a copy of the model with a new head when not set."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    log_completions: bool = False
    """Send a table of completions to the trackers as well: prompts, completions and scores leave this machine."""
    log_completions_every_n_steps: PositiveInt = 10
    """Interval of that table, in updates."""
    num_completions_to_log: PositiveInt = 16
    """Rows of that table; samples.jsonl always has every completion."""
    role_to_mesh: RoleMeshes = field(default_factory=RoleMeshes)
    grpo: GRPOConfig | PPOConfig = field(default_factory=GRPOConfig)
    training: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout", self.rollout.with_seed(self.seed))
        object.__setattr__(self, "grpo", config_for(self.grpo))

    def contradictions_in_recipe(self) -> Iterable[Problem]:
        """Return a problem for each contradiction between sections."""
        environment = [metric_name(self.envs.environment)] if self.envs.environment else []
        scores = [*self.rewards, *(["reward_model"] if self.reward_model else []), *environment]
        return [*_rl_contradictions(self), *_shared_contradictions(self, scores)]


class SFTRecipe(AnyRecipe):
    """One run of supervised training, from the checkpoint it starts with to the evaluation at its end."""

    method: Literal["sft"] = setting("sft", on_resume="report")
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    training: SFTConfig = field(default_factory=SFTConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    evaluation: SFTEvalConfig = field(default_factory=SFTEvalConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout", self.rollout.with_seed(self.seed))

    def contradictions_in_recipe(self) -> Iterable[Problem]:
        """Return a problem for each contradiction between sections."""
        return [
            *refuse_if(
                self.data.task == "first-letter",
                "data.task",
                "data.task first-letter has no worked answers to learn from",
                "jsonl, arithmetic, sums, guess, wordle or gsm8k",
            ),
            *_shared_contradictions(self),
        ]


RecipeT = TypeVar("RecipeT", Recipe, SFTRecipe)


def names(kind: type[AnyRecipe] = AnyRecipe) -> list[str]:
    """Return the names of the built-in recipes, of both kinds by default."""
    return [
        path.stem for path in sorted(BUILT_IN.glob("*.yaml")) if kind is AnyRecipe or _method_line(path) == kind.method
    ]


def _method_line(built_in: Path) -> str:
    """Return the method of a built-in recipe by its line alone: to parse all of them takes a tenth of a second."""
    line = re.search(r"^method: (\w+)", built_in.read_text(encoding="utf-8"), re.M)
    return line[1] if line else Recipe.method


def find(source: str | Path) -> Path:
    """Return the file of the recipe `source`: a built-in name, a YAML file, or a run folder (its resolved recipe).

    Raises:
        RecipeError: `source` is neither a built-in name nor a file.
    """
    if str(source) in names():
        return BUILT_IN / f"{source}.yaml"
    path = Path(source)
    if path.is_dir():
        is_run(path)  # refuses a link
        path /= RUN_RECIPE
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml") or path.name != str(source):
        near = [other.name for other in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        raise RecipeError(
            "there is no such recipe file",
            fix=nearest(path.name, near) if near else "covey recipes lists the built-in ones",
            where=str(path),
        )
    raise RecipeError(
        f"there is no recipe {str(source)!r}", want="a built-in name or a YAML file", fix=nearest(str(source), names())
    )


def is_run(folder: str | Path) -> bool:
    """Return whether `folder` is a run folder: it has a resolved recipe.

    Raises:
        ResumeError: the recipe is a link.
    """
    return has_file(Path(folder), RUN_RECIPE)


def require_run(folder: str | Path) -> None:
    """Check that `folder` is a run folder.

    Raises:
        RecipeError: it has no recipe.
    """
    if not is_run(folder):
        raise RecipeError(
            f"this is no run folder: it has no {RUN_RECIPE}", want="the folder of a run", where=str(folder)
        )


def chain_of_runs(source: str) -> tuple[list[Path], str]:
    """Follow `model.source` from run to run. Return the runs, the latest first, and the model of the earliest run; a
    source that is no run gives no runs.

    Raises:
        RecipeError: the runs name each other.
    """
    runs: list[Path] = []
    while is_run(source):
        if any(run.samefile(source) for run in runs):
            raise RecipeError(
                "these runs name each other as the model that they began with: "
                + " → ".join(map(str, [*runs, source])),
                want="a chain of runs that ends at a model",
                fix="set model.source in the recipe of one of them to the model that it began with",
                where=str(runs[0] / RUN_RECIPE),
            )
        runs.append(Path(source))
        source = load_any(source).model.source
    return runs, source


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
            (reading, names and values, contradictions).
    """
    document = strict_yaml.read_file(find(source))
    if (other := _kind(document)) is not kind:
        command = f"{COMMANDS[other.method]} {source}"
        raise RecipeError(
            f"this is a recipe for {COMMANDS[other.method]}",
            fix=f"{command}, or write method: {kind.method} at its top"
            if str(source) not in names() and "method" not in document.places
            else command,
            where=document.name,
        )
    return _build(document, overrides, kind, of_run=Path(source).is_dir())


def load_any(source: str | Path, overrides: Sequence[str] = ()) -> Recipe | SFTRecipe:
    """Load a recipe of either kind; arguments and errors are those of `load`."""
    document = strict_yaml.read_file(find(source))
    kind: Any = _kind(document)
    return _build(document, overrides, kind, of_run=Path(source).is_dir())  # type: ignore[no-any-return]


def read_built_in(name: str) -> Recipe | SFTRecipe:
    """Return the built-in recipe `name` as it stands, which may need a setting of the user's, such as a path."""
    document = strict_yaml.read_file(find(name))
    return strict_yaml.validate_tree(_kind(document), document.tree)[0]


def read_settings(folder: Path) -> Mapping[str, Any]:
    """Read the resolved recipe of a run by dotted name. It is not checked: another Covey may have written it.

    Raises:
        RecipeError: it does not hold settings in YAML.
    """
    path = folder / RUN_RECIPE
    tree = strict_yaml.read_file(path).tree
    if not isinstance(tree, dict):
        raise RecipeError("this is no recipe", want="settings by name", where=str(path))
    return flatten(tree)


def is_from_python(recipe: AnyRecipe) -> bool:
    """Return whether a script made the run and gave it model and data, so that no command can repeat it."""
    return isinstance(recipe, Recipe | SFTRecipe) and recipe.data.task == FROM_PYTHON


def kind_of(source: str | Path) -> type[Recipe] | type[SFTRecipe]:
    """Return the class of the recipe at `source`; only its `method` is read."""
    return _kind(strict_yaml.read_file(find(source)))


def _kind(document: strict_yaml.Document) -> type[Recipe] | type[SFTRecipe]:
    method = str(document.tree.get("method", "rl")) if isinstance(document.tree, dict) else "rl"
    if method not in METHODS:
        raise RecipeError(
            f"there is no method {method!r}", fix=nearest(method, METHODS), where=document.place("method")
        )
    return METHODS[method]


def parse(
    text: str,
    overrides: Sequence[str] = (),
    name: str = "recipe",
    kind: type[RecipeT] = Recipe,  # type: ignore[assignment]
) -> RecipeT:
    """Load a recipe from YAML text as `load` does from a file; `name` stands for the file in errors."""
    return _build(strict_yaml.read(text, name), overrides, kind)


def _build(
    document: strict_yaml.Document, overrides: Sequence[str], kind: type[RecipeT], of_run: bool = False
) -> RecipeT:
    """Build a recipe. In a run folder (`of_run`), unused settings are no mistake."""
    of_file = document.places
    places = apply(kind, document, overrides, HIDDEN).places
    raise_together([RecipeError(f"{key} {HIDDEN[key]}", where=places[key]) for key in HIDDEN if key in places])
    recipe = strict_yaml.build(kind, document, recorded=of_file if of_run else {})
    raise_together(list(_unused_lora(recipe, places, of_file)))
    return recipe


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of a nested recipe by dotted name; tuples become lists, as in JSON.

    >>> flatten({"seed": 0, "model": {"lora": {"targets": ("all-linear",)}}})
    {'seed': 0, 'model.lora.targets': ['all-linear']}
    """
    settings: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{name}" not in MAPPINGS:
            settings |= flatten(value, f"{prefix}{name}.")
        else:
            settings[prefix + name] = list(value) if isinstance(value, tuple) else value
    return settings


def to_yaml(recipe: AnyRecipe) -> str:
    """Write every setting of `recipe` as YAML, from which `parse` makes an equal recipe."""
    tree = asdict(recipe)
    for section, _, name in (hidden.partition(".") for hidden in HIDDEN):
        del tree[section][name]
    return strict_yaml.dump(tree)


def validate(recipe: Recipe | SFTRecipe) -> None:
    """Check that the sections of a recipe do not contradict each other; each has checked itself.

    Raises:
        RecipeError: they do; the error lists all problems.
    """
    raise_together([problem.error("") for problem in all_contradictions(recipe)])


def _rl_contradictions(recipe: Recipe) -> list[Problem]:
    named = {*recipe.rewards, *recipe.evaluation.judges.values(), *(["reward_model"] if recipe.reward_model else [])}
    known = named | {name.rpartition(":")[2] for name in named}
    text = "reward_safety.on_error_of names {!r}, which is none of the recipe's reward functions"
    return [
        *_scoring_contradictions(recipe),
        *_algorithm_contradictions(recipe),
        *refuse_if(
            recipe.log_completions and not recipe.tracking,
            "log_completions",
            "log_completions sends completions to trackers, and tracking names none",
            "false, or a tracker in tracking; samples.jsonl has every completion without either",
        ),
        *unused_settings(recipe, (OF_TABLE,), "a run without a table of completions"),
        *(
            Problem("reward_safety.on_error_of", text.format(name), nearest(name, named))
            for name in recipe.reward_safety.on_error_of
            if name not in known
        ),
    ]


def _scoring_contradictions(recipe: Recipe) -> list[Problem]:
    """Return the problems of reward functions, environments and tools."""
    rollout, envs, weights = recipe.rollout, recipe.envs, recipe.grpo.reward_weights
    scored = envs.environment is not None
    scores = scored + len(recipe.rewards) + (recipe.reward_model is not None)
    return [
        *refuse_if(
            not (recipe.rewards or recipe.reward_model or scored),
            "rewards",
            "rewards is empty: with no reward function nothing would be learnt",
            "the name of at least one reward function, or an environment",
        ),
        *refuse_if(
            scored and rollout.tool != "none",
            "rollout.tool",
            f"rollout.tool is {rollout.tool}, and envs.environment is {envs.environment}",
            "one of them: an environment can calculate",
        ),
        *refuse_if(
            envs.tools and not scored and rollout.tool != "none",
            "rollout.tool",
            f"rollout.tool is {rollout.tool}, and there are tools in envs.tools",
            "one of them: calculator is one of envs.tools too",
        ),
        *refuse_if(
            len({*recipe.rewards}) < len(recipe.rewards),
            "rewards",
            "rewards names a function twice",
            "each once; weigh it with grpo.reward_weights",
        ),
        *refuse_if(
            weights is not None and len(weights) not in (scores, scores - (envs.environment or "").startswith("trl:")),
            "grpo.reward_weights",
            f"grpo.reward_weights has {len(weights or ())} numbers for {scores} reward functions",
            "one for each, the environment's first, the reward model's last",
        ),
    ]


def _algorithm_contradictions(recipe: Recipe) -> list[Problem]:
    """Return the problems of settings that the algorithm does not allow."""
    rollout, grpo, envs, algorithm = recipe.rollout, recipe.grpo, recipe.envs, algorithm_of(recipe.grpo)
    scored = envs.environment is not None
    return [
        *off_policy_problems(recipe.training.off_policy_steps, grpo, total_steps=recipe.training.max_steps),
        *refuse_if(
            algorithm.overlong_buffer > rollout.max_new_tokens,
            "grpo.overlong_buffer",
            f"grpo.overlong_buffer is {algorithm.overlong_buffer:g} tokens, and a completion has at most "
            f"{rollout.max_new_tokens}",
            "at most rollout.max_new_tokens; below 1 it is a fraction of them",
        ),
        *refuse_if(
            recipe.critic is not None and not algorithm.needs_critic,
            "critic",
            f"critic is set, and {grpo.algorithm} has none",
            "null, or grpo.algorithm ppo",
        ),
        *refuse_if(
            algorithm.needs_critic and not recipe.critic and recipe.model.adapter and recipe.model.quantize != "none",
            "critic",
            "the critic would be a copy of the base, all of it trained, and a quantised base cannot be",
            "a checkpoint for it, or model.quantize none",
        ),
        *refuse_if(
            rollout.temperature == 0,
            "rollout.temperature",
            "rollout.temperature is 0: all samples of a group would be the same",
            "more than 0",
        ),
        *refuse_if(
            grpo.credit == "turn" and not (scored or envs.tools),
            "grpo.credit",
            "grpo.credit is turn, and there is no environment: a sample is one turn",
            "episode, or an environment or tools in envs",
        ),
    ]


def _shared_contradictions(recipe: "Recipe | SFTRecipe", functions: Sequence[str] = ()) -> list[Problem]:
    """Return the problems that recipes of both kinds may have; `functions` are the names of scores in metrics."""
    data, rollout, training = recipe.data, recipe.rollout, recipe.training
    needed = rollout.max_prompt_length + rollout.max_new_tokens
    of_section = {problem.what for problem in training.contradictions()}
    return [
        *refuse_if(
            not re.fullmatch(r"\w[\w.-]*", recipe.name),
            "name",
            f"name is {recipe.name!r}",
            "letters, digits, '-', '_' and '.': it names a folder",
        ),
        *refuse_if(
            data.task in DATA_PATHS and not data.path,
            "data.task",
            f"data.task {data.task} needs data.path, which is not set",
            DATA_PATHS.get(data.task, ""),
        ),
        *refuse_if(
            rollout.kv_cache_size is not None and rollout.kv_cache_size < needed,
            "rollout.kv_cache_size",
            f"rollout.kv_cache_size is {rollout.kv_cache_size}, and a sample may have {needed} tokens",
            f"null, or at least max_prompt_length + max_new_tokens = {needed}",
        ),
        *refuse_if(
            training.keep_best and not training.checkpoint_every_n_steps,
            "training.keep_best",
            f"training.keep_best is {training.keep_best}, and training.checkpoint_every_n_steps is 0: the last "
            "checkpoint is the only one",
            "a training.checkpoint_every_n_steps above 0, or no training.keep_best",
            unused=True,
        ),
        *refuse_if(
            training.keep_best.startswith("eval/") and not training.eval_every_n_steps,
            "training.keep_best",
            f"training.keep_best is {training.keep_best}, and training.eval_every_n_steps is 0: no step has the metric",
            "a training.eval_every_n_steps above 0, or no training.keep_best",
            unused=True,
        ),
        *(
            problem._replace(key=f"training.{problem.key}")
            for problem in metrics.unlogged(training.show, training.keep_best, recipe.method, functions)
            if problem.what not in of_section
        ),
    ]


def _unused_lora(recipe: AnyRecipe, places: Mapping[str, str], of_file: Mapping[str, str]) -> Iterator[RecipeError]:
    """Yield an error for each setting of adapters where the rank is 0, so that every weight would be trained.

    Args:
        places: places of all settings.
        of_file: places in the file. A file may have these settings together with a rank of 0, as every run folder does.
    """
    if recipe.model.lora.rank:
        return
    for key, where in places.items():
        name = key.removeprefix("model.lora.")
        beside_rank = where == of_file.get(key) and "model.lora.rank" in places
        if name != key and name != "rank" and not beside_rank and not (recipe.model.adapter and name == "dropout"):
            yield RecipeError(
                f"model.lora.{name} is set without a model.lora.rank: every weight would be trained",
                want=f"--model.lora.rank 16, for example; or no model.lora.{name}",
                where=where,
            )


SECTION = "grpo."
"""Beginning of the names of settings that a preset may set."""

OF_TABLE = UsedWhen(
    ("log_completions_every_n_steps", "num_completions_to_log"),
    lambda recipe: recipe.log_completions,
    "log_completions true",
)
"""Settings that are read only where completions are sent to the trackers."""

MAPPINGS = ("reward_safety.on_error_of", "envs.arguments")
"""Settings whose value is itself a mapping."""

HIDDEN = {"rollout.seed": "follows the run's seed; set seed instead"}
"""Settings of the config classes that a recipe cannot set, each with the reason."""

METHODS: dict[str, type[Recipe] | type[SFTRecipe]] = {"rl": Recipe, "sft": SFTRecipe}
COMMANDS = {"rl": "covey train", "sft": "covey sft"}
"""Command that trains by each method."""
