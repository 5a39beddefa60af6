"""Configs and tensor names of each family, and tiny random models of each against transformers: plain, padded, packed
in rows, sampled with a cache.
"""

import dataclasses
import json
import math
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from covey.config.schema import RolloutConfig
from covey.errors import WeightsError
from covey.losses.logprobs import token_logps
from covey.models import families
from covey.models.config import ModelConfig, RopeScaling
from covey.models.loading import weights
from covey.models.loading.config_fields import check_config
from covey.models.loading.hf_config import TEXT_PARTS, text_name
from covey.packing.rows import pack, unpack
from covey.sampling.engine import Engine, Request, generate
from covey.sampling.logits import SamplingParams, draw, sample_keys, token_keys
from covey.types import Completion, FinishReason, Group

Logits = Callable[..., np.ndarray]
Golden = Callable[[str], weights.LoadedModel]
ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "parity" / "golden"
MODELS = json.loads((GOLDEN / "families.json").read_text())
INPUTS = json.loads((GOLDEN / "inputs.json").read_text())
LLAMA = MODELS["llama"]["config"]
SAMPLED = [name for name in MODELS if "-" not in name or "yarn" in name]
"""Models that sample too, for which layers are spelt out."""
TIME = 40
OTHERS = TEXT_PARTS["gemma3"].others
OF_PACKAGE = ("phi3", "olmo2", "smollm3", "nanochat")
"""Families of `covey_families`, with the golden numbers of all others here."""


@pytest.fixture(autouse=True)
def families_that_are_there(request: pytest.FixtureRequest) -> None:
    """Skip the cases of a family whose package is hidden."""
    case = getattr(request.node, "callspec", None)
    of_case = (
        {} if case is None else MODELS.get(case.params.get("name"), {}).get("config") or case.params.get("fields", {})
    )
    if of_case.get("model_type") in OF_PACKAGE:
        pytest.importorskip("covey_families")


