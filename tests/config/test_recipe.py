"""Recipes: strict reading, overrides, ranges, and a round trip through YAML."""

import dataclasses
import re
import time
from functools import partial
from typing import Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from covey.cli.commands import ChatOptions
from covey.config import recipe, strict_yaml
from covey.config.base import classes_in, leaves
from covey.config.kinds import without_none
from covey.config.recipe import Recipe, SFTRecipe
from covey.config.schema import EvalConfig, GRPOConfig, PPOConfig, RLTrainingConfig, SFTConfig, SFTDataConfig
from covey.errors import RecipeError

SMALL = """\
name: small
rewards: [first_letter]
"""


def refused(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        recipe.parse(text, overrides, name="r.yaml")
    return str(caught.value)


# --- reading


def test_a_number_with_an_exponent_and_no_point_is_a_number():
    text = SMALL + "training: {actor_optimizer: {learning_rate: 1e-5, eps: 1E-8}}"
    assert recipe.parse(text).training.actor_optimizer.learning_rate == 1e-5
    assert recipe.parse(text).training.actor_optimizer.eps == 1e-8


@pytest.mark.parametrize("word", ["no", "off", "yes", "1:30", "2024-01-01", "0x10", "010x", "<<", "="])
def test_words_that_yaml_1_1_reads_as_something_else_stay_text(word):
    assert recipe.parse(SMALL + f"description: {word}").description == word


def test_a_leading_zero_does_not_mean_octal():
    assert recipe.parse(SMALL + "seed: 010").seed == 10


def test_a_key_given_twice_is_refused_with_both_lines():
    told = "r.yaml:3: 'name' is given twice, first at r.yaml:1\n  fix: leave one of them out"
    assert refused(SMALL + "name: again") == told


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SMALL + "grpo: [", 3),
        (SMALL + "a: b: c", 3),
        (SMALL + "out: !!python/object/apply:os.system [echo]", 3),
        (SMALL + "out: &x y", 3),
        (SMALL + "? [a]\n: b", 3),
        (SMALL + "seed: !!int x", 3),
        (SMALL + "seed: " + "9" * 5000, 3),
        (SMALL + "---\nname: second", 3),
        ("- a\n- b", 1),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_line(text, line):
    assert refused(text).startswith(f"r.yaml:{line}: ")


