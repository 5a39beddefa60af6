"""The models by role: what they share, where they live, and that nobody works with stale or borrowed weights."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from covey.config.schema import GRPOConfig, LoRAConfig, OptimizerConfig, PPOConfig, RLTrainingConfig, RolloutConfig
from covey.errors import DataError, NumbersError, RecipeError, RewardError, WeightsError
from covey.losses.policy import LossInputs, sequence_mean
from covey.losses.value import ValueInputs
from covey.models.decoder import Decoder
from covey.models.lora import split_trainable, with_lora
from covey.models.value_model import make_value_model
from covey.monitor.record import StepRecord
from covey.packing.rows import Rows, pack, scatter_to_rows
from covey.parallel import flatten, make_mesh, mesh_of, reshard
from covey.parallel.shapes import is_abstract
from covey.rl.batches import TrainBatch
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.learner import Learner
from covey.rl.roles import ClusterConfig, Role
from covey.rl.rollout_worker import RolloutWorker
from covey.text.tokenizer import Tokenizer
from covey.train.trainer import Trainer
from covey.types import Group

TINY = Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama"
TOKENIZER = Tokenizer.from_folder(TINY)
EXAMPLES = [{"prompt": "hello there"}, {"prompt": "a"}]

pytestmark = pytest.mark.usefixtures("shared_programs")


def config(meshes: dict[Role, Any] | None = None, top_p: float = 1.0, **training: Any) -> ClusterConfig:
    steps = {"max_tokens_per_micro_batch": 64, "row_length": 64, "prompts_per_step": 2, "max_steps": 2}
    rollout = RolloutConfig(max_new_tokens=8, temperature=0.7, top_p=top_p, slots=8)
    return ClusterConfig(
        meshes or {}, RLTrainingConfig(**{"actor_optimizer": optax.sgd(3.0), **steps, **training}), rollout
    )


def learn(made: RLCluster, **settings: Any) -> list[StepRecord]:
    """The records of a whole run by GRPO."""
    records: list[StepRecord] = []
    grpo = GRPOConfig(num_generations=4, **settings)
    GRPOLearner(rl_cluster=made, reward_fns=prefers_long, grpo_config=grpo, observers=[records.append]).train(EXAMPLES)
    return records


@pytest.fixture
def decoder(decoder: Callable[..., Decoder]) -> Callable[..., Decoder]:
    """The room's tiny decoder, of one layer if not told otherwise: it is half of what is compiled."""
    return partial(decoder, layers=1)


@pytest.fixture
def cluster(decoder: Callable[..., Decoder]) -> Callable[..., RLCluster]:
    """`cluster(lora=0, meshes={}, models={}, **settings)`: prepared for GRPO, around the room's tiny decoder."""

    def make(lora: int = 0, meshes: Any = None, models: Any = None, **settings: Any) -> RLCluster:
        made = RLCluster(tokenizer=TOKENIZER, cluster_config=config(meshes), **(models or {"actor": decoder(lora)}))
        made.prepare(GRPOConfig(**{"beta": 0.04, **settings}), 10)
        return made

    return make


@pytest.fixture
def step(groups_of: Callable) -> tuple[Rows, np.ndarray, LossInputs]:
    """Rows of one group, its lengths, and inputs that pull the policy about."""
    lengths = np.array([3, 9, 4, 6])
    rows = pack(groups_of([(5, lengths)]), 64, packing="dense")
    advantages = scatter_to_rows(rows, list(map(np.full, lengths, [1.0, -1.0, 2.0, -2.0])))
    weights = scatter_to_rows(rows, list(map(np.full, lengths, sequence_mean(lengths, 9)[0])))
    nothing = np.zeros_like(weights)
    return rows, lengths, LossInputs(advantages, weights, nothing, np.full((len(rows.tokens), 1), 0.04, np.float32))


def one_batch(rows: Rows, inputs: LossInputs) -> list[TrainBatch]:
    """The step's only training micro-batch."""
    return [TrainBatch((), rows, inputs, denominator=4.0)]


def pointers(model: Decoder | nnx.State) -> dict[str, int]:
    """Where each array's first piece lies in memory."""
    state = nnx.state(model) if isinstance(model, Decoder) else model
    return {name: x.addressable_shards[0].data.unsafe_buffer_pointer() for name, x in flatten(state).items()}