@pytest.mark.parametrize(
    ("name", "looped"),
    [
        *((name, True) for name in MODELS),
        *(pytest.param(n, False, marks=pytest.mark.slow) for n in MODELS if n not in SAMPLED),
    ],
)
def test_logits_are_those_of_transformers(name: str, looped: bool, golden_model: Golden, logits: Logits) -> None:
    """Of whole texts, and of texts padded on the left, in one batch. Windows are shorter than any of them."""
    golden = np.load(GOLDEN / "families.npz")
    tokens, valid = np.zeros((5, TIME), np.int32), np.ones((5, TIME), bool)
    tokens[:2], tokens[2:, -24:] = golden["tokens"], INPUTS["padded"]
    for row, length in enumerate(INPUTS["lengths"], start=2):
        valid[row, : TIME - length] = False
    model = golden_model(name).model
    assert all(window is None or window < min(INPUTS["lengths"]) for window in model.config.windows or ())
    ours = logits(model, tokens, valid, looped=looped)
    assert golden[name].std() > 0.5  # the model is not one that says nothing
    np.testing.assert_allclose(ours[:2], golden[name], atol=1e-4)
    np.testing.assert_allclose(ours[2:][valid[2:]], golden[f"{name}/padded"], atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_samples_packed_in_rows_are_those_of_transformers_alone(name: str, golden_model: Golden) -> None:
    """Three prompts with their six completions share a row; transformers saw each sample by itself."""
    groups = [
        Group("", np.array(group["prompt"], np.int32), tuple(map(completion, group["completions"])))
        for group in INPUTS["groups"]
    ]
    rows, sizes = pack(groups, row_length=64), [len(c.tokens) for group in groups for c in group.completions]
    assert rows.tokens.shape[0] == 1
    graph, params = nnx.split(golden_model(name).model)
    scores = jax.jit(lambda params, rows: token_logps(graph, params, rows, 1.0).logps)(params, rows)
    ours = np.concatenate(unpack(rows, np.asarray(scores), sizes))
    np.testing.assert_allclose(ours, np.load(GOLDEN / "families.npz")[f"{name}/samples"], atol=1e-4)


def completion(tokens: list[int]) -> Completion:
    none = np.zeros(0, np.float32)
    return Completion(np.array(tokens, np.int32), none, none, FinishReason.LENGTH)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.slow
def test_sampling_with_the_cache_gives_the_tokens_that_it_gives_without(
    name: str, golden_model: Golden, logits: Logits
) -> None:
    """At temperature 1; at 0 those without are also transformers' own."""
    model = golden_model(name).model
    prompt, likeliest = INPUTS["groups"][0]["prompt"], np.load(GOLDEN / "families.npz")[f"{name}/greedy"]
    config = RolloutConfig(max_new_tokens=12, decode_chunk=6, slots=2, seed=5)
    (completions,) = generate(Engine(model, (), config), [Request(np.array(prompt, np.int32), 2, 3, step=4)])
    drawn = np.stack([completion.tokens for completion in completions])
    assert drawn[0].tolist() != drawn[1].tolist()
    tokens = np.zeros((5, TIME), np.int32)  # the program of the test of logits
    tokens[:3, : len(prompt) + 12] = [[*prompt, *answer] for answer in (*drawn, likeliest)]
    predicted = logits(model, tokens)[:3, len(prompt) - 1 : len(prompt) + 11]
    assert predicted[2].argmax(-1).tolist() == likeliest.tolist()
    keys = sample_keys(config.seed, np.array([(4, 3, 0), (4, 3, 1)], np.uint32))
    for at in range(12):
        token, *_ = draw(predicted[:2, at], token_keys(keys, np.full(2, at)), SamplingParams.from_config(config))
        assert token.tolist() == drawn[:, at].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_a_place_and_every_place_a_tensor(name: str):
    config = families.read_config(MODELS[name]["config"])
    table = families.tensor_names(config)
    theirs = [text_name(name, OTHERS) for name in MODELS[name]["shapes"]]
    assert set(table.values()) == {name for name in theirs if name is not None}
    assert sorted(table) == sorted(families.parameter_paths(config))


def reads_windows(family: families.Family, config: dict) -> bool:
    layers = ["sliding_attention"] * config["num_hidden_layers"]
    asking = {"layer_types": layers, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}
    try:
        return family.read(config | asking).windows is not None
    except WeightsError:
        return False


def test_the_documents_name_every_family() -> None:
    pytest.importorskip("covey_formats")
    """The table of docs/models.md is written from `FAMILIES`; README and the page on adding one are compared."""
    tool = runpy.run_path(str(ROOT / "tools" / "families_table.py"))
    assert tool["FILE"].read_text() == tool["text"](), "make schema writes it again"
    assert ", ".join(family.name for family in families.FAMILIES.values()) in (ROOT / "README.md").read_text()
    adding = (ROOT / "docs" / "add-a-model.md").read_text().partition("\n\nA model with one of these")[0]
    kinds = [
        kind for cell in re.findall(r"^\| [^|]+ \| ([^|]+) \|", adding, re.M) for kind in re.findall("`(.+?)`", cell)
    ]
    assert sorted(set(kinds) - {"model_type"}) == sorted({*families.FAMILIES, *OF_PACKAGE, *TEXT_PARTS})


def test_every_row_of_the_table_has_golden_numbers() -> None:
    """Whoever adds one: a row in FAMILIES of tests/parity/make_golden.py, then `make golden-families`."""
    pytest.importorskip("covey_families")
    for name in (*families.FAMILIES, *OF_PACKAGE):
        family = families.find_family(name)
        assert family is not None
        cases = [model["config"] for model in MODELS.values() if model["config"]["model_type"] == name]
        assert cases, f"{name} has no golden model"
        assert not reads_windows(family, cases[0]) or any(family.read(case).windows for case in cases), (
            f"{name} windows"
        )


# --- configs, old and new


def llama(**fields: object) -> dict:
    old = {key: value for key, value in LLAMA.items() if key not in ("rope_parameters", "rope_theta", "head_dim")}
    return {key: value for key, value in (old | fields).items() if value is not None}


@pytest.mark.parametrize(
    ("fields", "theta"),
    [
        ({"rope_theta": 123_000.0}, 123_000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 456_000.0}}, 456_000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 456_000.0}, "rope_theta": 1.0}, 456_000.0),
        ({"rope_scaling": None, "rope_theta": 1e6}, 1e6),
        ({}, 10_000.0),
    ],
)
def test_the_rotary_base_is_the_checkpoints(fields: dict, theta: float):
    assert families.read_config(llama(**fields)).rope_theta == theta


