"""Tunix: its GRPOLearner and RLCluster on the CPU, in one `train` that waits for the rows of each step.

The rollout engine is its own sampler, which gives a row's completion instead of drawing one; what a row says of its
completion (advantage, mask, old and reference log-probs) replaces what the learner computed of it. All else is its own:
padding, log-probs, loss, packing, the accumulation of micro-batches, optimizer step, checkpoint.
"""

import json
import os
import queue
import re
import shutil
import tempfile
import threading
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import qwix
from flax import nnx
from jax.sharding import AxisType
from safetensors.numpy import load_file
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params
from tunix.models.safetensors_saver import save_lora_merged_model_as_safetensors
from tunix.rl import rl_cluster as rl
from tunix.rl.common import compute_per_token_logps
from tunix.rl.grpo.dapo_learner import DAPOConfig
from tunix.rl.grpo.drgrpo_learner import DrGRPOConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig, RolloutOutput
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

VERSION = metadata.version("google-tunix")
SETTINGS = {
    "": "vanilla rollout on the CPU; where nothing else stands, RoPE's base is set in its Llama (see gradient/logps), "
    "and XLA compiles with few optimizations (jax_disable_most_optimizations), which is faster",
    "gradient/logps": "as released",
    "gradient/grpo": "GRPOConfig(), train_micro_batch_size=2 prompts",
    "gradient/grpo-k1": "kl_loss_mode='kl'",
    "gradient/grpo-k2": "kl_loss_mode='mse_kl'",
    "gradient/grpo-k3": "kl_loss_mode='low_var_kl'",
    "gradient/dr_grpo": "DrGRPOConfig()",
    "gradient/dapo": "DAPOConfig(epsilon_high=0.28, overlong_buffer=None)",
    "gradient/gspo": "GRPOConfig(loss_algo='gspo-token'), epsilon_high set",
    "invariance/micro-batch": "train_micro_batch_size of 2 and 1 prompts",
    "invariance/accumulation": "DAPOConfig(), train_micro_batch_size of 2 and 1 prompts",
    "invariance/padding-before": "max_prompt_length=16 and 19",
    "invariance/padding-behind": "max_tokens_to_generate=12 and 17",
    "invariance/packing": "max_seq_token_per_tpu=128",
    "invariance/devices": "a mesh of 2 devices, fsdp",
    "mask/tool": "completion_mask, as its agentic GRPOLearner gives it to the same loss",
    "sampler": "return_logprobs=True",
    "sampler/stored-ratio": "num_iterations=2, learning rate 0",
    "advantage/centred": "DrGRPOConfig()",
    "optimizer": "optax.adamw of the user's; decay by a mask of the user's",
    "optimizer/warm-up": "optax.linear_schedule(lr / 4, lr, 3), a schedule of the user's",
    "optimizer/bf16": "model loaded in bfloat16",
    "resume/steps": "its checkpoint manager",
    "resume/merge": "qwix.LoraProvider; save_lora_merged_model_as_safetensors with the rules of its Qwen3",
}
NO_TURNS = "its turns are those of the agentic GRPOLearner; this adapter uses GRPOLearner"
REASONS = {
    "gradient/logps": (
        "its Llama calls apply_rope without ModelConfig.rope_theta, so RoPE's base is the default 1,000,000 "
        "(tunix/models/llama3/model.py:352)"
    ),
    "gradient/empty": (
        "a choice of design: the mean is over the completions that have a token (tunix/rl/common.py:552, non_zero_rows)"
    ),
    "invariance/accumulation": (
        "the mean over tokens is that of a micro-batch, and optax.MultiSteps averages the micro-batches "
        "(tunix/sft/peft_trainer.py:213); equal where each has as many tokens"
    ),
    "invariance/packing": (
        "a packed row has no attention mask and relies on the model to part samples by segment_ids "
        "(tunix/rl/common.py:249), which its Qwen models take and its Llama does not (models/llama3/model.py:622)"
    ),
    "sampler/stored-ratio": (
        "stored log-probs are those of VanillaRollout.get_per_token_logps, which does not get the temperature by which "
        "the loss divides logits (tunix/rl/rollout/vanilla_rollout.py:81); equal at temperature 1"
    ),
    "sampler/stop": "its vanilla sampler hands over the tokens before the stop token (tunix/generate/sampler.py:944)",
    "sampler/tokens": "its vanilla sampler hands over the tokens before the stop token (tunix/generate/sampler.py:944)",
    "sampler/noise": (
        "without RolloutConfig.seed every call draws by PRNGKey(0), with it by that key (tunix/generate/sampler.py:836)"
    ),
    "sampler/agreement": "its noise is one key for all rows of a call, with no noise of a token's own",
    "turns": NO_TURNS,
    "advantage/z-score": "a choice of design: std + 1e-6 (tunix/rl/algo_core.py:566)",
    "advantage/none": (
        "NaN counts as 0 in the sum of rewards, so a sample that no function scored has reward 0 and counts in its "
        "group's mean (tunix/rl/reward_manager.py:170)"
    ),
    "optimizer/bf16": (
        "weights and moments are of the dtype in which the model is loaded; a model loaded in float32 moves, and then "
        "computes in float32"
    ),
}
if not jax.config.jax_compilation_cache_dir:
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())  # a trainer takes what another has compiled
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_disable_most_optimizations", True)  # compiling is nearly all of the time
LINEAR = ".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
KLS = {"k1": "kl", "k2": "mse_kl", "k3": "low_var_kl"}
GIVEN = {"mask": "completion_mask", "old_logps": "old_per_token_logps", "ref_logps": "ref_per_token_logps"}
LONGEST_PROMPT = 16