def tokens(groups: Sequence[Group]) -> list[list[int]]:
    return [c.tokens.tolist() for g in groups for c in g.completions]


def difference(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True))


# --- models by role


def on(*devices: int) -> Any:
    return make_mesh((len(devices),), ("fsdp",), [jax.devices()[i] for i in devices])


def test_the_cluster_owns_models_by_role_and_the_tokenizer_they_share(cluster: Callable, decoder: Callable) -> None:
    assert {str(role) for role in Role} == {"actor", "rollout", "reference", "critic", "reward"}
    models = {"actor": decoder(), "critic": make_value_model(decoder()), "reward": make_value_model(decoder())}
    made = cluster(models=models, algorithm="ppo", num_generations=1)
    assert made.rollout.tokenizer is made.tokenizer
    assert all(made.inference.has(role) for role in (Role.REFERENCE, Role.CRITIC, Role.REWARD))
    assert type(made.trainer) is type(made.critic_trainer) is Trainer
    assert made.trainer is not made.critic_trainer


def test_each_role_lives_on_its_mesh_and_a_model_on_another_mesh_is_moved(cluster: Callable, decoder: Callable) -> None:
    meshes = {Role.ACTOR: on(0, 1), Role.ROLLOUT: on(2), Role.REFERENCE: on(3)}
    graph, params = nnx.split(decoder())
    elsewhere = nnx.merge(graph, reshard(params, NamedSharding(on(2, 3), PartitionSpec())))
    made = cluster(meshes=meshes, models={"actor": elsewhere})
    held = {Role.ACTOR: made.trainer.params, Role.ROLLOUT: made.rollout.params}
    held[Role.REFERENCE] = made.inference.params[Role.REFERENCE]
    for role, state in held.items():
        assert mesh_of(state) == meshes[role]
        for name, x in flatten(state).items():
            np.testing.assert_array_equal(x, flatten(params)[name])


@pytest.mark.slow
def test_rewards_can_be_asked_for_as_soon_as_the_cluster_exists(decoder: Callable) -> None:
    """What the models given can answer needs no learner and no algorithm."""
    reward = make_value_model(decoder())
    reward.score[...] = jax.numpy.full(32, -0.2)
    made = RLCluster(actor=decoder(), reward=reward, tokenizer=TOKENIZER, cluster_config=config())
    one, other, same = made.get_rewards([[1, 2]] * 3, [[3], [4, 5], [3]])
    assert one == pytest.approx(same, abs=1e-5)
    assert one != other


def test_close_lets_go_of_every_array(cluster: Callable, decoder: Callable) -> None:
    made = cluster(models={"actor": decoder(), "reward": make_value_model(decoder())})
    held = [weakref.ref(x) for x in jax.tree.leaves((made.trainer.params, made.inference.params))]
    made.close()
    gc.collect()
    assert not any(ref() for ref in held)


@pytest.mark.parametrize("apart", [False, True])
def test_sync_hands_over_the_arrays_on_one_mesh_and_copies_them_to_another(cluster: Callable, apart: bool) -> None:
    made = cluster(meshes={Role.ACTOR: on(0), Role.ROLLOUT: on(1)} if apart else {}, beta=0.0)
    made.trainer.trainable = jax.tree.map(lambda x: x + 1, made.trainer.trainable)
    made.sync_weights()
    assert (pointers(made.rollout.params) == pointers(made.trainer.params)) != apart
    assert mesh_of(made.rollout.params) == (on(1) if apart else None)
    for name, x in flatten(made.rollout.params).items():
        np.testing.assert_array_equal(x, flatten(made.trainer.params)[name])


# --- what is shared


@pytest.mark.slow
def test_a_reference_with_adapters_has_its_own_copy_of_them_alone(cluster: Callable) -> None:
    made = cluster(4)
    actor, reference = pointers(made.actor), pointers(made.inference.params["reference"])
    assert reference.keys() == actor.keys()
    assert {name for name, at in reference.items() if at != actor[name]} == {n for n in actor if ".lora." in n}


