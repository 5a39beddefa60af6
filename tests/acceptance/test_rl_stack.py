"""The RL stack of cluster, learner and workers: each behaviour that users of it rely on, by its name."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from covey.config.schema import GRPOConfig, RolloutConfig
from covey.errors import DataError, RecipeError
from covey.losses.value import ValueInputs
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.lora import has_lora, split_trainable
from covey.models.value_model import make_value_model
from covey.packing.rows import scatter_to_rows
from covey.parallel import flatten, make_mesh, mesh_of, reshard
from covey.rl import run_ahead
from covey.rl.cluster import RLCluster
from covey.rl.inference import InferenceWorker
from covey.rl.micro_batches import TrainBatch
from covey.rl.roles import ClusterConfig, Role
from covey.rl.rollout import RolloutWorker
from covey.rl.run_ahead import DataQueue
from covey.sampling.programs import Programs
from covey.train.trainer import Trainer


def pointers(tree: Any) -> dict[str, int]:
    """Where each array's first piece lies in memory."""
    state = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    return {name: x.addressable_shards[0].data.unsafe_buffer_pointer() for name, x in flatten(state).items()}


def without_adapters(named: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in named.items() if ".lora." not in name}


def on(*devices: int) -> Any:
    return make_mesh((len(devices),), ("fsdp",), [jax.devices()[i] for i in devices])


# RLCluster


def test_the_cluster_owns_models_by_role_and_the_tokenizer_they_share(cluster: Callable, decoder: Callable) -> None:
    assert {str(role) for role in Role} == {"actor", "rollout", "reference", "critic", "reward"}
    made = cluster(actor=decoder(), critic=make_value_model(decoder()), reward=make_value_model(decoder()))
    made.prepare(GRPOConfig(algorithm="ppo", num_generations=1), 1)
    assert made.rollout.tokenizer is made.tokenizer
    assert all(made.inference.has(role) for role in (Role.REFERENCE, Role.CRITIC, Role.REWARD))
    assert isinstance(made.trainer, Trainer)
    assert isinstance(made.critic_trainer, Trainer)
    assert made.trainer is not made.critic_trainer


def test_each_role_lives_on_its_mesh_and_a_model_on_another_mesh_is_moved(cluster: Callable, decoder: Callable) -> None:
    meshes = {Role.ACTOR: on(0, 1), Role.ROLLOUT: on(2), Role.REFERENCE: on(3)}
    graph, params = nnx.split(decoder())
    elsewhere = nnx.merge(graph, reshard(params, NamedSharding(on(2, 3), P())))
    made = cluster(meshes, actor=elsewhere)
    made.prepare(GRPOConfig(beta=0.04), 1)
    held = {Role.ACTOR: made.trainer.params, Role.ROLLOUT: made.rollout.params}
    held[Role.REFERENCE] = made.inference.params[Role.REFERENCE]
    for role, state in held.items():
        assert mesh_of(state) == meshes[role]
        for name, x in flatten(state).items():
            np.testing.assert_array_equal(x, flatten(params)[name])


def test_a_path_is_loaded_with_its_tokenizer(tiny: Path) -> None:
    config = ClusterConfig(rollout_config=RolloutConfig(max_new_tokens=4))
    made = RLCluster(actor=str(tiny), reference=str(tiny), cluster_config=config)
    assert made.actor.config.vocab_size == made.tokenizer.vocab_size == 300


def test_with_lora_actor_and_reference_share_the_base_and_the_reference_costs_no_memory(
    cluster: Callable, decoder: Callable
) -> None:
    made = cluster(actor=decoder(lora=2))
    made.prepare(GRPOConfig(beta=0.04), 1)
    actor, reference = pointers(made.trainer.params), pointers(made.inference.params[Role.REFERENCE])
    assert reference == without_adapters(actor) != actor
    assert has_lora(made.actor)


