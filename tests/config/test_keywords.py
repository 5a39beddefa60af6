"""Python's keywords are answered as the command answers its words: by the right name, type and range, at once."""

import copy
import os
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import covey
from covey.cli.main import parse
from covey.config import base, foreign_names, recipe
from covey.config.base import Config, PositiveInt, leaves
from covey.config.recipe import Recipe, SFTRecipe
from covey.errors import CoveyError


def refused(cls: type, *args: Any, **keywords: Any) -> str:
    with pytest.raises(CoveyError) as caught:
        cls(*args, **keywords)
    return str(caught.value)


CONFIGS = [getattr(covey, name) for name in covey.__all__ if name.endswith(("Config", "Options", "Recipe"))]
OFFERED = {"covey_ppo": "PPOLearner", "covey_sft": "SFTLearner"}
LEARNERS = [covey.GRPOLearner, *(getattr(covey, name) for package, name in OFFERED.items() if find_spec(package))]
OTHERS = (*LEARNERS, covey.RLCluster)


# --- names


@pytest.mark.parametrize("cls", [*CONFIGS, *OTHERS], ids=lambda cls: cls.__name__)
def test_a_keyword_that_no_class_has_is_refused_by_name(cls: type) -> None:
    assert re.match(rf"{cls.__name__} has no keyword 'zzz'\n  fix: one of: \w+", refused(cls, zzz=1))


@pytest.mark.parametrize(
    ("cls", "name", "fix"),
    [
        (covey.GRPOConfig, "num_generation", "did you mean 'num_generations'?"),
        (covey.GRPOLearner, "reward_fn", "write GRPOLearner(reward_fns=...)"),
        (covey.GRPOLearner, "ppo_config", "did you mean 'grpo_config'?"),
        # ours, in another class
        (covey.GRPOConfig, "max_new_tokens", "it belongs elsewhere: RolloutConfig(max_new_tokens=...)"),
        # TRL's
        (covey.GRPOConfig, "max_completion_length", "write RolloutConfig(max_new_tokens=...)"),
        (covey.GRPOConfig, "per_device_train_batch_size", "write RLTrainingConfig(prompts_per_step=...)"),
        (covey.GRPOConfig, "gradient_accumulation_steps", "leave it out: it follows from RLTrainingConfig("),
        (covey.GRPOConfig, "vllm_importance_sampling_correction", "write GRPOConfig(correction=...)"),
        (covey.GRPOLearner, "args", "GRPOLearner(grpo_config=GRPOConfig(...))"),
        # Tunix's
        (
            covey.RLTrainingConfig,
            "compute_logps_micro_batch_size",
            "write RLTrainingConfig(ref_logps_micro_batch_size=...) and",
        ),
    ],
)
def test_a_wrong_keyword_is_answered_with_the_right_one(cls: type, name: str, fix: str) -> None:
    message = refused(cls, **{name: 1})
    assert message.startswith(f"{cls.__name__} has no keyword {name!r}\n  fix: ")
    assert fix in message


@pytest.mark.parametrize("make", [*OTHERS, covey.RLCluster.load])
@pytest.mark.parametrize("name", ["peft_config", "lora_config"])
def test_adapters_of_other_libraries_are_answered_with_ours(make: Any, name: str) -> None:
    given = {"actor": "scratch:arithmetic-tiny", name: {"r": 8}} if make == covey.RLCluster.load else {name: {"r": 8}}
    assert "write RLCluster.load(actor=..., lora=LoRAConfig(rank=...))" in refused(make, **given)


def test_a_wrong_keyword_of_load_is_refused_before_anything_is_loaded() -> None:
    load = covey.RLCluster.load
    assert refused(load, actor="no/such", param_dtyp="bfloat16").endswith("fix: did you mean 'param_dtype'?")
    assert "wanted: LoRAConfig(...)" in refused(load, actor="no/such", lora={"rank": 4})
    assert "a rank of 1 or more" in refused(load, actor="no/such", lora=covey.LoRAConfig())


def test_nothing_in_place_of_empty_text_is_answered_with_it() -> None:
    assert refused(covey.EvalConfig, format=None).endswith('wanted: text\n  fix: write "" for none')


def test_a_learner_takes_no_keyword_that_only_its_base_has() -> None:
    assert "GRPOLearner has no keyword 'config'" in refused(covey.GRPOLearner, rl_cluster=None, config=None)