@pytest.mark.slow
@pytest.mark.parametrize(("which", "low", "high"), [("start", 0.0, 1e-6), ("base", 1e-3, 10.0)])
def test_the_reference_of_a_loaded_adapter(cluster: Callable, step: Any, which: str, low: float, high: float) -> None:
    """The policy as it began, or the base under it: the log-probs before the first update say which."""
    made, (rows, lengths, _) = cluster(4, reference=which), step
    log_probs = made.get_ref_per_token_logps(rows, lengths), made.get_old_per_token_logps(rows, lengths)
    assert low <= difference(*log_probs) <= high


@pytest.mark.parametrize("lora", [0, 4])
def test_beta_zero_makes_no_reference(cluster: Callable, step: Any, lora: int) -> None:
    made = cluster(lora, beta=0.0)
    assert not made.inference.has(Role.REFERENCE)
    with pytest.raises(RecipeError, match="no reference"):
        made.get_ref_per_token_logps(*step[:2])


@pytest.mark.slow
def test_one_model_given_as_actor_and_reference(cluster: Callable, decoder: Callable, step: Any) -> None:
    """Buffers of the actor are reused at each update; none of them may be the reference's."""
    model, (rows, lengths, inputs) = decoder(), step
    made = cluster(models={"actor": model, "reference": model})
    reference, actor = made.get_ref_per_token_logps(rows, lengths), made.get_old_per_token_logps(rows, lengths)
    made.update_actor(one_batch(rows, inputs))
    assert difference(reference, made.get_ref_per_token_logps(rows, lengths)) == 0.0
    assert difference(actor, made.get_old_per_token_logps(rows, lengths)) > 1e-3
    assert not any(x.is_deleted() for x in jax.tree.leaves(made.inference.params["reference"]))


# --- where they live


def apart() -> dict[Role, Any]:
    first, last, third = jax.devices()[:2], jax.devices()[2:], jax.devices()[2:3]
    return {
        Role.ACTOR: make_mesh((2, 1), devices=first),
        Role.ROLLOUT: make_mesh((1, 2), devices=last),
        Role.REFERENCE: make_mesh((1, 1), devices=third),
    }


@pytest.mark.slow
def test_a_rollout_on_other_devices_gets_the_new_adapters_and_draws_the_same(cluster: Callable, step: Any) -> None:
    """A reference stays as it is, on a mesh of its own and where it shares the base."""
    rows, lengths, inputs = step
    both = [cluster(4, apart()), cluster(4)]
    assert set(mesh_of(both[0].inference.params["reference"]).devices.flat) == set(jax.devices()[2:3])
    references = [made.get_ref_per_token_logps(rows, lengths) for made in both]
    far = both[0].rollout
    before = tokens(far.generate(EXAMPLES, 4))
    assert before == tokens(both[1].generate(EXAMPLES, 4))
    base = {name: at for name, at in pointers(far.params).items() if ".lora." not in name}
    for made in both:
        made.update_actor(one_batch(rows, inputs))
    assert tokens(far.generate(EXAMPLES, 4)) == before  # not yet
    for made, reference in zip(both, references, strict=True):
        made.sync_weights()
        assert difference(reference, made.get_ref_per_token_logps(rows, lengths)) == 0.0
    after = tokens(far.generate(EXAMPLES, 4))
    assert after != before
    assert after == tokens(both[1].generate(EXAMPLES, 4))
    held = pointers(far.params)
    assert {name: held[name] for name in base} == base  # only adapters travelled


def test_a_mesh_with_an_axis_along_which_nothing_is_split_is_refused() -> None:
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    with pytest.raises(
        RecipeError, match=r"the mesh of actor has the axis 'model'.*\n  wanted: axes out of data, fsdp, tp"
    ):
        ClusterConfig(role_to_mesh={Role.ACTOR: mesh})


# --- actor and critic


@pytest.fixture
def ppo(decoder: Callable, step: Any) -> tuple[Learner, TrainBatch]:
    """A learner of actor and critic with momentum, and a micro-batch of both."""
    momentum = optax.sgd(0.1, momentum=0.9)
    settings = config(actor_optimizer=momentum, critic_optimizer=momentum)
    made = RLCluster(actor=decoder(4), tokenizer=TOKENIZER, cluster_config=settings)
    kind = pytest.importorskip("covey_ppo.learner").PPOLearner
    learner = kind(rl_cluster=made, reward_fns=prefers_long, ppo_config=PPOConfig(num_generations=4))
    learner.prepare(10)
    rows, _, inputs = step
    values = ValueInputs(np.ones_like(inputs.weight), np.zeros_like(inputs.weight), np.sign(inputs.weight))
    return learner, TrainBatch((), rows, inputs, denominator=4.0, value_inputs=values)