HOSTILE = {
    "unknown keys": SMALL + "".join(f"setting{number}: 1\n" for number in range(20_000)),
    "unknown keys within the cap": SMALL + "".join(f"s{number}: 1\n" for number in range(3_500)),
    "unknown keys in a section": SMALL + "grpo: {" + ", ".join(f"s{number}: 1" for number in range(3_000)) + "}",
    "wrong words": SMALL + f"tracking: [{', '.join(['wandd'] * 4_000)}]",
    "names that are not there": SMALL + f"model: {{lora: {{targets: [{', '.join(['q_prog'] * 3_500)}]}}}}",
    "a long value": SMALL + "description: " + "x" * 5_000_000,
    "a long value of the wrong type": SMALL + "seed: " + "x" * 30_000,
    "a long word": SMALL + "data: {task: " + "x" * 30_000 + "}",
    "a long key": SMALL + "? " + "x" * 30_000 + "\n: 1",
    "a control character": SMALL + "a: \x00",
    "nested lists": SMALL + "rewards: " + "[" * 30_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_recipe_is_refused_at_once_and_in_few_words(text, tmp_path):
    (tmp_path / "r.yaml").write_text(text)
    started = time.process_time()
    with pytest.raises(RecipeError) as caught:
        recipe.load(tmp_path / "r.yaml")
    assert time.process_time() - started < 2
    assert len(str(caught.value)) < 20_000


def test_no_more_than_the_first_problems_are_listed():
    message = refused(SMALL + "".join(f"s{number}: 1\n" for number in range(50)))
    assert message.startswith("more than 20 problems; the first of them:\nr.yaml:3: there is no setting 's0'")
    assert message.count("there is no setting") == 20


def test_the_size_of_a_recipe_is_told_and_what_it_may_be(tmp_path):
    (tmp_path / "r.yaml").write_text(SMALL + "#" * 32_768)
    with pytest.raises(RecipeError, match=r"more than 32,768 bytes\n  wanted: a recipe") as caught:
        recipe.load(tmp_path / "r.yaml")
    assert caught.value.where == str(tmp_path / "r.yaml")


def test_unknown_keys_name_the_nearest_and_every_mistake_is_told_at_once():
    message = refused(
        SMALL + "gropo:\n  beta: 1\ngrpo:\n  num_generation: 2\n  beta: yes\ntraining: {learning_rate: 1, tracking: []}"
    )
    assert "5 problems" in message
    assert "it belongs elsewhere: tracking, in no section" in message
    assert "r.yaml:3: there is no setting 'gropo'\n  fix: did you mean 'grpo'?" in message
    assert "r.yaml:6: there is no setting 'num_generation' in grpo\n  fix: did you mean 'num_generations'?" in message
    assert "r.yaml:7: grpo.beta is 'yes'\n  wanted: a finite number" in message
    assert "r.yaml:8: there is no setting 'learning_rate' in training" in message
    assert "it belongs elsewhere: training.actor_optimizer.learning_rate" in message


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("seed: 1.5", "a whole number"),
        ("seed: true", "a whole number"),
        ("seed:", "a whole number"),
        ("rewards: first_letter", "a list [a, b] of: text"),
        ("grpo: 3", "a mapping (name: value)"),
        ("grpo: {beta: .nan}", "a finite number"),
        ("grpo: {beta: '0.1'}", "a finite number"),
        ("data: {task: sumz}", "first-letter, arithmetic, "),
    ],
)
def test_wrong_types_say_what_was_wanted(line, want):
    text = "rewards: [a]\n" + line if not line.startswith(("name", "rewards")) else line
    message = refused(text)
    assert f"wanted: {want}" in message
    assert message.startswith(f"r.yaml:{text.count(chr(10)) + 1}: ")


def test_an_empty_section_keeps_its_defaults_and_an_int_does_for_a_float():
    read = recipe.parse(SMALL + "grpo:\nrollout: {temperature: 1}")
    assert read.grpo == GRPOConfig()
    assert read.rollout.temperature == 1.0
    assert isinstance(read.rollout.temperature, float)


def test_a_section_of_which_a_part_is_given_keeps_its_own_defaults():
    """Not those of its class, which several sections share."""
    rl = recipe.parse(SMALL + "training: {critic_optimizer: {weight_decay: 0.1}}").training.critic_optimizer
    assert (rl.weight_decay, rl.learning_rate) == (0.1, RLTrainingConfig().critic_optimizer.learning_rate)
    text = "method: sft\ndata: {task: sums}\n"
    for section, words in (("training: {optimizer: {b1: 0.8}}", []), ("", ["--optimizer.b1=0.8"]), ("training:", [])):
        optimizer = recipe.parse(text + section, words, kind=SFTRecipe).training.optimizer
        assert optimizer.learning_rate == SFTConfig().optimizer.learning_rate == 2e-5


def test_the_end_of_a_name_means_the_mesh_of_the_actor_and_not_that_of_a_role():
    read = recipe.parse(SMALL, ["--mesh.fsdp=2", "--tp=2", "--role-to-mesh.rollout.fsdp=4"])
    assert (read.model.mesh.fsdp, read.model.mesh.tp) == (2, 2)
    rollout = read.role_to_mesh.rollout
    assert (rollout.data, rollout.fsdp, rollout.tp) == (0, 4, 0)
    assert recipe.parse(recipe.to_yaml(read)) == read
    assert "role_to_mesh.rollout.tp is -1" in refused(SMALL + "role_to_mesh: {rollout: {tp: -1}}")


