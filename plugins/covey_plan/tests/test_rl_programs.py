"""Programs from configs and shapes: they are the run's own, for any devices, and no array is made for them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import pytest
from flax import nnx

from covey.config.schema import GRPOConfig, LoRAConfig, RLTrainingConfig, RolloutConfig
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder, abstract_decoder
from covey.models.lora import with_lora
from covey.models.stored_kernel import find_format
from covey.parallel import make_mesh
from covey.parallel.arrays import place_model
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.roles import ClusterConfig, Role
from covey.text.tokenizer import Tokenizer
from covey_plan.program import Program
from covey_plan.programs import RLPrograms

TOKENIZER = Tokenizer.from_folder(Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama")
SHAPE = ModelConfig(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    tie_embeddings=True, windows=(None, 6),
)  # fmt: skip
GRPO = GRPOConfig(num_generations=4, num_iterations=2, beta=0.04)
TRAINING = RLTrainingConfig(prompts_per_step=2, max_steps=2, row_length=64, max_tokens_per_micro_batch=128)
ROLLOUT = RolloutConfig(max_prompt_length=24, max_new_tokens=12, slots=8, decode_chunk=4)
NAMES = ["score", "token values", "gradients", "apply", "prefill", "admit", "decode"]
PLACES = pytest.mark.parametrize("mesh", [None, (2, 2)], ids=["one device", "mesh"])


def policy(lora: int = 0, quantize: str = "none", **switches: Any) -> Decoder:
    """A policy of shapes."""
    model = abstract_decoder(switches.pop("config", SHAPE), find_format(quantize, 32), **switches)
    adapted = partial(with_lora, config=LoRAConfig(rank=lora), seed=0)
    return nnx.eval_shape(adapted, model) if lora else model


def cluster_config(mesh: tuple[int, ...] | None) -> ClusterConfig:
    return ClusterConfig({} if mesh is None else {Role.ACTOR: make_mesh(mesh)}, TRAINING, ROLLOUT)


def programs(model: Decoder, mesh: tuple[int, ...] | None = None, platform: str = "cpu") -> RLPrograms:
    with patch("covey.parallel.arrays.platform_of", lambda _: platform):
        placed = place_model(model, jax.devices()[0])
        cluster = RLCluster(actor=placed, tokenizer=TOKENIZER, cluster_config=cluster_config(mesh))
    return RLPrograms(cluster, GRPO, total_steps=2)


# --- without an array


@PLACES
def test_programs_are_built_without_an_array(mesh: tuple[int, ...] | None) -> None:
    before = {id(x) for x in jax.live_arrays()}
    largest = programs(policy(lora=4), mesh).largest()
    assert [id(x) for x in jax.live_arrays() if id(x) not in before] == []
    assert [program.name for program in largest] == NAMES
    devices = 1 if mesh is None else 4
    assert {len(jax.tree.leaves(program.args)[0].sharding.device_set) for program in largest} == {devices}


def test_sizes_come_from_the_configs() -> None:
    score, token_values, gradients, _, prefill, admit, decode = programs(policy()).largest()
    assert token_values.args[1].tokens.shape == (2, 64)
    assert score.args[1].tokens.shape == (2, 64)
    assert gradients.args[3].inputs.ref_logps.shape == gradients.args[3].inputs.old_logps.shape == (2, 64)
    assert prefill.args[1].shape == (2, 32)
    assert admit.args[0][0][0].keys.shape == (8, 2, 8, 64)
    assert decode.args[1][0][0].keys.shape == (8, 2, 8, 64)
    assert decode.args[2].key.shape == (8, 2)


# --- what is planned is what runs


class Recorder:
    """A jitted function that keeps the arguments' shapes and the text of each program it is called for."""

    def __init__(self, function: Any):
        self.function = function
        self.calls: dict[str, Any] = {}
        self._seen = set[Any]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        kinds = tree, *((np.shape(x), getattr(x, "dtype", type(x)), getattr(x, "sharding", None)) for x in leaves)
        if kinds not in self._seen:
            self.calls[self.function.lower(*args, **kwargs).as_text()] = jax.tree.map(np.shape, args)
            self._seen.add(kinds)
        return self.function(*args, **kwargs)