@pytest.mark.slow
def test_nothing_moves_when_one_of_two_gradients_is_not_finite(ppo: tuple[Learner, TrainBatch]) -> None:
    """Whichever it is: no weight and no moment of actor or critic. Good ones are those of an update each."""
    learner, good = ppo
    no_actor = replace(good, inputs=good.inputs._replace(advantage=good.inputs.advantage * np.nan))
    no_critic = replace(good, value_inputs=good.value_inputs._replace(returns=good.value_inputs.returns * np.nan))
    made = learner.cluster
    start = jax.device_get(made.state())
    for bad in (no_actor, no_critic):
        with pytest.raises(NumbersError, match=r"update 1 .*is not finite"):
            learner.update([bad])
        jax.tree.map(np.testing.assert_array_equal, made.state(), start)
    learner.update([good])
    together = jax.device_get(made.state())
    made.load_state(jax.device_put(start), 0)
    made.update_actor([good])
    made.update_critic([good])
    jax.tree.map(np.testing.assert_array_equal, made.state(), together)
    for before, after in ((start, together), (start["critic"], together["critic"])):
        assert largest_difference(before["params"], after["params"]) > 0


# --- updates that are left out


@pytest.mark.slow
def test_an_update_that_is_left_out_counts_as_a_step(decoder: Callable) -> None:
    """One count: the learning rate that is logged is the one applied, behind the gap too, and a run that resumes there
    draws the dropout of the one that went on, bit for bit.
    """
    # Without moments, an update of Adam moves a weight by the learning rate, whatever its gradient.
    signs = OptimizerConfig(
        learning_rate=0.02, schedule="linear", b1=0.0, b2=0.0, eps=1e-30, weight_decay=0.0, max_grad_norm=0.0
    )
    settings = config(max_steps=3, actor_optimizer=signs, skip_nonfinite=1)
    actor = with_lora(decoder(), LoRAConfig(rank=4, dropout=0.3, targets=("q_proj", "up_proj")))
    made = RLCluster(actor=actor, tokenizer=TOKENIZER, cluster_config=settings)
    states, rates = [], []

    def observe(record: StepRecord) -> None:
        states.append((jax.device_get(made.state()), learner.state()))
        rates.append(record.metrics["learning_rate"])

    grpo = GRPOConfig(num_generations=4, beta=0.0)
    learner = GRPOLearner(rl_cluster=made, reward_fns=prefers_long, grpo_config=grpo, observers=[observe])
    good = learner.update
    learner.update = lambda batches: good(spoilt(batches) if learner.step == 1 else batches)  # type: ignore[method-assign]
    learner.prepare(3)
    observe(StepRecord(0, 0, 3, {"learning_rate": np.nan}, ()))
    learner.train(EXAMPLES)
    sizes = [largest_difference(a["params"], b["params"]) for (a, _), (b, _) in pairwise(states)]
    assert sizes == pytest.approx([rates[1], 0.0, rates[3]], rel=1e-4)
    assert rates[1:] == pytest.approx([0.02 * left / 3 for left in (3, 2, 1)], rel=1e-5)

    straight = states[-1][0]
    state, loop = states[2]
    made.load_state(jax.device_put(state), 2)
    learner.load_state(loop, 2)
    learner.train(EXAMPLES)
    jax.tree.map(np.testing.assert_array_equal, made.state(), straight)


def spoilt(batches: Any) -> list[TrainBatch]:
    return [replace(b, inputs=b.inputs._replace(advantage=b.inputs.advantage * np.nan)) for b in batches]


def largest_difference(one: Any, other: Any) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in pairs)


# --- what it computes


def prefers_long(prompts: Sequence[str], completions: Sequence[str], completion_ids: Any) -> list[float]:
    return [float(sum(ids)) / 100 for ids in completion_ids]