# --- overrides


@pytest.mark.parametrize(
    "words",
    [
        ["--grpo.num_generations", "4"],
        ["--num-generations", "4"],
        ["--num_generations=9", "--num-generations", "4"],
    ],
)
def test_an_override_can_be_written_in_several_ways(words):
    assert recipe.parse(SMALL, words).grpo.num_generations == 4


def test_a_list_may_be_given_in_parts():
    words = ["--rewards", "sentence", "--rewards=first_letter,number_only", "--lora.rank=4", "--lora.targets=q_proj"]
    read = recipe.parse(SMALL, [*words, "model.lora.targets=[k_proj, v_proj]"])
    assert read.rewards == ("sentence", "first_letter", "number_only")
    assert read.model.lora.targets == ("q_proj", "k_proj", "v_proj")


ALONE = ("--model.lora.alpha=32", "--lora.targets=q_proj", "--lora.dropout=0.1")


@pytest.mark.parametrize("word", ALONE)
@pytest.mark.parametrize("text", [SMALL, SMALL + "model: {lora: {rank: 0, alpha: 64}}"])
def test_a_setting_of_adapters_without_a_rank_is_refused(text, word):
    """With the default value too: who sets it does not mean to train every weight."""
    name = word.partition("=")[0].rpartition(".")[2]
    assert f"model.lora.{name} is set without a model.lora.rank" in refused(text, word)
    assert recipe.parse(text, [word, "--lora.rank=8"]).model.lora.rank == 8


def test_a_setting_of_adapters_may_stand_beside_a_written_rank_of_0():
    assert "r.yaml:3: model.lora.alpha is set without" in refused(SMALL + "model: {lora: {alpha: 64}}")
    whole = recipe.parse(SMALL + "model: {lora: {rank: 8, alpha: 64}}", ["--lora.rank=0"])
    assert recipe.parse(recipe.to_yaml(whole)) == whole
    on_adapter = ["--model.adapter=folder", "--lora.dropout=0.1"]
    assert recipe.parse(SMALL, on_adapter).model.lora.dropout == 0.1
    assert "model.lora.alpha is set" in refused(SMALL, *on_adapter, "--lora.alpha=8")


def test_overrides_are_read_as_the_type_of_their_field():
    words = [
        "--learning-rate",
        "1e-5",
        "--data.task=jsonl",
        "--data.path=123",
        "--lora.rank=8",
        "--lora.targets=q_proj",
    ]
    words += ["--remat", "false", "--epsilon-high=null", "--rewards", "one, two", "--reward-weights", "[1, 0.5]"]
    words += ["--description", "a=b: [c"]
    read = recipe.parse(SMALL + "grpo: {epsilon_high: 0.3}", words)
    assert read.training.actor_optimizer.learning_rate == 1e-5
    assert (read.data.path, read.description) == ("123", "a=b: [c")
    assert (read.rewards, read.grpo.reward_weights) == (("one", "two"), (1.0, 0.5))
    assert (read.model.lora.targets, read.model.remat, read.grpo.epsilon_high) == (("q_proj",), False, None)


def test_none_is_a_choice_where_it_is_one_and_null_where_it_is_not() -> None:
    """`none` switches a correction off that would be on by default; it does not leave the choice to the preset."""
    made = recipe.parse(SMALL, ["--grpo.correction", "none", "--grpo.delta", "none"])
    assert (made.grpo.correction, made.grpo.delta) == ("none", None)
    assert recipe.parse(SMALL, ["--grpo.correction", "null"]).grpo.correction is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grpo.num_generation", "8"], "did you mean --grpo.num-generations?"),
        (["--grop.beta", "8"], "did you mean --grpo.beta?"),
        (["--grpo.zzz", "8"], "one of: --grpo.algorithm, --grpo.num-generations"),
        (["--temperature", "1"], "--rollout.temperature, --evaluation.temperature"),
        (["--beta"], "--beta has no value"),
        (["--beta", "low"], "--beta: grpo.beta is 'low'"),
        (["--rollout.seed", "3"], "set seed instead"),
        (["extra"], "'extra' is one word too many"),
        (["--"], ""),
    ],
)
def test_mistakes_in_overrides(words, message):
    if message:
        assert message in refused(SMALL, *words)
    else:
        assert recipe.parse(SMALL, words) == recipe.parse(SMALL)