def test_the_same_names_are_answered_in_a_recipe_and_on_the_command_line() -> None:
    text = "rewards: [first_letter]\ngrpo:\n  max_completion_length: 3\n  vllm_mode: colocate\n"
    with pytest.raises(CoveyError) as caught:
        recipe.parse(text, name="r.yaml")
    message = str(caught.value)
    assert (
        "r.yaml:3: there is no setting 'max_completion_length' in grpo\n  fix: write rollout.max_new_tokens" in message
    )
    assert "r.yaml:4: there is no setting 'vllm_mode' in grpo\n  fix: leave it out" in message
    pytest.importorskip("covey_shell")  # one of the commands is its own
    for words, fix in {
        ("train", "quickstart", "--max-completion-length", "3"): "write --rollout.max-new-tokens",
        ("train", "quickstart", "--grpo.num-train-epochs", "3"): "write --training.num-epochs",
        ("train", "quickstart", "--lr", "3"): "write --training.actor-optimizer.learning-rate",
        ("sft", "sft-arithmetic", "--lr", "3"): "write --training.optimizer.learning-rate",
        ("sft", "sft-arithmetic", "--per-device-train-batch-size", "3"): "write --training.batch-size",
        ("generate", "scratch:arithmetic-tiny", "hello", "--max-tokens", "3"): "write --rollout.max-new-tokens",
    }.items():
        with pytest.raises(CoveyError, match=re.escape(fix)):
            parse(words)()


def test_a_foreign_name_of_what_a_command_lacks_is_not_answered_with_it() -> None:
    with pytest.raises(CoveyError) as caught:
        parse(["generate", "scratch:arithmetic-tiny", "hello", "--num-train-epochs", "3"])()
    assert "num-epochs" not in str(caught.value)


def test_a_name_has_one_answer_in_all_libraries() -> None:
    answers: dict[str, set[str]] = {}
    for rows in foreign_names.tables()["settings"].values():
        for answer, names in rows.items():
            for name in names:
                answers.setdefault(name, set()).add(answer)
    assert {name: texts for name, texts in answers.items() if len(texts) > 1} == {}
    assert len(answers) > 250


def test_every_answer_names_settings_that_exist() -> None:
    ours = {*leaves(Recipe), *leaves(SFTRecipe)}
    named = {
        one
        for text in foreign_names.settings().values()
        for group in foreign_names.OURS.findall(text)
        for one in group.split("|")
    }
    assert named <= ours
    public = {match for text in foreign_names.tables()["arguments"] for match in re.findall(r"\b([A-Z]\w+)\(", text)}
    assert public <= set(covey.__all__)


def test_no_foreign_name_is_one_of_ours_where_it_would_be_answered() -> None:
    """A name that means something here, in a recipe at least, is not called another library's."""
    for cls in (Recipe, SFTRecipe):
        ends = {path.rpartition(".")[2] for path in leaves(cls)}
        both = ends & {*foreign_names.settings()}
        assert both <= {"batch_size"}, "supervised training has it, reinforcement learning does not"


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("actor_rollout_ref.rollout.n", "--grpo.num-generations"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "--evaluation.samples"),
        ("critic.optim.lr", "--training.critic-optimizer.learning-rate"),
        ("actor_rollout_ref.model.path", "--model.source"),
    ],
)
def test_a_path_of_verl_is_answered_by_its_longest_known_end(path: str, flag: str) -> None:
    with pytest.raises(CoveyError) as caught:
        recipe.load("quickstart", [f"{path}=1"])
    assert str(caught.value).endswith(f"fix: write {flag}")


def test_sections_of_verl_are_answered_with_their_lines() -> None:
    text = "rewards: [first_letter]\nactor_rollout_ref:\n  model: {path: x}\ndata:\n  train_files: x\nrollout: {n: 8}\n"
    with pytest.raises(CoveyError) as caught:
        recipe.parse(text)
    told = str(caught.value)
    assert "recipe:2: there is no setting 'actor_rollout_ref'\n  fix: write model.source for model" in told
    assert "recipe:5: there is no setting 'train_files' in data\n  fix: write data.path" in told
    assert "there is no setting 'n' in rollout\n  fix: write grpo.num_generations" in told


# --- values


@pytest.mark.parametrize(
    ("cls", "keywords", "what", "want"),
    [
        (covey.GRPOConfig, {"epsilon": -1}, "grpo.epsilon is -1", "greater than 0"),
        (covey.GRPOConfig, {"beta": float("nan")}, "grpo.beta is nan", "a finite number"),
        (covey.GRPOConfig, {"num_generations": "8"}, "grpo.num_generations is '8'", "a whole number"),
        (covey.GRPOConfig, {"num_generations": True}, "grpo.num_generations is True", "a whole number"),
        (covey.GRPOConfig, {"advantage": "centered"}, "grpo.advantage is 'centered'", "did you mean 'centred'?"),
        (covey.GRPOConfig, {"reward_weights": 1.0}, "grpo.reward_weights is 1.0", "a list [a, b] of: a finite number"),
        (covey.PPOConfig, {"gamma": 2}, "grpo.gamma is 2", "less than or equal to 1"),
        (covey.RLTrainingConfig, {"max_steps": 1e3}, "training.max_steps is 1000.0", "a whole number (or null)"),
        (covey.RLTrainingConfig, {"actor_optimizer": 1e-5}, "actor_optimizer is 1e-05", "OptimizerConfig(...)"),
        (covey.ModelOptions, {"remat": "no"}, "model.remat is 'no'", "true or false"),
        (covey.ModelOptions, {"lora": 8}, "model.lora is 8", "LoRAConfig(...)"),
        (covey.RewardSafetyConfig, {"on_error_of": {"f": "no"}}, "on_error_of is {'f': 'no'}", "a mapping"),
        (covey.ClusterConfig, {"training_config": covey.SFTConfig()}, "training_config is SFTC", "RLTrainingConfig("),
        (covey.RLTrainingConfig, {"show": ("klll",)}, "training.show names 'klll'", "did you mean 'kl'?"),
        (covey.RLTrainingConfig, {"max_steps": 10**5000}, "training.max_steps is a number of thousands", "2147483647"),
        (covey.GRPOConfig, {"num_generations": 2**31}, "grpo.num_generations is 2147483648", "or equal to 65536"),
        (covey.EvalConfig, {"preset": "greedy", "top_p": 0.5}, "evaluation.top_p is set", "null for one of the two"),
        (covey.ModelOptions, {"quantize": "nf4"}, "model.quantize is nf4 without adapters", "lora.rank above 0"),
    ],
)
def test_a_wrong_value_is_refused_where_it_is_given(cls: type, keywords: Any, what: str, want: str) -> None:
    message = refused(cls, **keywords)
    assert message.startswith(f"{cls.__name__}: ")
    assert what in message
    assert want in message