def test_without_lora_the_reference_is_a_full_copy(cluster: Callable, decoder: Callable) -> None:
    made = cluster(actor=decoder())
    made.prepare(GRPOConfig(beta=0.04), 1)
    actor, reference = pointers(made.trainer.params), pointers(made.inference.params[Role.REFERENCE])
    assert actor.keys() == reference.keys()
    assert not set(actor.values()) & set(reference.values())


@pytest.mark.slow
def test_the_reference_is_frozen(bench: Any, sampled: Any) -> None:
    _, rows, lengths = sampled
    before = bench.cluster.get_ref_per_token_logps(rows, lengths)
    bench.train()
    for one, other in zip(before, bench.cluster.get_ref_per_token_logps(rows, lengths), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_generate_and_the_log_probs_agree(bench: Any, sampled: Any) -> None:
    """Sampler, old and reference log-probs of the first weights are the same numbers, at the rollout's temperature."""
    groups, rows, lengths = sampled
    drawn = [c.logps for g in groups for c in g.completions]
    for compute in (bench.cluster.get_old_per_token_logps, bench.cluster.get_ref_per_token_logps):
        assert [len(x) for x in compute(rows, lengths)] == lengths
        np.testing.assert_allclose(np.concatenate(compute(rows, lengths)), np.concatenate(drawn), atol=1e-5)


@pytest.mark.slow
def test_update_actor_and_sync_weights(bench: Any, sampled: Any) -> None:
    _, rows, lengths = sampled
    before = np.concatenate(bench.cluster.get_old_per_token_logps(rows, lengths))
    bench.train()
    after = np.concatenate(bench.cluster.get_old_per_token_logps(rows, lengths))
    assert np.abs(after - before).max() > 1e-3
    assert pointers(bench.cluster.rollout.params) == pointers(bench.cluster.trainer.params)


@pytest.mark.slow
def test_values_and_update_critic(judged: RLCluster, sampled: Any) -> None:
    """An update moves the values toward the returns, by the critic's own trainer, and leaves the actor alone."""
    groups, rows, lengths = sampled
    judged.prepare(GRPOConfig(algorithm="ppo", num_generations=1, beta=0.0), 1)
    assert isinstance(judged.critic_trainer, Trainer)
    before, actor = judged.get_values(rows, lengths), jax.tree.map(np.array, judged.trainer.params)
    fill = lambda value: np.where(rows.scored, np.float32(value), 0)  # noqa: E731
    given = ValueInputs(returns=fill(2), old_values=scatter_to_rows(rows, before), weight=fill(1))
    judged.update_critic([TrainBatch(groups, rows, None, 0.0, given)])  # type: ignore[arg-type]
    after = judged.get_values(rows, lengths)
    assert [len(x) for x in after] == lengths
    error = lambda values: float(np.square(np.concatenate(values) - 2).mean())  # noqa: E731
    assert error(after) < 0.9 * error(before)
    assert jax.tree.all(jax.tree.map(np.array_equal, actor, judged.trainer.params))


@pytest.mark.slow
def test_rewards_can_be_asked_for_as_soon_as_the_cluster_exists(judged: RLCluster) -> None:
    """What the models given can answer needs no learner and no algorithm."""
    one, other, same = judged.get_rewards([[1, 2], [1, 2], [1, 2]], [[3], [4, 5], [3]])
    assert one == pytest.approx(same, abs=1e-5)
    assert one != other


def test_close_lets_go_of_every_array(cluster: Callable, decoder: Callable) -> None:
    made = cluster(actor=decoder(), reward=make_value_model(decoder()))
    made.prepare(GRPOConfig(beta=0.04), 1)
    held = [weakref.ref(x) for x in jax.tree.leaves((made.trainer.params, made.inference.params))]
    made.close()
    gc.collect()
    assert not any(ref() for ref in held)


# GRPOLearner


def test_a_step_is_rollouts_rewards_advantages_mu_updates_and_weight_sync(played: Callable) -> None:
    order = played(prompts=2, updates=2, batches=2).train(2).order()
    assert order == ["rollout", "reward", "ref_logps", "old_logps", *["train", "update"] * 2, "sync"] * 2


def test_an_eval_set_is_evaluated_as_often_as_asked(played: Callable) -> None:
    made = played(prompts=2, batches=4, eval_every_n_steps=2)
    made.learner().train(made.loader(2), [{"prompt": "held out", "answer": "x"}] * 3)
    assert ["eval/reward" in record.metrics for record in made.records] == [False, True, False, True]


def test_roles_on_one_mesh_run_in_turn(played: Callable) -> None:
    made = played(prompts=2, meshes={Role.ACTOR: on(0)}).train(2)
    assert {note.thread for note in made.notes} == {"MainThread"}


def test_when_actor_and_rollout_live_apart_a_producer_thread_fills_the_queue(played: Callable) -> None:
    made = played(prompts=2, meshes={Role.ACTOR: on(0), Role.ROLLOUT: on(1)}).train(2)
    threads = {note.what: note.thread for note in made.notes}
    assert threads["rollout"] == threads["reward"] != "MainThread"
    assert {threads[what] for what in ("ref_logps", "train", "update", "sync")} == {"MainThread"}


@pytest.mark.parametrize(("train", "accumulation"), [(1, 6), (4, 2), (6, 1)])
def test_the_queue_size_is_accumulation_steps_plus_2(
    played: Callable, monkeypatch: pytest.MonkeyPatch, train: int, accumulation: int
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(run_ahead, "DataQueue", lambda maxsize: sizes.append(maxsize) or DataQueue(maxsize))
    played(prompts=6, train=train, queueing="async").train(6)
    assert sizes == [accumulation + 2]


# The rollout worker


@pytest.mark.slow
def test_rollout_generate_gives_text_tokens_log_probs_and_left_padded_prompts(bench: Any) -> None:
    worker = bench.fresh().rollout
    out = worker.generate(["hello there", "a"], config=worker.config)
    assert [len(x) for x in out.logps] == [len(x) for x in out.tokens]
    assert list(out.text) == [worker.tokenizer.decode(x) for x in out.tokens]
    prompts = [worker.tokenizer.encode_prompt(p).tolist() for p in ("hello there", "a")]
    width = max(map(len, prompts))
    assert np.asarray(out.prompt_tokens).tolist() == [[worker.pad_id] * (width - len(p)) + p for p in prompts]


@pytest.mark.slow
def test_rollout_get_per_token_logps(bench: Any, sampled: Any) -> None:
    groups, _, _ = sampled
    pairs = [(g.prompt_tokens, c) for g in groups for c in g.completions]
    found = bench.cluster.rollout.get_per_token_logps([p for p, _ in pairs], [c.tokens for _, c in pairs])
    for logps, (_, completion) in zip(found, pairs, strict=True):
        np.testing.assert_allclose(logps, completion.logps, atol=1e-5)


@pytest.fixture
def worker(decoder: Callable, tokenizer: Any) -> RolloutWorker:
    return RolloutWorker(decoder(lora=2), tokenizer, RolloutConfig(max_prompt_length=16, max_new_tokens=4))


def test_rollout_update_params_takes_all(worker: RolloutWorker) -> None:
    worker.update_params(jax.tree.map(lambda x: x + 1, worker.params))
    assert float(flatten(worker.params)["norm.scale"][0]) == 2.0


def test_rollout_update_params_takes_lora_alone(worker: RolloutWorker, decoder: Callable) -> None:
    _, adapters, _ = split_trainable(decoder(lora=2))
    before = pointers(worker.params)
    worker.update_params(jax.tree.map(jnp.ones_like, adapters))
    after = flatten(worker.params)
    assert after.keys() == before.keys()
    assert without_adapters(pointers(worker.params)) == without_adapters(before)
    assert all((after[name] == 1).all() for name in after.keys() - without_adapters(after).keys())


def test_rollout_has_pad_id_eos_id_and_model(worker: RolloutWorker, tokenizer: Any) -> None:
    assert (worker.pad_id, worker.eos_id) == (tokenizer.pad_id, tokenizer.eos_id)
    assert pointers(worker.model) == pointers(worker.params)


def test_rollout_config_says_lengths_temperature_truncation_seed_and_cache_size() -> None:
    names = ("max_prompt_length", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "kv_cache_size")
    assert all(name in RolloutConfig.__dataclass_fields__ for name in names)


@pytest.mark.parametrize("setting", ["kv_cache_size", "max_prompt_length"])
def test_what_would_not_fit_the_prompt_length_or_the_cache_is_refused(worker: RolloutWorker, setting: str) -> None:
    """The prompt has 8 tokens, and the answer may have 4."""
    with pytest.raises(DataError, match=setting):
        worker.generate([{"prompt": "hello there"}], 1, config=replace(worker.config, **{setting: 5}))


# The sampler


@pytest.mark.slow
def test_the_cache_has_the_size_layers_kv_heads_and_head_width_asked_for() -> None:
    config = ModelConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8
    )
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16))
    cache = Programs(graph, ()).empty_cache(params, 4, 0, 192)
    assert [[block.keys.shape for block in blocks] for blocks in cache] == [[(4, 2, 8, 128), (4, 2, 8, 64)]] * 3
    assert [[block.values.shape for block in blocks] for blocks in cache] == [[(4, 2, 128, 8), (4, 2, 64, 8)]] * 3
    assert {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_sampling_is_greedy_or_drawn(bench: Any) -> None:
    made = bench.fresh()
    rows, greedy = [{"prompt": "hello there"}], replace(made.config.rollout_config, temperature=0.0)
    tokens = lambda groups: [c.tokens.tolist() for c in groups[0].completions]  # noqa: E731
    first, second = tokens(made.generate(rows, 2, config=greedy))
    assert first == second
    one, other = tokens(made.generate(rows, 2))
    assert one != other
    assert one not in tokens(made.generate(rows, 2, step=1))


# The inference worker


@pytest.mark.parametrize("role", ["actor", "rollout", "judge"])
def test_the_inference_worker_refuses_actor_and_rollout_and_names_the_legal_roles(decoder: Callable, role: str) -> None:
    with pytest.raises(RecipeError, match=rf"hosts no '{role}'\n.*reference, critic, reward"):
        InferenceWorker({role: decoder()})


def test_the_inference_worker_hosts_reference_critic_and_reward(decoder: Callable) -> None:
    head = make_value_model(decoder())
    hosted = InferenceWorker({Role.REFERENCE: decoder(), Role.CRITIC: head, Role.REWARD: head})
    assert all(hosted.has(role) for role in ("reference", "critic", "reward"))


# Sync


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_sync_moves_only_lora_weights_when_lora_is_on_and_everything_otherwise(
    cluster: Callable, decoder: Callable, lora: int
) -> None:
    made = cluster({Role.ACTOR: on(0), Role.ROLLOUT: on(1)}, actor=decoder(lora))
    made.prepare(GRPOConfig(beta=0.0), 1)
    before = pointers(made.rollout.params)
    held = made.rollout.params  # so that no freed buffer is used again
    made.trainer.trainable = jax.tree.map(lambda x: x + 1, made.trainer.trainable)
    made.sync_weights()
    after = pointers(made.rollout.params)
    moved = {name for name in before if before[name] != after[name]}
    assert moved == {name for name in before if ".lora." in name or not lora}
    assert mesh_of(made.rollout.params) == mesh_of(held) == on(1)
    for name, x in flatten(made.rollout.params).items():
        np.testing.assert_array_equal(x, flatten(made.trainer.params)[name])