def test_an_override_does_not_hide_a_broken_section():
    assert "grpo is 3" in refused(SMALL + "grpo: 3", "--grpo.beta", "0.1")


# --- ranges and contradictions


def test_all_contradictions_come_in_one_error_each_with_its_place():
    text = SMALL + "rollout:\n  kv_cache_size: 3\ndata: {task: gsm8k}\n"
    message = refused(text, "--reward-weights", "1,2", "--num-generations=1")
    assert message.startswith("4 problems")
    for part in (
        "r.yaml:4: rollout.kv_cache_size is 3, and a sample may have 768 tokens",
        "r.yaml:5: data.task gsm8k needs data.path",
        "--reward-weights: grpo.reward_weights has 2 numbers for 1 reward functions",
        "--num-generations: grpo.num_generations is 1: an answer needs others",
    ):
        assert part in message


def test_values_out_of_their_range_come_first_in_one_error_with_wrong_names_and_types():
    text = SMALL + "rollout:\n  top_p: 0\n  kv_cache_size: 3\ndata: {tsk: gsm8k}\n"
    message = refused(text, "--num-generations=1.5")
    assert message.startswith("3 problems")
    for part in (
        "r.yaml:4: rollout.top_p is 0\n  wanted: greater than 0",
        "r.yaml:6: there is no setting 'tsk' in data\n  fix: did you mean 'task'?",
        "--num-generations: grpo.num_generations is 1.5\n  wanted: a whole number",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("rewards=[]", "rewards is empty"),
        ("rewards=a,a", "names a function twice"),
        ("--rollout.temperature=0", "would be the same"),
        ("name=../x", "it names a folder"),
        ("lora.targets=q_pro", "did you mean 'q_proj'?"),
        ("--reward_safety.on_error_of=rais", "did you mean 'raise'?"),
        ("b1=1.0", "less than 1"),
        ("lora.rank=4 lora.targets=[]", "nothing would be trained"),
        ("actor-optimizer.momentum=0.9", "momentum is 0.9, and the optimizer adamw does not use it"),
    ],
)
def test_single_problems(override, part):
    assert part in refused(SMALL, *override.split())


def read_back(settings):
    """The settings that are read from a recipe that was written, and what is wrong with them."""
    tree = strict_yaml.read(recipe.to_yaml(settings), "r.yaml").tree
    return strict_yaml.validate_tree(type(settings), tree)


def test_defaults_lie_within_their_ranges():
    for tree in (Recipe, SFTRecipe):
        assert read_back(tree()) == (tree(), [])
    recipe.validate(Recipe(rewards=("x",)))
    recipe.validate(SFTRecipe(data=SFTDataConfig(path="x")))


@pytest.mark.parametrize("tree", [Recipe, SFTRecipe])
def test_every_number_has_a_range(tree):
    kinds = leaves(tree)
    whole = {path for path, kind in kinds.items() if without_none(kind)[0] is int}
    parts = {path for path, kind in kinds.items() if without_none(kind)[0] is float}
    assert all(bounds(kinds[path])[Le] <= 2**31 - 1 for path in whole)
    assert {path for path in parts if not bounds(kinds[path])} <= {"reward_safety.value", "envs.value"}


# --- the tree