class _Rollout(VanillaRollout):
    """Its sampler, which gives the completions of `order` where there is one."""

    order = None

    def __init__(self, rollout_actor, tokenizer, mesh, rollout_config):
        config = rollout_actor.config
        cache = CacheConfig(rollout_config.kv_cache_size, config.num_layers, config.num_kv_heads, config.head_dim)
        super().__init__(rollout_actor, tokenizer, cache)

    def generate(self, prompts, rollout_config, **kwargs):
        if self.order is None:
            return super().generate(prompts, rollout_config, **kwargs)
        rows, width = self.order.rows, rollout_config.max_prompt_length
        ids = np.full((len(rows), width), self.pad_id(), np.int32)
        for line, row in zip(ids, rows, strict=True):
            line[width - len(row["prompt"]) :] = row["prompt"]
        return RolloutOutput([""] * len(rows), [], [np.int32(row["completion"]) for row in rows], ids, None)


class _Learner(GRPOLearner):
    """Its learner, whose examples have what the rows of the order say."""

    def _generate_and_compute_advantage(self, training_input, mode=rl.Mode.TRAIN):
        example = super()._generate_and_compute_advantage(training_input, mode)
        order, width = self.rl_cluster.rollout.order, example.completion_ids.shape[1]
        order.example = example
        told = {
            name: jnp.asarray([np.pad(np.float32(row[key]), (0, width - len(row[key]))) for row in order.rows])
            for key, name in GIVEN.items()
            if key in order.rows[0]
        }
        if "advantage" in order.rows[0]:
            told["advantages"] = jnp.asarray([row["advantage"] for row in order.rows], jnp.float32)
        return example.replace(**told)