def recorded(learner: GRPOLearner) -> dict[str, Recorder]:
    """The programs of a prepared learner, by the names of `Program`, from now on recorded."""
    cluster = learner.cluster
    assert cluster.trainer is not None
    update, sampler = cluster.trainer.programs, cluster.rollout.engine.programs
    places = {
        "score": (cluster.scorer, "program"),
        "gradients": (update, "accumulate"),
        **{name: (sampler, name) for name in ("prefill", "admit", "decode")},
        "apply": (update.update.parts[0].program, "apply"),  # all layers share it
    }
    recorders = {name: Recorder(getattr(*place)) for name, place in places.items()}
    for name, (owner, attribute) in places.items():
        setattr(owner, attribute, recorders[name])
    return recorders


@pytest.mark.slow
def test_the_run_compiles_what_was_built_from_shapes() -> None:
    """Two updates on one rollout, so that old log-probs are computed too. The tests of plans count the
    programs on one device.
    """
    mesh, compute_dtype = (2, 2), "bfloat16"
    actor = with_lora(Decoder(SHAPE, rngs=nnx.Rngs(0), compute_dtype=compute_dtype), LoRAConfig(rank=4))
    cluster = RLCluster(actor=actor, tokenizer=TOKENIZER, cluster_config=cluster_config(mesh))
    reward = lambda prompts, completions, **_: [float(len(text)) for text in completions]  # noqa: E731
    learner = GRPOLearner(rl_cluster=cluster, reward_fns=reward, grpo_config=GRPO, observers=[])
    learner.prepare(2)
    calls = {name: recorder.calls for name, recorder in recorded(learner).items()}
    learner.train([{"prompt": "hello there"}, {"prompt": "a"}])

    planned = programs(policy(lora=4, compute_dtype=compute_dtype), mesh)
    ((prompts, length),) = {shapes[1] for shapes in calls["prefill"].values()}
    slots = {
        (shapes[2].length[0], sum(block.keys[-1] for block in shapes[1][0])) for shapes in calls["decode"].values()
    }
    from_shapes: dict[str, list[Program]] = {
        "score": [planned.score(*shapes[1].tokens) for shapes in calls["score"].values()],
        "gradients": [planned.gradients(*shapes[3].rows.tokens) for shapes in calls["gradients"].values()],
        "apply": [planned.apply()],
        "prefill": [planned.prefill(prompts, length)],
        "admit": [planned.admit(max(slots)[0], max(slots)[1], prompts, length)],
        "decode": [planned.decode(*size) for size in slots],
    }
    for name, texts in calls.items():
        assert texts, name
        assert {program.lower().as_text() for program in from_shapes[name]} == set(texts), name


# --- other platforms


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "kernel"), [("tpu", "@tpu_custom_call"), ("cuda", "triton")])
def test_programs_are_lowered_for_a_platform_that_is_not_there(platform: str, kernel: str) -> None:
    made = programs(policy(lora=4, quantize="int8"), (2, 2), platform=platform).largest()
    texts = {program.name: program.lower(platform).as_text() for program in made}
    assert all(texts.values())
    assert kernel in texts["score"]
    assert "optimization_barrier" in texts["score"]


@pytest.mark.slow
def test_the_platform_reaches_the_layers() -> None:
    """A CPU has no barriers that hold, accumulates a loop's gradients in float32, and attends without a kernel."""
    score = programs(policy(4, "int8")).score(1, 64).lower("cpu").as_text()
    assert not any(word in score for word in ("custom_call", "optimization_barrier"))
    narrow = partial(policy, param_dtype="bfloat16", compute_dtype="bfloat16")
    gradients = {p: programs(narrow(), platform=p).gradients(1, 64).lower(p).as_text() for p in ("cpu", "tpu")}
    assert ["tensor<2x32x64xbf16>" in text for text in gradients.values()] == [False, True]


@pytest.mark.slow
def test_programs_for_accelerators_do_not_grow_with_depth() -> None:
    """The learner's programs neither stack the layers' weights nor divide their gradients or moments."""

    def lengths(layers: int, platform: str, lora: int, quantize: str) -> list[int]:
        config = replace(SHAPE, num_layers=layers, windows=(None, 6) * (layers // 2))
        made = programs(policy(lora, quantize, config=config), (2, 2), platform=platform)
        return [len(one.lower(platform).as_text().splitlines()) for one in (made.gradients(2, 128), made.apply())]

    for kind in (("tpu", 4, "nf4"), ("cuda", 0, "none")):
        assert lengths(2, *kind) == lengths(4, *kind)