def test_the_rollout_follows_the_seed_also_when_the_resolved_recipe_is_run_with_another():
    first = recipe.parse(SMALL, ["--seed", "3"])
    assert first.rollout.seed == 3
    again = recipe.parse(recipe.to_yaml(first), ["--seed", "4"])
    assert (again.seed, again.rollout.seed) == (4, 4)
    assert again == dataclasses.replace(first, seed=4)


def bounds(kind):
    """Return the limits of a number, by their class in `annotated_types`."""
    limits = {type(kind): getattr(kind, type(kind).__name__.lower())} if isinstance(kind, (Ge, Gt, Le, Lt)) else {}
    parts = (*get_args(kind), *getattr(kind, "__metadata__", ()))
    return limits | {limit: value for part in parts for limit, value in bounds(part).items()}


def settings_of(kind):
    """Values of a field of type `kind` in its range; of a class, those of them that do not contradict each other."""
    if classes := classes_in(kind):
        cls = classes[0]
        names = [name for name in cls.kinds if (cls.section, name) != ("rollout", "seed")]
        fields = {name: settings_of(cls.kinds[name]) for name in names}
        return st.fixed_dictionaries({}, optional=fields).map(partial(agreeing, cls))
    inner, optional = without_none(kind)
    if optional:
        return st.none() | in_range(inner, bounds(kind))
    return in_range(inner, bounds(kind))


def agreeing(cls, drawn):
    """Settings as drawn, without those that contradict others."""
    while problems := list(cls.from_checked(drawn).contradictions()):
        kept = {name: value for name, value in drawn.items() if name not in {problem.key for problem in problems}}
        drawn = kept if len(kept) < len(drawn) else {}
    return cls(**drawn)


def in_range(kind, limits):
    if get_origin(kind) is tuple:
        return st.lists(settings_of(get_args(kind)[0]), max_size=3).map(tuple)
    if get_origin(kind) is dict:
        return st.dictionaries(st.text(), settings_of(get_args(kind)[1]), max_size=3)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    low, high = limits.get(Ge, limits.get(Gt)), limits.get(Le, limits.get(Lt))
    if kind is int:
        return st.integers(low, high)
    ends = {"exclude_min": Gt in limits, "exclude_max": Lt in limits}
    number = partial(st.floats, low, high, allow_nan=False, allow_infinity=False, **ends)
    return {str: st.text, bool: st.booleans, float: number, JsonValue: values_of_json}[kind]()


def values_of_json():
    plain = st.none() | st.booleans() | st.integers(-10, 10) | st.floats(-10, 10) | st.text(max_size=3)
    wrap = lambda part: st.lists(part, max_size=2) | st.dictionaries(st.text(max_size=3), part, max_size=2)  # noqa: E731
    return st.recursive(plain, wrap, max_leaves=3)


@pytest.mark.slow
@given(settings_of(Recipe) | settings_of(SFTRecipe))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_what_is_written_is_read_back_equal(drawn):
    assert read_back(drawn) == (drawn, [])


@pytest.mark.parametrize(
    "text", ["1e-5", "yes", "null", "~", "", " x ", "1:30", "a\nb", "\x85", "\u2028", "#", "é", "- a", "\ud800"]
)
def test_awkward_text_survives(text):
    drawn = Recipe(rewards=("r",), description=text)
    assert recipe.parse(recipe.to_yaml(drawn)) == drawn


def test_the_written_recipe_is_whole():
    read = strict_yaml.read(recipe.to_yaml(Recipe(rewards=("r",), grpo=PPOConfig())), "r.yaml")
    assert read.places.keys() >= leaves(Recipe).keys() - recipe.HIDDEN.keys()