class _Run:
    """A policy with its cluster and its learner, whose `train` waits in a thread for the rows of each step."""

    def __init__(self, folder, settings, checkpoint=None, functions=None):
        _refuse(settings)
        self.folder, self.settings, self.orders, self.told = folder, settings, queue.Queue(), queue.Queue()
        self.shapes = {name: w.shape for name, w in load_file(Path(folder) / "model.safetensors").items()}
        self.checkpoints = checkpoint or tempfile.mkdtemp()
        devices = jax.devices()[: settings["devices"]]
        mesh = jax.make_mesh((len(devices), 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=devices)
        reference, actor = (_model(folder, mesh, settings["dtype"], settings["as_released"]) for _ in range(2))
        self.cluster = rl.RLCluster(
            actor=_with_lora(actor, settings, mesh) if settings["lora_rank"] else actor,
            reference=reference,
            tokenizer=AutoTokenizer.from_pretrained(folder),
            cluster_config=_cluster(settings, mesh, self.checkpoints),
        )
        rewards = [lambda n=n, **_: self.cluster.rollout.order.rewards[:, n] for n in range(functions or 1)]
        for n, reward in enumerate(rewards):
            reward.__name__ = f"reward_{n}"
        learner = _Learner(rl_cluster=self.cluster, reward_fns=rewards, algo_config=_algorithm(settings))
        threading.Thread(target=self._train, args=(learner,), daemon=True).start()

    def step(self, rows, update=False, rewards=None):
        """Let the learner do a step of its training; return the order, with what was computed."""
        rewards = np.zeros((len(rows), 1)) if rewards is None else rewards
        self.orders.put(SimpleNamespace(rows=rows, update=update, rewards=rewards))
        if isinstance(told := self.told.get(), Exception):
            raise told
        return told

    def _train(self, learner):
        try:
            learner.train(self._prompts())
        except Exception as error:
            self.told.put(error)

    def _prompts(self):
        """The prompts of each step, when its rows are there; a step is over when the next one is asked for."""
        trainer, rollout = self.cluster.actor_trainer, self.cluster.rollout
        prompts = {"prompts": np.array([str(n) for n in range(self.settings["prompts"])])}
        for _ in range(trainer.train_steps):
            yield dict(prompts)  # a restored learner passes over those of earlier steps
        while True:
            rollout.order = order = self.orders.get()
            before = jax.tree.map(jnp.copy, (nnx.state(trainer.model), nnx.state(trainer.optimizer)))
            yield dict(prompts)
            rollout.order, state = None, trainer.optimizer.opt_state
            # With accumulation the state is that of optax.MultiSteps.
            order.gradient = self.named(getattr(state, "inner_opt_state", state)[0]["gradient"])
            if not order.update:
                nnx.update(trainer.model, before[0])
                nnx.update(trainer.optimizer, before[1])
            self.told.put(order)

    def named(self, state):
        """Arrays of the model's `state` by their names in a Hugging Face checkpoint."""
        if self.settings["lora_rank"]:
            return {}
        flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
        rules = params._get_key_and_transform_mapping(self.cluster.actor_trainer.model.config)
        named = {}
        for name, shape in self.shapes.items():
            rule, (path, transform) = next(r for r in rules.items() if re.fullmatch(r[0], name))
            array = np.asarray(flat[re.sub(rule, path, name)][...], np.float32)
            named[name] = array.reshape(shape[::-1]).T if transform else array
        return named


def _refuse(settings):
    if settings["micro_batch"] % settings["samples"]:
        raise NotImplementedError("its micro-batches are whole groups of samples")
    if settings["samples"] < 2:
        raise NotImplementedError("it refuses groups of one: num_generations is at least 2")
    if settings["reward_weights"]:
        raise NotImplementedError("it adds up rewards with equal weights")
    if settings["processes"] > 1:
        raise NotImplementedError("this adapter has one process")
    if settings["mask_truncated"]:
        raise NotImplementedError("GRPOLearner has no such setting")


def _model(folder, mesh, dtype, as_released):
    """Its Llama, with the weights of the folder."""
    config = json.loads((Path(folder) / "config.json").read_text())
    llama.apply_rope.__defaults__ = (1_000_000 if as_released else config["rope_theta"],)
    shape = llama.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    return params.create_model_from_safe_tensors(str(folder), shape, mesh, jnp.dtype(dtype))


def _with_lora(base, settings, mesh):
    provider = qwix.LoraProvider(module_path=LINEAR, rank=settings["lora_rank"], alpha=settings["lora_alpha"])
    with mesh:
        return qwix.apply_lora_to_model(base, provider, **base.get_model_input(), rngs=nnx.Rngs(settings["seed"]))


def _cluster(settings, mesh, checkpoints):
    prompts, longest = settings["prompts"], LONGEST_PROMPT + settings["pad_prompt"]
    tokens = settings["max_tokens"] + settings["pad_completion"]
    training = rl.RLTrainingConfig(
        actor_optimizer=_optimizer(settings),
        eval_every_n_steps=10**6,
        max_steps=10**6,
        mini_batch_size=prompts,
        train_micro_batch_size=settings["micro_batch"] // settings["samples"],
        compute_logps_micro_batch_size=prompts,
        rollout_micro_batch_size=prompts,
        max_seq_token_per_tpu=128 if settings["packing"] else None,
        checkpoint_root_directory=checkpoints,
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=10**6),
    )
    rollout = RolloutConfig(
        max_tokens_to_generate=tokens,
        max_prompt_length=longest,
        kv_cache_size=longest + tokens,
        temperature=settings["temperature"],
        top_p=settings["top_p"],
        top_k=None,
        return_logprobs=True,
    )
    return rl.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl.Role.ACTOR, rl.Role.REFERENCE, rl.Role.ROLLOUT), mesh),
        rollout_engine=_Rollout,
        training_config=training,
        rollout_config=rollout,
    )


def _optimizer(settings):
    """AdamW of optax, as a user of Tunix makes it: warm-up, clipping and which weights decay are the user's."""
    rate, warmup = settings["learning_rate"], settings["warmup_steps"]
    if settings["iterations"] > 1:
        rate = 0.0  # the gradient is that of the last update, whose weights are then those of the first
    schedule = optax.linear_schedule(rate / (warmup + 1), rate, warmup) if warmup else rate
    clip = optax.clip_by_global_norm(settings["max_grad_norm"]) if settings["max_grad_norm"] else optax.identity()
    decays = lambda weights: jax.tree.map(lambda w: w.ndim > 1, weights)  # noqa: E731
    adamw = optax.adamw(
        schedule, settings["b1"], settings["b2"], settings["eps"], weight_decay=settings["weight_decay"], mask=decays
    )
    return optax.chain(_record(), clip, adamw)


