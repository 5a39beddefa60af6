"""Worker of google-tunix: its own GRPO learner and sampler on one device, as its examples set them up.

Roles share one mesh, the reference is the adapters' base (or a second copy), and layers keep their activations, which
is its default and the faster way. It pads every prompt to the maximum it is told and every completion to the most.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import numpy as np
import optax
import qwix
from flax import nnx
from jax.sharding import AxisType, Mesh
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl import rl_cluster as rl
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.peers.work import STOP, Work, even_words
from benchmarks.peers.worker import Steps

LINEAR = ".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def main() -> None:
    """Set up, and train until the driver ends the process."""
    steps = Steps()
    steps.listen(jax.monitoring)
    work = steps.work
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    reference = _load(steps.folder, mesh)
    actor = _with_lora(reference, work, mesh) if work.lora_rank else _load(steps.folder, mesh)
    trained = nnx.LoRAParam if work.lora_rank else nnx.Param
    cluster = rl.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=AutoTokenizer.from_pretrained(steps.folder),
        cluster_config=_settings(work, mesh, steps.options),
    )
    _watch(cluster, steps)
    algorithm = GRPOConfig(num_generations=work.samples, num_iterations=1, beta=work.beta, epsilon=work.epsilon)
    learner = GRPOLearner(rl_cluster=cluster, reward_fns=even_words, algo_config=algorithm)
    steps.ready(_count(actor, nnx.Param), _count(actor, trained), ("google-tunix", "jax", "flax", "qwix"))
    learner.train(_batches(cluster, steps, trained))


def _load(folder: str, mesh: Mesh) -> Any:
    c = json.loads((Path(folder) / "config.json").read_text())
    config = llama.ModelConfig(
        num_layers=c["num_hidden_layers"],
        vocab_size=c["vocab_size"],
        embed_dim=c["hidden_size"],
        hidden_dim=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        head_dim=c["head_dim"],
        num_kv_heads=c["num_key_value_heads"],
        rope_theta=int(c["rope_theta"]),
        norm_eps=c["rms_norm_eps"],
        weight_tying=True,
    )
    return create_model_from_safe_tensors(folder, config, mesh, jax.numpy.float32)


def _with_lora(base: Any, work: Work, mesh: Mesh) -> Any:
    provider = qwix.LoraProvider(module_path=LINEAR, rank=work.lora_rank, alpha=work.lora_alpha)
    with mesh:
        model = qwix.apply_lora_to_model(base, provider, **base.get_model_input(), rngs=nnx.Rngs(1))
        state = nnx.state(model)
        placed = jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state))
        nnx.update(model, placed)
    return model


def _settings(work: Work, mesh: Mesh, options: dict[str, Any]) -> rl.ClusterConfig:
    """Return the configuration: micro-batches for the optimizer and the log-probs; all samples are drawn at once."""
    longest = options.get("max_prompt_length", work.max_prompt_length)
    adamw = optax.adamw(work.learning_rate, b1=work.b1, b2=work.b2, weight_decay=work.weight_decay)
    training = rl.RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(work.max_grad_norm), adamw),
        eval_every_n_steps=10**6,
        max_steps=work.steps,
        mini_batch_size=work.prompts,
        train_micro_batch_size=work.micro_prompts,
        compute_logps_micro_batch_size=work.micro_prompts,
        rollout_micro_batch_size=work.prompts,
    )
    rollout = RolloutConfig(
        max_tokens_to_generate=work.max_new_tokens,
        max_prompt_length=longest,
        kv_cache_size=longest + work.max_new_tokens,
        temperature=work.temperature,
        top_p=1.0,
        top_k=None,
        eos_tokens=[STOP],
    )
    return rl.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl.Role.ACTOR, rl.Role.REFERENCE, rl.Role.ROLLOUT), mesh),
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=training,
        rollout_config=rollout,
    )


def _watch(cluster: Any, steps: Steps) -> None:
    def generate(*args: Any, **kwargs: Any) -> Any:
        out = drawn(*args, **kwargs)
        # It cuts the stop token off, which was drawn all the same.
        steps.lengths = [min(len(tokens) + 1, steps.work.max_new_tokens) for tokens in out.tokens]
        return out

    drawn = steps.phased("rollout", cluster.generate)
    cluster.generate = generate
    wait = jax.block_until_ready
    cluster.get_ref_per_token_logps = steps.phased("logps", cluster.get_ref_per_token_logps, wait)


def _batches(cluster: Any, steps: Steps, trained: type) -> Iterator[dict[str, np.ndarray]]:
    """A step begins when the loop asks for its prompts, and is over when it asks for the next and the weights are
    there.
    """
    for batch in steps.work.batches():
        jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model, trained)))
        steps.turn()
        yield {"prompts": np.array(batch)}


def _count(model: Any, kind: type) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, kind)))


if __name__ == "__main__":
    main()