def test_the_settings_of_ppo_are_read_where_they_are_used_or_not_set():
    """A recipe in a run folder may have all of them, whatever its algorithm."""
    unset = "grpo: {gamma: null, gae_lambda: null, value_clip: null, whiten: null}"
    assert recipe.parse(SMALL + unset).grpo == GRPOConfig()
    used = recipe.parse(SMALL + "grpo: {algorithm: ppo}", ["--gae-lambda=0.9"]).grpo
    assert used == PPOConfig(num_generations=8, gae_lambda=0.9)
    assert isinstance(recipe.parse(SMALL, ["--advantage=gae"]).grpo, PPOConfig)
    assert "r.yaml:3: grpo.gamma is set, and grpo with these settings has no use" in refused(SMALL + "grpo: {gamma: 1}")


# --- the two kinds

SUPERVISED = """\
name: small
method: sft
data: {task: arithmetic}
"""


def test_a_recipe_for_supervised_training_is_a_tree_of_its_own():
    read = recipe.parse(
        SUPERVISED, ["--batch-size", "4", "--learning-rate=1e-3", "--show", "perplexity,entropy"], kind=SFTRecipe
    )
    assert isinstance(read, SFTRecipe)
    assert (read.training.batch_size, read.training.optimizer.learning_rate) == (4, 1e-3)
    assert read.training.show == ("perplexity", "entropy")
    assert recipe.parse(recipe.to_yaml(read), kind=SFTRecipe) == read


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--too-long", "cut"], "error, drop, truncate"),
        (["--rewards", "first_letter"], "there is no setting --rewards"),
        (["--data.task", "first-letter"], "no worked answers"),
        (["--data.task", "sums", "--data.path", "a"], "data.path is a, and data.task sums does not read it"),
        (["--data.task", "gsm8k", "--completion-column", "a"], "data.completion_column is a, and data.task gsm8k"),
        (["--rollout.kv-cache-size", "3"], "a sample may have"),
    ],
)
def test_mistakes_in_a_supervised_recipe(words, message):
    with pytest.raises(RecipeError) as caught:
        recipe.parse(SUPERVISED, words, "r.yaml", SFTRecipe)
    assert message in str(caught.value)


def test_a_recipe_of_the_other_kind_is_answered_with_its_command(tmp_path):
    file, plain = tmp_path / "sft.yaml", tmp_path / "plain.yaml"
    file.write_text(SUPERVISED)
    plain.write_text(SMALL)
    with pytest.raises(RecipeError) as caught:
        recipe.load(file, ["--rewards", "first_letter"])  # the kind is told before its settings are looked at
    assert f"fix: covey sft {file}" in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        recipe.load(plain, kind=SFTRecipe)
    assert f"fix: covey train {plain}, or write method: sft at its top" in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        recipe.load("quickstart", kind=SFTRecipe)
    assert str(caught.value).endswith("fix: covey train quickstart")
    assert (recipe.kind_of(file), recipe.kind_of("quickstart")) == (SFTRecipe, Recipe)
    assert isinstance(recipe.load_any(file), SFTRecipe)
    assert isinstance(recipe.load_any(plain), Recipe)


@pytest.mark.parametrize("method", ["stf", "[sft]", "3", ""])
def test_an_unknown_method_is_refused(tmp_path, method):
    file = tmp_path / "r.yaml"
    file.write_text(SMALL + f"method: {method}\n")
    with pytest.raises(RecipeError, match=r"r\.yaml:3: there is no method"):
        recipe.load_any(file)


# --- finding


def test_a_file_or_a_run_folder_is_a_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text(SMALL)
    assert recipe.load(tmp_path / "recipe.yaml") == recipe.load(tmp_path) == recipe.parse(SMALL)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("quikstart", "did you mean 'quickstart'?"),
        ("gsm8k-smollm2", "data.task gsm8k needs data.path"),
        ("recipies/mine.yaml", "recipies/mine.yaml: there is no such recipe file"),
        ("{}/recip.yaml", "did you mean 'recipe.yaml'?"),
        ("{}/bytes.yaml", "cannot be read"),
    ],
)
def test_wrong_names_and_paths(tmp_path, source, part):
    (tmp_path / "recipe.yaml").write_text(SMALL)
    (tmp_path / "bytes.yaml").write_bytes(b"\xfa\xfb")
    with pytest.raises(RecipeError) as caught:
        recipe.load(source.format(tmp_path))
    assert part in str(caught.value)