@pytest.mark.slow
def test_two_updates_on_a_batch_keep_the_old_log_probs(decoder: Callable) -> None:
    """In a batch's second update the ratio is no longer 1: it is taken against the log-probs before the first.

    Those are the sampler's own, at the rollout's temperature, not at 1; also in the next batch, drawn by new weights.
    """
    seen: list[tuple[LossInputs, dict[str, float]]] = []
    # Half of the others' rate: after a larger step all completions of a group earn the same, and nothing is clipped.
    settings = config(max_steps=4, actor_optimizer=optax.sgd(1.5))
    made = RLCluster(actor=decoder(), tokenizer=TOKENIZER, cluster_config=settings)
    inner = made.update_actor

    def spy(batches: Any) -> dict[str, float]:
        (batch,) = batches
        seen.append((batch.inputs, inner([batch])))
        return seen[-1][1]

    made.update_actor = spy  # type: ignore[method-assign]
    records = learn(made, num_iterations=2, beta=0.04)
    assert [r.step for r in records] == [2, 4]
    for (first, before), (second, after), record in zip(seen[::2], seen[1::2], records, strict=True):
        assert first is second
        np.testing.assert_allclose(first.old_logps, first.rollout_logps, atol=1e-4)
        assert before["clip_ratio/region_mean"] == 0.0
        # The sampler is compared with the policy it drew for, not with what the first update made of it.
        assert [m["sampling/importance_ratio/max"] for m in (before, after)] == pytest.approx([1.0, 1.0], abs=1e-3)
        assert after["clip_ratio/region_mean"] > 0.0
        assert record.metrics["kl"] == pytest.approx((before["kl"] + after["kl"]) / 2)
    kl = [metrics["kl"] for _, metrics in seen]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)  # the actor is still the reference
    assert min(kl[1:]) > 1e-4


