"""Cluster, learner, GRPO step and rollout worker: each behaviour that users of them rely on, by its name."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from covey.config.algorithms import algorithm_of
from covey.config.schema import GRPOConfig, RLTrainingConfig, RolloutConfig
from covey.errors import DataError
from covey.models.lora import split_trainable
from covey.models.value_model import make_value_model
from covey.parallel import flatten, make_mesh, mesh_of, reshard
from covey.rl import run_ahead
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.roles import ClusterConfig, Role
from covey.rl.rollout import RolloutWorker
from covey.rl.run_ahead import DataQueue
from covey.text.tokenizer import Tokenizer
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


@pytest.fixture
def cluster(tokenizer: Tokenizer) -> Callable[..., RLCluster]:
    """`cluster(meshes={}, actor=..., **models)`: not prepared."""

    def make(meshes: Any = None, **models: Any) -> RLCluster:
        sgd: Any = optax.sgd(0.01)
        training = RLTrainingConfig(actor_optimizer=sgd, critic_optimizer=sgd)
        config = ClusterConfig(meshes or {}, training, RolloutConfig(max_new_tokens=4, slots=8))
        return RLCluster(tokenizer=tokenizer, cluster_config=config, **models)

    return make


def test_the_cluster_owns_models_by_role_and_the_tokenizer_they_share(cluster: Callable, decoder: Callable) -> None:
    assert {str(role) for role in Role} == {"actor", "rollout", "reference", "critic", "reward"}
    made = cluster(actor=decoder(), critic=make_value_model(decoder()), reward=make_value_model(decoder()))
    made.prepare(GRPOConfig(algorithm="ppo", num_generations=1), 1)
    assert made.rollout.tokenizer is made.tokenizer
    assert all(made.inference.has(role) for role in (Role.REFERENCE, Role.CRITIC, Role.REWARD))
    assert type(made.trainer) is type(made.critic_trainer) is Trainer
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


@pytest.mark.slow
def test_rewards_can_be_asked_for_as_soon_as_the_cluster_exists(cluster: Callable, decoder: Callable) -> None:
    """What the models given can answer needs no learner and no algorithm."""
    reward = make_value_model(decoder())
    reward.score[...] = jnp.full(16, -0.2)
    one, other, same = cluster(actor=decoder(), reward=reward).get_rewards([[1, 2]] * 3, [[3], [4, 5], [3]])
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


def test_a_run_chooses_what_its_line_shows(played: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    made = played(prompts=2, show=("kl",))
    made.learner(observers=None).train(made.loader(2))
    assert "kl 0" in capsys.readouterr().out


# The GRPO step


def half(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    return [0.5] * len(completions)


def test_the_names_users_know(played: Callable) -> None:
    config = GRPOConfig(beta=0.08, num_generations=4)
    assert (algorithm_of(config).beta, config.num_generations) == (0.08, 4)
    assert 0.02 <= algorithm_of(GRPOConfig()).beta <= 0.08
    assert GRPOLearner(rl_cluster=played(), reward_fns=half, grpo_config=config).reward_fns == [half]
    assert GRPOLearner(rl_cluster=played(), reward_funcs=half).reward_fns == [half]


def test_the_advantage_stands_at_each_token_of_its_sample(played: Callable) -> None:
    cluster = played(prompts=2, samples=3).train(2)
    ((batch,),) = cluster.updates
    advantages = np.concatenate([group.advantages for group in cluster.records[0].groups])
    for number, place, advantage in zip(
        *np.moveaxis(batch.rows.scatter_index, -1, 0), batch.inputs.advantage, strict=True
    ):
        np.testing.assert_array_equal(advantage[number >= 0], advantages[number[number >= 0]])
        assert not advantage[place < 0].any()


def test_samples_that_are_masked_whole_contribute_0_to_a_step(played: Callable) -> None:
    """Every second completion was cut off: masked, it has no weight and still counts in the mean."""
    ((batch,),) = played(prompts=2, samples=4, mask_truncated=True).train(2).updates
    number = batch.rows.scatter_index[..., 0]
    assert not batch.inputs.weight[number % 2 == 1].any()
    assert (batch.inputs.weight[(number >= 0) & (number % 2 == 0)] > 0).all()
    assert batch.denominator == 8.0


# The rollout worker


@pytest.fixture
def worker(decoder: Callable, tokenizer: Any) -> RolloutWorker:
    return RolloutWorker(decoder(lora=2), tokenizer, RolloutConfig(max_prompt_length=16, max_new_tokens=4))


@pytest.mark.slow
def test_rollout_gives_text_tokens_left_padded_prompts_and_log_probs(worker: RolloutWorker) -> None:
    texts = ["hello there", "a"]
    out = worker.generate(texts, config=worker.config)
    assert [len(x) for x in out.logps] == [len(x) for x in out.tokens]
    assert list(out.text) == [worker.tokenizer.decode(x) for x in out.tokens]
    prompts = [worker.tokenizer.encode_prompt(p).tolist() for p in texts]
    width = max(map(len, prompts))
    assert np.asarray(out.prompt_tokens).tolist() == [[worker.pad_id] * (width - len(p)) + p for p in prompts]
    logps = worker.get_per_token_logps(prompts, out.tokens)
    np.testing.assert_allclose(np.concatenate(logps), np.concatenate(out.logps), atol=1e-5)


def test_rollout_update_params_takes_all_or_lora_alone(worker: RolloutWorker, decoder: Callable) -> None:
    worker.update_params(jax.tree.map(lambda x: x + 1, worker.params))
    assert float(flatten(worker.params)["norm.scale"][0]) == 2.0
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


@pytest.mark.parametrize("setting", ["kv_cache_size", "max_prompt_length"])
def test_what_would_not_fit_the_prompt_length_or_the_cache_is_refused(worker: RolloutWorker, setting: str) -> None:
    """The prompt has 8 tokens, and the answer may have 4."""
    with pytest.raises(DataError, match=setting):
        worker.generate([{"prompt": "hello there"}], 1, config=replace(worker.config, **{setting: 5}))


# Sync


def test_sync_hands_over_the_arrays_where_actor_and_rollout_share_a_mesh(cluster: Callable, decoder: Callable) -> None:
    made = cluster(actor=decoder())
    made.prepare(GRPOConfig(beta=0.0), 1)
    made.trainer.trainable = jax.tree.map(jnp.copy, made.trainer.trainable)
    made.sync_weights()
    assert pointers(made.rollout.params) == pointers(made.trainer.params)


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