@pytest.mark.parametrize(
    ("cls", "keywords", "want"),
    [
        (covey.RLCluster, {"cluster_config": covey.RLTrainingConfig()}, "ClusterConfig(...)"),
        (covey.GRPOLearner, {"grpo_config": covey.RolloutConfig()}, "GRPOConfig(...)"),
        (covey.GRPOLearner, {"grpo_config": {"beta": 1}}, "GRPOConfig(...)"),
    ],
)
def test_a_config_of_another_sort_is_refused(cls: type, keywords: Any, want: str) -> None:
    message = refused(cls, **keywords)
    assert message.startswith(f"{cls.__name__}: {next(iter(keywords))} is ")
    assert f"wanted: {want}" in message


def test_a_value_without_its_name_is_checked_too() -> None:
    assert "model.lora.rank is -1" in refused(covey.LoRAConfig, -1)


def test_more_values_than_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="LoRAConfig takes 4 arguments, and 5 were given"):
        covey.LoRAConfig(8, 16.0, ("q_proj",), 0.0, 1)  # type: ignore[call-arg]


def test_all_mistakes_are_told_at_once() -> None:
    message = refused(covey.GRPOConfig, num_generation=8, epsilon=-1, num_iterations="2")
    assert "3 problems" in message
    assert all(part in message for part in ("'num_generations'?", "epsilon is -1", "num_iterations is '2'"))


def test_what_fits_is_taken_as_the_type_of_its_field() -> None:
    """Scalars of NumPy, a list for a tuple, a path for text, an optax transformation for an optimizer."""
    assert covey.GRPOConfig(num_generations=np.int64(4), epsilon=np.float32(0.5), beta=0).num_generations == 4
    assert covey.GRPOConfig(reward_weights=[1, 0.5]).reward_weights == (1.0, 0.5)
    assert covey.DataConfig(path=Path("rows.jsonl")).path == "rows.jsonl"
    sgd: Any = optax.sgd(0.1)
    assert covey.RLTrainingConfig(actor_optimizer=sgd).actor_optimizer is sgd
    assert covey.LoRAConfig(8, 16.0).rank == 8
    config = covey.PPOConfig(gamma=0.9)
    assert config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == replace(config)
    assert hash(config) == hash(replace(config))
    assert "GRPOConfig has no keyword 'lr'" in refused(lambda: replace(covey.GRPOConfig(), lr=1))  # type: ignore[arg-type]


def test_a_class_of_a_users_own_may_take_more() -> None:
    class Mine(covey.GRPOLearner):
        def __init__(self, **others: Any):
            self.mine = others.pop("mine")

    assert Mine(mine=3).mine == 3  # type: ignore[abstract]


def test_no_plugin_of_pydantic_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for one reads the metadata of every installed package, at the first setting of each command."""
    from pydantic.plugin import _loader

    def refuse(group: str) -> None:
        raise AssertionError(group)

    monkeypatch.setattr(_loader, "_plugins", None)
    monkeypatch.setattr(_loader, "entry_points", refuse)
    for before in (None, "logfire-plugin"):
        monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", before) if before else None

        class Fresh(Config):
            """Settings whose validator is made here."""

            count: PositiveInt = 1

        assert Fresh(count=2).count == 2
        assert os.environ.get("PYDANTIC_DISABLE_PLUGINS") == before


def test_threads_that_make_their_first_settings_leave_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(base.PLUGINS_OFF, raising=False)
    entered, left = threading.Event(), threading.Event()

    def another() -> None:
        with base._without_plugins():
            entered.set()
            assert left.wait(30)
            assert os.environ[base.PLUGINS_OFF] == "__all__", "as long as this thread needs it"

    with ThreadPoolExecutor(1) as pool:
        with base._without_plugins():
            other = pool.submit(another)
            entered.wait(0.2)
        left.set()
        other.result()
    assert base.PLUGINS_OFF not in os.environ