@pytest.mark.slow
def test_one_update_on_a_batch_stores_no_old_log_probs(decoder: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollouts of two steps differ too, as they would not from a sampler seeded with a constant.

    Top-p cuts off part of what is drawn from, and leaves the ratio at 1: both sides compute with all of it.
    """
    made = RLCluster(actor=decoder(4), tokenizer=TOKENIZER, cluster_config=config(top_p=0.8))
    monkeypatch.setattr(made, "get_old_per_token_logps", None)
    records = learn(made, beta=0.0)
    assert [r.step for r in records] == [1, 2]
    assert tokens(records[0].groups) != tokens(records[1].groups)
    for record in records:
        assert record.metrics["clip_ratio/region_mean"] == 0.0
        assert record.metrics["sampling/logp_difference/max"] < 1e-4
        assert 0.8 <= record.metrics["sampling/mass_kept"] < 0.85
        assert sum(record.groups[0].advantages) == pytest.approx(0.0, abs=1e-5)


# --- what users give


def test_every_role_is_loaded_from_a_source_with_its_tokenizer_and_the_dtypes_asked_for() -> None:
    sources = {role: str(TINY) for role in (Role.ACTOR, Role.CRITIC, Role.REFERENCE)}
    made = RLCluster.load(**sources, cluster_config=config(), param_dtype="bfloat16")
    assert made.tokenizer.vocab_size == made.actor.config.vocab_size == 300
    assert len(made.tokenizer.stop_ids) == len(made.rollout.engine.stop_ids) == 2
    assert not set(pointers(made.actor).values()) & set(pointers(made.inference.params["reference"]).values())
    for role in (Role.REFERENCE, Role.CRITIC):
        dtypes = {str(x.dtype) for x in jax.tree.leaves(made.inference.params[role])}
        assert "bfloat16" in dtypes
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(made.actor))} == {"bfloat16"}


def test_a_source_is_loaded_with_new_adapters() -> None:
    """On the projections named, sharing the base with the reference, and only they are trained."""
    lora = LoRAConfig(rank=2, targets=("q_proj",))
    made = RLCluster.load(actor=str(TINY), cluster_config=config(), lora=lora)
    made.prepare(GRPOConfig(beta=0.04), 2)
    adapters = {name for name in flatten(nnx.state(made.actor)) if ".lora." in name}
    assert {name.split(".")[3] for name in adapters} == {"q_proj"}
    assert made.trainer is not None
    assert len(jax.tree.leaves(made.trainer.trainable)) == len(adapters) > 0
    actor, reference = pointers(made.actor), pointers(made.inference.params["reference"])
    assert {name: at for name, at in actor.items() if name not in adapters} == reference
    with pytest.raises(RecipeError, match="LoRA target 'wq' names no projection"):
        RLCluster.load(actor=str(TINY), lora=LoRAConfig(rank=2, targets=("wq",)))


def test_a_model_without_a_tokenizer_and_a_path_that_is_not_there_are_clear_errors(
    decoder: Callable, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="no tokenizer") as caught:
        RLCluster(actor=decoder())
    assert caught.value.fix == "pass tokenizer="
    with pytest.raises(WeightsError):
        RLCluster(actor=str(tmp_path / "nothing"))


def test_a_missing_column_is_told_before_anything_is_sampled(cluster: Callable) -> None:
    def judge(completions: list[str], anwser: list[str]) -> list[float]:
        return [0.0] * len(completions)

    phases: list[str] = []
    config = GRPOConfig(num_generations=2)
    learner = GRPOLearner(
        rl_cluster=cluster(beta=0.0), reward_fns=judge, grpo_config=config, on_phase=phases.append, observers=[]
    )
    with pytest.raises(RewardError, match=r"asks for 'anwser'[\s\S]*columns of the data: answer;[\s\S]*mean 'answer'"):
        learner.train([{"prompt": "a", "answer": "b"}])
    assert phases == []


def test_a_group_of_one_is_refused(cluster: Callable) -> None:
    with pytest.raises(RecipeError, match="num_generations is 1"):
        GRPOLearner(rl_cluster=cluster(beta=0.0), reward_fns=prefers_long, grpo_config=GRPOConfig(num_generations=1))


# --- the rollout worker


@pytest.fixture
def worker(decoder: Callable) -> RolloutWorker:
    return RolloutWorker(decoder(lora=2), TOKENIZER, RolloutConfig(max_prompt_length=16, max_new_tokens=4))


@pytest.mark.slow
def test_rollout_gives_text_tokens_left_padded_prompts_and_log_probs(worker: RolloutWorker) -> None:
    texts = ["hello there", "a"]
    out = worker.generate(texts, config=worker.config)
    assert [len(x) for x in out.logps] == [len(x) for x in out.tokens]
    assert (worker.pad_id, worker.eos_id) == (TOKENIZER.pad_id, TOKENIZER.eos_id)
    assert list(out.text) == [worker.tokenizer.decode(x) for x in out.tokens]
    prompts = [worker.tokenizer.encode_prompt(p).tolist() for p in texts]
    width = max(map(len, prompts))
    assert np.asarray(out.prompt_tokens).tolist() == [[worker.pad_id] * (width - len(p)) + p for p in prompts]
    logps = worker.get_per_token_logps(prompts, out.tokens)
    np.testing.assert_allclose(np.concatenate(logps), np.concatenate(out.logps), atol=1e-5)


def test_rollout_update_params_takes_all_or_lora_alone(worker: RolloutWorker, decoder: Callable) -> None:
    worker.update_params(jax.tree.map(lambda x: x + 1, worker.params))
    assert float(flatten(worker.params)["norm.scale"][0]) == 2.0
    assert pointers(worker.model) == pointers(worker.params)
    _, adapters, _ = split_trainable(decoder(lora=2))
    before = pointers(worker.params)
    worker.update_params(jax.tree.map(jax.numpy.ones_like, adapters))
    after = flatten(worker.params)
    assert after.keys() == before.keys()
    held = pointers(worker.params)
    for name, at in before.items():
        assert (after[name] == 1).all() if ".lora." in name else held[name] == at


@pytest.mark.parametrize("setting", ["kv_cache_size", "max_prompt_length"])
def test_what_would_not_fit_the_prompt_length_or_the_cache_is_refused(worker: RolloutWorker, setting: str) -> None:
    """The prompt has 8 tokens, and the answer may have 4."""
    with pytest.raises(DataError, match=setting):
        worker.generate([{"prompt": "hello there"}], 1, config=replace(worker.config, **{setting: 5}))


# --- layers in stacks


def momentum_cluster(actor: Decoder, mesh: Any) -> RLCluster:
    """A cluster with a reference that moves, whose optimizer has moments."""
    settings = config({Role.ACTOR: mesh}, actor_optimizer=optax.sgd(0.5, momentum=0.9))
    made = RLCluster(actor=actor, tokenizer=TOKENIZER, cluster_config=settings)
    made.prepare(GRPOConfig(beta=0.04, reference_every_n_updates=1, reference_mixing=0.5), 10)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4])
def test_stacks_are_lent_while_the_rollout_samples(
    cluster: Callable[..., RLCluster], decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch, lora: int
) -> None:
    """Whoever shares them has shapes meanwhile, and no second copy is in memory; behind a rollout, even one that fails,
    they are there again, bit for bit.
    """
    monkeypatch.setattr("covey.parallel.arrays.platform_of", lambda place: "gpu")
    made = cluster(models={"actor": decoder(lora, layers=2)})
    assert made.trainer is not None
    sharing = [made.trainer, made.rollout, *([made.inference] if lora else [])]
    states = lambda: [flatten(one.params) for one in sharing]  # noqa: E731
    (stack,) = (x for name, x in flatten(made.trainer.params).items() if name.endswith("gate_proj.kernel"))
    shapes = stack.shape, stack.shape[1:]
    del stack

    def in_memory() -> int:
        gc.collect()
        return sum(x.size for x in jax.live_arrays() if x.shape in shapes)

    before, kernels, sampled = jax.tree.map(np.array, states()), in_memory(), []

    def fails(*_: Any) -> None:
        sampled.append((in_memory(), [is_abstract(state) for state in states()]))
        raise KeyboardInterrupt

    monkeypatch.setattr("covey.rl.rollout_worker.generate", fails)
    with pytest.raises(KeyboardInterrupt):
        made.generate(EXAMPLES, 4)
    assert sampled == [(kernels, [True] * len(sharing))]
    jax.tree.map(np.testing.assert_array_equal, states(), before)


@pytest.mark.slow
def test_stacks_of_layers_train_as_a_list_does(decoder: Callable, step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on accelerators, but with programs that a CPU runs; and what leaves the cluster has its layers one by one.

    `jax.make_mesh` makes explicit axes, which refuse products that do not say where their result goes.
    """
    rows, lengths, inputs = step
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"))
    listed = momentum_cluster(decoder(layers=2), mesh)
    assert mesh_of(listed.state()["params"]) == make_mesh((2, 2))
    monkeypatch.setattr("covey.parallel.arrays.platform_of", lambda place: "gpu")
    stacked = momentum_cluster(decoder(layers=2), mesh)
    assert stacked.trainer is not None
    kernels = [x.shape for name, x in flatten(stacked.trainer.params).items() if name.endswith("q_proj.kernel")]
    assert kernels == [(2, 32, 32)]
    pairs: list[RLCluster] = [listed, stacked]
    assert tokens(stacked.generate(EXAMPLES, 4)) == tokens(listed.generate(EXAMPLES, 4))
    for _ in range(2):
        ref, metrics = [], []
        for made in pairs:
            ref.append(made.get_ref_per_token_logps(rows, lengths))
            used = inputs._replace(ref_logps=scatter_to_rows(rows, ref[-1]))
            metrics.append(made.update_actor(one_batch(rows, used)))
            made.update_reference(0.5)
            made.sync_weights()
        np.testing.assert_allclose(np.concatenate(ref[1]), np.concatenate(ref[0]), atol=1e-5)
        assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)
    assert tokens(stacked.generate(EXAMPLES, 4)) == tokens(listed.generate(EXAMPLES, 4))
    states = [made.state() for made in pairs]
    shapes = [{name: x.shape for name, x in flatten(tree).items()} for tree in (*states, stacked.state_shapes())]
    assert shapes[0] == shapes[1] == shapes[2]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *states[::-1])
    stacked.load_state(jax.tree.map(jax.numpy.copy, states[0]), 2)
    left = [flatten(nnx.state(made.actor)) for made in (listed, stacked)]
    assert [(name, np.asarray(x).tobytes()) for name, x in left[0].items()] == [
        (name, np.asarray(x).tobytes()) for name, x in left[1].items()
    ]
    listed.load_state(stacked.state(), 2)
    same = jax.tree.map(np.array_equal, listed.state(), states[0])
    assert all(jax.tree.leaves(same))