def _record():
    """An optimizer's part that keeps the gradient in its state and passes it on."""
    return optax.GradientTransformation(
        lambda weights: {"gradient": jax.tree.map(jnp.zeros_like, weights)},
        lambda gradient, state, weights=None: (gradient, {"gradient": gradient}),
    )


def _algorithm(settings):
    names = {"num_generations": "samples", "num_iterations": "iterations", "epsilon": "epsilon"}
    common = {name: settings[ours] for name, ours in names.items()}
    kl = {"beta": settings["beta"], "kl_loss_mode": KLS[settings["kl"]]}
    if settings["algorithm"] == "dapo":
        if settings["beta"]:
            raise NotImplementedError("DAPOConfig has no KL term")
        return DAPOConfig(epsilon_high=settings["epsilon_high"], overlong_buffer=None, **common)
    if settings["algorithm"] == "dr_grpo" or settings["advantage"] == "centred":
        return DrGRPOConfig(**common, **kl)
    config = GRPOConfig(loss_algo="gspo-token" if settings["algorithm"] == "gspo" else "grpo", **common, **kl)
    config.epsilon_high = settings["epsilon_high"]
    return config


def load(folder, settings):
    return _Run(folder, settings)


def gradient(run, rows):
    return run.step(rows).gradient


def step(run, rows):
    run.step(rows, update=True)
    if run.settings["lora_rank"]:
        with tempfile.TemporaryDirectory() as folder:
            export(run, folder)
            return load_file(Path(folder) / "model.safetensors")
    return run.named(nnx.state(run.cluster.actor_trainer.model, nnx.Param))


def logps(run, rows):
    rollout, width = run.cluster.rollout, run.settings["max_tokens"] + run.settings["pad_completion"]
    rollout.order = SimpleNamespace(rows=rows)
    given = rollout.generate([], run.cluster.cluster_config.rollout_config)
    rollout.order = None
    ids = np.stack([np.pad(x, (0, width - len(x)), constant_values=rollout.pad_id()) for x in given.tokens])
    prompts, model = jnp.asarray(given.left_padded_prompt_tokens), run.cluster.actor_trainer.model
    found = compute_per_token_logps(  # as the loss calls it
        *nnx.split(model), prompts, jnp.asarray(ids), rollout.pad_id(), rollout.eos_id(),
        temperature=run.settings["temperature"],
    )  # fmt: skip
    return [np.asarray(x)[: len(row["completion"])] for x, row in zip(found, rows, strict=True)]


def sample(run, prompts, count):
    rollout, most = run.cluster.rollout, run.settings["max_tokens"]
    drawn = run.cluster.generate([text for text in prompts for _ in range(count)])
    rows = []
    for prompt, ids, of_ids in zip(drawn.left_padded_prompt_tokens, drawn.tokens, drawn.logprobs, strict=True):
        finished = len(ids) < most  # the stop token was drawn, and is cut off
        row = {"prompt": prompt[prompt != rollout.pad_id()].tolist(), "completion": ids.tolist(), "finished": finished}
        rows.append(row | {"sampled": ids.tolist() + [rollout.eos_id()] * finished, "logps": np.array(of_ids)})
    return rows


def advantages(run, rewards):
    prompts, samples, functions = rewards.shape
    other = _Run(run.folder, {**run.settings, "prompts": prompts}, functions=functions)
    rows = [{"prompt": [5], "completion": [5, 2]}] * prompts * samples
    order = other.step(rows, rewards=rewards.reshape(-1, functions))
    return np.asarray(order.example.advantages).reshape(prompts, samples)


def save(run, folder):
    trainer = run.cluster.actor_trainer
    trainer._save_last_checkpoint()
    trainer.checkpoint_manager._checkpoint_manager.wait_until_finished()
    shutil.copytree(run.checkpoints, folder)


def restore(folder, settings):
    return _Run(settings["model"], settings, checkpoint=folder)


def export(run, folder):
    if not run.settings["lora_rank"]:
        raise NotImplementedError("it writes Hugging Face folders of models with LoRA alone")
    rules = dict.fromkeys(LINEAR[3:-1].split("|"), (1, 0))
    save_lora_merged_model_as_safetensors(
        run.folder, folder, run.cluster.actor_trainer.model, run.settings["lora_rank"], run.settings["lora_alpha"],
        lambda path: f"model.{path}.weight".replace(".attn.", ".self_attn."), transpose_rules=rules,
    )  # fmt: skip