YARN = RopeScaling("yarn", 4.0, original_max_positions=64, attention_factor=0.1 * math.log(4.0) + 1)
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope_scaling": LLAMA3}, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeScaling("linear", 2.0)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, YARN),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64}, YARN),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64}, YARN),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 0.5, "beta_fast": None, "truncate": False}},
            RopeScaling("yarn", 0.5, original_max_positions=256, truncate=False),
        ),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({}, None),
    ],
)
def test_rotary_scaling_in_every_spelling(fields: dict, scaling: RopeScaling | None):
    assert families.read_config(llama(**fields)).rope_scaling == scaling


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"model_type": "qwen4"}, "wanted: one of: gemma2, gemma3, gemma3_text"),
        ({"model_type": "qwen2_moe", "num_experts": 4}, "'qwen2_moe' is not supported: mixtures of experts are not"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "'mixtral' is not supported: mixtures of experts are not"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
            "its text model alone, 'mistral', is",
        ),
        ({"model_type": "gemma3"}, "'text_config' is missing"),
        ({"model_type": "gemma3", "text_config": {"model_type": "llama"}}, "in text_config is 'llama'"),
        (
            {"model_type": "gemma3", "tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
            "tie_word_embeddings is True, and False in text_config",
        ),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types are not supported for mistral"),
        ({"model_type": "olmo2", "attention_bias": True}, "attention_bias: True is not supported for olmo2"),
        ({"model_type": "smollm3", "mlp_bias": True}, "mlp_bias: True is not supported for smollm3"),
        *(
            ({"model_type": "phi3", "rope_scaling": {"type": kind}}, f"RoPE scaling '{kind}' is not supported for phi3")
            for kind in ("longrope", "su", "yarn", "linear")
        ),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75}, "on part of each head"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters and rope_scaling contradict each other",
        ),
        (
            {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}},
            "model_type 'gemma3n' is not supported\n",
        ),
        ({"model_type": "llama4", "text_config": {"num_local_experts": 16}}, "mixtures of experts are not"),
        ({"model_type": "nanochat", "attention_bias": True}, "attention_bias: True is not supported for nanochat"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention: True is not supported for gemma3_text",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "RoPE scaling 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'low_freq_factor' is missing"),
        ({"partial_rotary_factor": 0.5}, "on part of each head"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"attention_bias": True}, "attention_bias: True is not supported for llama"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(fields: dict, says: str):
    with pytest.raises(WeightsError, match=says):
        families.read_config(llama(**fields))


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("scaling", ["yarn", "longrope", "dynamic"])
def test_a_scaling_of_either_kind_of_layer_that_we_do_not_compute_is_refused(kind: str, scaling: str) -> None:
    ropes = {kind: {"rope_type": scaling, "factor": 4.0, "rope_theta": 1e4}}
    with pytest.raises(WeightsError, match=f"RoPE scaling '{scaling}' under {kind} is not supported"):
        families.read_config(MODELS["gemma3_text"]["config"] | {"rope_parameters": ropes})


def test_gemma3_rotations_in_every_spelling() -> None:
    """The form of transformers 5, with one kind of layer left out, and that of 4, whose scaling was for wide layers."""
    bare = {name: value for name, value in MODELS["gemma3_text"]["config"].items() if not name.startswith("rope_")}
    linear = RopeScaling("linear", 8.0)
    spelt = {"rope_type": "linear", "factor": 8.0}

    def read(**fields: object) -> tuple:
        found = families.read_config(bare | fields)
        return found.rope_theta, found.rope_scaling, found.local_rope_theta, found.local_rope_scaling

    assert read() == (1e6, None, 1e4, None)
    assert read(rope_scaling=spelt, rope_theta=3e5, rope_local_base_freq=2e4) == (3e5, linear, 2e4, None)
    assert read(rope_parameters={"sliding_attention": spelt}, rope_theta=3e5) == (3e5, None, 1e4, linear)
    assert read(rope_parameters={"full_attention": spelt | {"rope_theta": 5.0}}) == (5.0, linear, 1e4, None)
    with pytest.raises(WeightsError, match="rope_parameters name no kind of layer"):
        read(rope_parameters=spelt)


@pytest.mark.parametrize("kind", ["gemma3", "gemma3n", "qwen2_moe", "qwen3_next", "llama4", "gemma5_text", None])
def test_another_family_is_not_taken_for_a_mistyped_one(kind: str | None) -> None:
    """A tool wrote the name: a neighbour with a similar one is another architecture."""
    with pytest.raises(WeightsError) as refused:
        families.read_config({"model_type": kind, "text_config": {"model_type": [kind]}, "num_experts": 0})
    assert "did you mean" not in str(refused.value)
    assert ("experts" in str(refused.value)) == ("moe" in str(kind))


def family(model_type: str, **fields: object) -> ModelConfig:
    """The model that a config of this family describes which leaves out what LLAMA does not have."""
    return families.read_config(
        llama(num_key_value_heads=None, tie_word_embeddings=None) | {"model_type": model_type} | fields
    )


def test_fields_that_are_left_out_have_the_defaults_of_transformers() -> None:
    old = family("llama")
    assert (old.num_kv_heads, old.head_dim, old.tie_embeddings) == (4, 8, False)
    mistral = family("mistral", num_attention_heads=8)
    assert (mistral.num_kv_heads, mistral.windows, mistral.tie_embeddings) == (8, (4096, 4096), False)
    assert family("mistral", num_attention_heads=8, sliding_window=None).windows is None


def test_so_have_those_of_a_package() -> None:
    pytest.importorskip("covey_families")
    assert family("phi3").windows is None
    small = family("smollm3", num_hidden_layers=4)
    assert (small.rope_layers, small.rope_theta) == ((True, True, True, False), 2e6)
    assert (small.num_kv_heads, small.tie_embeddings, small.windows) == (4, True, None)
    windowed = family("smollm3", no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=7)
    assert (windowed.rope_layers, windowed.windows) == ((False, True), (7, None))


def test_the_text_part_of_a_checkpoint_on_the_hub_leaves_out_most_fields() -> None:
    """That of gemma-3-4b-it, of which config.json has these."""
    part = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = families.read_config({"model_type": "gemma3", "text_config": part, "vision_config": {}})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert (config.rope_theta, config.local_rope_theta, config.norm_eps) == (1e6, 1e4, 1e-6)
    assert (config.rope_scaling, config.local_rope_scaling) == (RopeScaling("linear", 8.0), None)
    assert (config.activation, config.query_scale, config.tie_embeddings) == ("gelu_tanh", 1 / 16, True)
    assert config.windows == tuple(None if layer % 6 == 5 else 1024 for layer in range(34))
    assert config.family == "gemma3_text"


@pytest.mark.parametrize(
    ("name", "fields", "windows"),
    [
        ("qwen2", {"sliding_window": 9, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (None, 9)),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": None}, None),
        ("gemma2", {}, (5, None, 5, None)),
        ("gemma3_text", {}, (5, 5, 5, 5)),
    ],
)
def test_windows_of_configs_without_layer_types(name: str, fields: dict, windows: tuple | None) -> None:
    config = {key: value for key, value in MODELS[name]["config"].items() if key != "layer_types"}
    assert families.read_config(config | fields).windows == windows


@pytest.mark.parametrize("name", MODELS)
def test_a_written_config_means_what_was_read(name: str) -> None:
    """Also after a way through JSON, and in the form that both transformers 4 and 5 know where 4 has one."""
    config = families.read_config(MODELS[name]["config"])
    written = json.loads(json.dumps(families.write_config(config)))
    assert families.read_config(written) == config
    assert ("rope_parameters" in written) == (config.local_rope_scaling is not None)


@pytest.mark.parametrize(
    "change",
    [
        {"family": "llama", "qk_norm": True},
        {"family": "gemma2", "query_scale": None},
        {"family": "gemma2", "windows": (5, 7)},
        {"family": "none"},
    ],
)
def test_what_a_family_cannot_say_is_not_written(change: dict) -> None:
    name = change["family"] if change["family"] in MODELS else "llama"
    config = dataclasses.replace(families.read_config(MODELS[name]["config"]), num_layers=2, **change)
    with pytest.raises(WeightsError, match="cannot describe this model"):
        families.write_config(config)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_written_as_null_that_transformers_never_leaves_null(name: str) -> None:
    """It computes with the width of a window even where no layer has one."""
    config = families.read_config(MODELS[name]["config"])
    theirs = [model["config"] for model in MODELS.values() if model["config"]["model_type"] == config.family]
    for ours in (config, dataclasses.replace(config, windows=None)):
        nulls = {field for field, value in families.write_config(ours).items() if value is None}
        assert nulls == {field for field in nulls if any(found.get(field) is None for found in theirs)}


PACKAGE = """
from dataclasses import replace
from covey.models.families import FAMILIES, Family
from covey.models.loading import hf_config

def read(config):
    return replace(hf_config.read_llama(config), family="toy", norm_offset=1.0)

def toy():
    return Family("Toy", read, hf_config.write_llama, FAMILIES["llama"].names, "ToyForCausalLM")
"""


def test_an_installed_package_adds_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, model = tmp_path / "covey_example_toy-1.0.dist-info", tmp_path / "model"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: covey_example_toy\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[covey.models]\ntoy = covey_example_toy:toy\n")
    (tmp_path / "covey_example_toy.py").write_text(PACKAGE)
    shutil.copytree(GOLDEN / "tiny-llama", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "toy"}))
    with pytest.raises(WeightsError, match="'toy' is not supported"):
        weights.load(model)
    monkeypatch.syspath_prepend(str(tmp_path))
    ours, theirs = weights.load(GOLDEN / "tiny-llama"), weights.load(model)
    assert theirs.config == dataclasses.replace(ours.config, family="toy", norm_offset=1.0)
    assert families.write_config(theirs.config)["architectures"] == ["ToyForCausalLM"]
    np.testing.assert_array_equal(theirs.model.embed.embedding[...], ours.model.embed.embedding[...])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rope_theta": 1.0}, "rope_theta is 1.0\n  wanted: a finite number above 1"),
        ({"rope_scaling": {"beta_fast": 1e299}}, r"rope_scaling\.beta_fast is 1e\+299\n  wanted: a number from 1e-6"),
        ({"rope_scaling": {"truncate": 1}}, r"rope_scaling\.truncate is 1\n  wanted: true or false"),
        ({"no_rope_layers": [0, 2]}, "no_rope_layers is .*\n  wanted: a list of 0 and 1"),
        ({"no_rope_layers": [1]}, "no_rope_layers has 1 entries\n  wanted: one a layer: 2"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
    ],
)
def test_a_field_of_a_wrong_range_is_refused_before_it_is_used(fields: dict, says: str) -> None:
    """YaRN divides by the logarithm of the base, and the interval divides the number of a layer."""
    with pytest.raises(WeightsError, match=says):
        check_config(llama(**fields), "config.json")