def test_the_settings_of_a_command_are_checked_alike():
    item = strict_yaml.read("rollout: {max_new_tokens: 0}", "r.yaml")
    with pytest.raises(RecipeError, match=r"r.yaml:1: rollout\.max_new_tokens is 0"):
        strict_yaml.build(ChatOptions, item)


def test_python_gives_the_same_errors_as_yaml():
    with pytest.raises(RecipeError, match=r"(?s)training.prompts_per_step is 0.*training.max_to_keep is 0") as python:
        RLTrainingConfig(prompts_per_step=0, max_to_keep=0)
    with pytest.raises(RecipeError) as yaml:
        recipe.parse(SMALL + "training:\n  prompts_per_step: 0\n  max_to_keep: 0\n", name="r.yaml")
    assert re.sub(r"r\.yaml:\d+: ", "RLTrainingConfig: ", str(yaml.value)) == str(python.value)
    with pytest.raises(RecipeError, match=r"GRPOConfig: grpo.delta is set"):
        GRPOConfig(delta=2.0, algorithm="cispo")
    with pytest.raises(RecipeError, match=r"(?s)evaluation.pass_k is 2.*evaluation.pass_k is set"):
        EvalConfig(pass_k=2)


# --- recipes of runs


UNREAD = """\
grpo: {beta: 0.0, kl: k2, reference_mixing: 0.5}
envs: {timeout: 7.0}
training: {actor_optimizer: {momentum: 0.9}}
"""


def test_a_run_may_be_recorded_with_settings_that_nothing_reads(tmp_path, caplog):
    """Former settings among them."""
    former = UNREAD.replace("training: {", "training: {queueing: async, ")
    (tmp_path / "recipe.yaml").write_text(SMALL + former)
    assert recipe.load(tmp_path) == recipe.parse(SMALL + "grpo: {beta: 0.0}")
    left_out = [re.search(r"yaml:(\d): .*? is .*: left out$", text)[1] for text in caplog.messages]
    assert sorted(left_out) == ["3", "3", "4", "5", "5"]
    with pytest.raises(RecipeError, match=r"(?s)no setting .queueing. in training.*leave it out: a thread samples"):
        recipe.parse(SMALL + former)


def test_pages_of_the_cache_are_answered_with_what_saves_memory():
    for name in ("page_size", "num_pages"):
        text = refused(SMALL + f"rollout: {{{name}: 256}}\n")
        assert "CPUs a third or more slower; for less memory, set fewer rollout.slots" in text


def test_an_unread_setting_is_refused_in_a_recipe_and_beside_the_recipe_of_a_run(tmp_path):
    (tmp_path / "recipe.yaml").write_text(SMALL + UNREAD)
    with pytest.raises(RecipeError, match=r"^4 problems") as caught:
        recipe.load(tmp_path / "recipe.yaml")
    unread = re.findall(r"yaml:\d: (\S+) is", str(caught.value))
    assert unread == ["grpo.kl", "grpo.reference_mixing", "envs.timeout", "momentum"]
    with pytest.raises(RecipeError, match=r"^--grpo\.kl: grpo\.kl is set, and .*\n.*$"):
        recipe.load(tmp_path, ["--grpo.kl", "k1"])


@pytest.mark.parametrize("escape", ["\\UFFFFFFFF", "\\U00110000"])
def test_an_escape_beyond_unicode_is_no_traceback(escape: str) -> None:
    """PyYAML asks for its character without a check."""
    with pytest.raises(RecipeError, match="not readable as YAML: an escape names no character"):
        recipe.parse(f'name: "{escape}"\n', (), "r.yaml", recipe.Recipe)
