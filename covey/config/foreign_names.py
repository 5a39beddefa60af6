"""Names of settings in TRL, transformers, PEFT, Tunix and verl, former names of Covey's own, and their equivalents.

The tables are used for the error about an unknown setting or keyword: in a recipe, on the command line, in Python. Each
of these spells our names in its own way (`Spell`), so the entries below have them in braces:
`{rollout.max_new_tokens}`, or `{training.prompts_per_step|training.batch_size}` for the first that exists there.
"""

import re
from collections.abc import Callable

from covey.config.verl_names import NO_ENGINE as _NO_ENGINE
from covey.config.verl_names import VERL

Spell = Callable[[str], str | None]
"""Function from a setting's dotted name in a recipe to its spelling elsewhere; None if it does not exist there."""


def answer(name: str, spell: Spell) -> str:
    """Return advice for the setting `name` of another library, which may be a dotted path.

    It is "" if the name is not known, or if none of its equivalents exists in that place.
    """
    last = name.rpartition(".")[2]
    ends = [name.split(".", count)[-1] for count in range(name.count(".") + 1)]
    text = next(filter(None, (VERL.get(end) or SETTINGS.get(end) for end in ends)), "")
    text = text or next((text for part, text in PREFIXES.items() if last.startswith(part)), "")
    spelt = {group: next(filter(None, map(spell, group.split("|"))), "") for group in OURS.findall(text)}
    if spelt and not any(spelt.values()):
        return ""
    return advice(OURS.sub(lambda match: spelt[match[1]] or match[1].split("|")[0], text))


def advice(text: str) -> str:
    """Convert an entry of the tables below to a sentence."""
    return text if not text or text.startswith(_NO_USE) else f"write {text}"


OURS = re.compile(r"\{([^{}]+)\}")
"""Pattern of our names in an entry."""

_NO_USE = "leave it out"

_OPTIMIZER = "{{training.actor_optimizer.{0}|training.optimizer.{0}}}".format
_BATCH = "{training.prompts_per_step|training.batch_size}"
_ANSWER = "{rollout.max_new_tokens}"
_MICRO = "{training.train_micro_batch_size|training.max_tokens_per_micro_batch}"
_NO_PADDING = "leave it out: rows are packed, and padding is not computed"
_NO_TORCH = "leave it out: it belongs to PyTorch, and XLA compiles every program"
_NO_HUB = "leave it out: covey push RUN hf:org/name publishes a run"
_NO_LOADER = "leave it out: the data are read once, into memory"
_ONE_LORA = "leave it out: adapters are plain LoRA ({model.lora.rank}, {model.lora.alpha}, {model.lora.targets})"

SETTINGS = {
    # lengths and sampling
    "max_completion_length": _ANSWER,
    "max_tokens_to_generate": _ANSWER,
    "total_generation_steps": _ANSWER,
    "max_generation_steps": _ANSWER,
    "max_response_length": _ANSWER,
    "max_tokens": _ANSWER,
    "max_seq_length": "{training.max_length|rollout.max_prompt_length} and {rollout.max_new_tokens}",
    "repetition_penalty": "leave it out: {rollout.temperature}, {rollout.top_p} and {rollout.top_k} are what there is",
    "generation_kwargs": "{rollout.temperature}, {rollout.top_p} and {rollout.top_k}",
    "num_return_sequences": "{grpo.num_generations}",
    "num_generations_eval": "{evaluation.samples}",
    "eos_tokens": "leave it out: every stop token of the tokenizer ends a completion",
    "use_vllm": _NO_ENGINE,
    "rollout_engine": _NO_ENGINE,
    "rollout_mapping_config": _NO_ENGINE,
    # batches
    "per_device_train_batch_size": f"{_BATCH}: prompts, or examples, of a step over all devices",
    "per_device_eval_batch_size": "{rollout.slots}: completions decoded side by side",
    "per_device_batch_size": f"{_BATCH}: prompts, or examples, of a step over all devices",
    "train_batch_size": _BATCH,
    "batch_size": "{training.prompts_per_step}",
    "mini_batch_size": f"{_BATCH}: every update is made on a whole step",
    "training_micro_batch_size": _MICRO,
    "gradient_accumulation_steps": f"leave it out: it follows from {_BATCH} and {_MICRO}",
    "generation_batch_size": "{training.prompts_per_step}, and {training.rollout_micro_batch_size} of them at a time",
    "steps_per_generation": "{grpo.num_iterations}: updates on a batch of rollouts",
    "compute_logps_micro_batch_size": "{training.ref_logps_micro_batch_size} and {training.old_logps_micro_batch_size}",
    "compute_logps_chunk_size": "leave it out: log-probs are always computed in chunks",
    "tokens_per_micro_batch": "{training.max_tokens_per_micro_batch}",  # Covey's own former names, up to scan_layers
    "rows_per_micro_batch": "{training.max_tokens_per_micro_batch}, in tokens instead of rows",
    "scan_layers": "leave it out: the layers of a model always share one program",
    # steps, saving, logging
    "num_train_epochs": "{training.num_epochs}",
    "total_epochs": "{training.num_epochs}",
    "eval_steps": "{training.eval_every_n_steps}",
    "eval_strategy": "{training.eval_every_n_steps}",
    "save_steps": "{training.checkpoint_every_n_steps}",
    "save_strategy": "{training.checkpoint_every_n_steps}",
    "save_total_limit": "{training.max_to_keep}",
    "load_best_model_at_end": "{training.keep_best}",
    "checkpointing_options": "{training.checkpoint_every_n_steps} and {training.max_to_keep}",
    "checkpoint_root_directory": "{out}",
    "output_dir": "{out}",
    "run_name": "{name}",
    "report_to": "{tracking}",
    "metrics_logging_options": "{tracking}",
    "logging_steps": "leave it out: every step is logged",
    "logging_strategy": "leave it out: every step is logged",
    "log_completions": "leave it out: samples.jsonl has every completion",
    "data_seed": "{data.seed}",
    # optimizer
    "lr": _OPTIMIZER("learning_rate"),
    "lr_scheduler_type": _OPTIMIZER("schedule"),
    "warmup_steps": f"{_OPTIMIZER('warmup_ratio')}, a share of the steps",
    "adam_beta1": _OPTIMIZER("b1"),
    "adam_beta2": _OPTIMIZER("b2"),
    "adam_epsilon": _OPTIMIZER("eps"),
    "optim": _OPTIMIZER("kind"),
    "grad_clip": _OPTIMIZER("max_grad_norm"),
    "gradient_clipping": _OPTIMIZER("max_grad_norm"),
    # algorithm
    "loss_type": "{grpo.algorithm} (grpo, dr_grpo, bnpo, dapo, cispo, sapo, ...), or its part {grpo.aggregate}",
    "loss_algo": "{grpo.algorithm} (grpo, gspo_token)",
    "done_right": "{grpo.algorithm} dr_grpo",
    "policy_loss_fn": "{grpo.surrogate}",
    "scale_rewards": "{grpo.advantage}: group_zscore, batch_std, or centred for no scaling",
    "importance_sampling_level": "{grpo.ratio}: token or sequence",
    "loss_agg_mode": "{grpo.aggregate}",
    "advantage_estimator": "{grpo.advantage}",
    "adv_estimator": "{grpo.advantage}",
    "kl_coef": "{grpo.beta}",
    "kl_penalty_coef": "{grpo.beta}",
    "init_kl_coef": "{grpo.beta}",
    "kl_loss_mode": "{grpo.kl}",
    "kl_method": "{grpo.kl}",
    "kl_estimator": "{grpo.kl}",
    "cliprange": "{grpo.epsilon}",
    "clip_range": "{grpo.epsilon}",
    "clip_ratio": "{grpo.epsilon}",
    "epsilon_low": "{grpo.epsilon}",
    "clip_ratio_low": "{grpo.epsilon}",
    "clip_ratio_high": "{grpo.epsilon_high}",
    "cliprange_value": "{grpo.value_clip}",
    "clip_range_value": "{grpo.value_clip}",
    "lam": "{grpo.gae_lambda}",
    "num_ppo_epochs": "{grpo.num_iterations}",
    "ppo_epochs": "{grpo.num_iterations}",
    "entropy_coef": "{grpo.entropy_bonus}",
    "entropy_coeff": "{grpo.entropy_bonus}",
    "mask_truncated_completions": "{grpo.mask_truncated}",
    "sapo_temperature_pos": "{grpo.sapo_positive}",
    "sapo_temperature_neg": "{grpo.sapo_negative}",
    "sync_ref_model": "{grpo.reference_every_n_updates} above 0",
    "ref_model_sync_steps": "{grpo.reference_every_n_updates}",
    "ref_model_mixup_alpha": "{grpo.reference_mixing}",
    "vllm_importance_sampling_correction": "{grpo.correction}",
    "vllm_importance_sampling_mode": "{grpo.correction}",
    "vllm_importance_sampling_cap": "{grpo.correction_cap}",
    "completion_only_loss": "{training.completion_only}",
    "assistant_only_loss": "{training.completion_only}",
    "use_bias_correction_kl": "leave it out: {grpo.kl} has the estimators k1, k2 and k3",
    "off_policy_mask_threshold": "{grpo.correction} sequence_mask, with {grpo.correction_cap}",
    "multi_objective_aggregation": "{grpo.reward_weights}: rewards are added, and then compared within groups",
    "normalize_advantages": "{grpo.advantage} batch_std",
    "reward_clip_range": "leave it out: clip in the reward function; {grpo.epsilon} clips the ratio",
    "top_entropy_quantile": "leave it out: every token of a completion carries loss; {grpo.entropy_bonus}",
    "entropy_target": "{grpo.entropy_bonus}, which is constant",
    "use_adaptive_entropy": "{grpo.entropy_bonus}, which is constant",
    "epsilon_c": "{grpo.dual_clip}",
    "dynamic_sampling": "{grpo.max_sampling_rounds} above 1",
    "algo_variant": "{grpo.algorithm}",
    "value_loss_fn": "{grpo.value_clip}",
    "reward_manager": "{rewards}",
    "kl_clamp_value": "leave it out: the KL is not clamped",
    "force_compute_kl": "{grpo.beta} above 0",
    "off_policy_steps": "{grpo.num_iterations}",
    "degenerate_group_masking": "leave it out: a group of equal rewards has no gradient; {grpo.max_sampling_rounds}",
    "overlong_filter": "{grpo.mask_truncated}",
    "sampler_is": "{grpo.correction}",
    "sampler_is_threshold": "{grpo.correction_cap}",
    # what PyTorch, transformers and the hub need
    **dict.fromkeys(
        (
            "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "use_cpu",
            "torch_empty_cache_steps", "ddp_backend", "ddp_timeout", "ddp_find_unused_parameters", "local_rank",
            "accelerator_config", "use_cache", "cache_implementation", "ds3_gather_for_generation",
            "cast_lm_head_to_fp32", "use_transformers_paged", "use_transformers_continuous_batching",
        ),
        _NO_TORCH,
    ),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "hub_strategy", "log_completions_hub_repo"),
        _NO_HUB,
    ),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"), _NO_LOADER),
    **dict.fromkeys(("pad_to_multiple_of", "padding_free", "packing_strategy", "group_by_length"), _NO_PADDING),
    **dict.fromkeys(("use_dora", "use_rslora", "init_lora_weights", "modules_to_save", "lora_bias"), _ONE_LORA),
    "bias": "leave it out: adapters have no biases",
    "exclude_modules": "{model.lora.targets}: name the projections that get adapters",
    "fsdp_config": "{model.mesh.fsdp}",
    "parallelism_config": "{model.mesh.fsdp} and {model.mesh.tp}",
    "activation_checkpointing": "{model.remat}",
    "gradient_checkpointing_kwargs": "{model.remat_keeps}",
    "activation_offloading": "leave it out: activations are computed again ({model.remat})",
    "model_init_kwargs": "{model.dtype}, {model.quantize} and {model.compute_dtype}",
    "trust_remote_code": "leave it out: no code of a repository is run",
    "disable_dropout": "leave it out: models have no dropout; {model.lora.dropout} is the adapters'",
    "router_aux_loss_coef": "leave it out: mixtures of experts are not supported",
    "auto_find_batch_size": "leave it out: covey plan RECIPE says what fits; {training.max_tokens_per_micro_batch}",
    "resume_from_checkpoint": "leave it out: covey train --resume RUN goes on with a run",
    "full_determinism": "leave it out: a run with the same {seed} repeats exactly",
    "ignore_data_skip": "leave it out: a resumed run goes on where its data stopped",
    "metric_for_best_model": "{training.keep_best}",
    "greater_is_better": "leave it out: the table of metrics says which is better",
    "save_only_model": "leave it out: a checkpoint is for resuming; covey export RUN writes the model",
    "eval_on_start": "leave it out: a run is always evaluated before and after",
    "do_eval": "{training.eval_every_n_steps}",
    "do_train": "leave it out: covey train trains, covey eval evaluates",
    "logging_dir": "leave it out: metrics.jsonl in {out}",
    "logging_first_step": "leave it out: every step is logged",
    "num_completions_to_print": "leave it out: the best and the worst are printed, and samples.jsonl has all",
    "disable_tqdm": "leave it out: where no terminal is, plain lines are printed",
    "project": "leave it out: trackers are named in {tracking}",
    "include_num_input_tokens_seen": "leave it out: metrics.jsonl has num_tokens of each step",
    "neftune_noise_alpha": "leave it out: embeddings get no noise; {model.lora.dropout}",
    "label_smoothing_factor": "leave it out: the loss is that of the tokens",
    "average_tokens_across_devices": "leave it out: a step has one denominator, whatever the devices",
    "chat_template_path": "leave it out: the chat template is the model's",
    "chat_template_kwargs": "leave it out: the model's chat template is applied without variables",
    "dataset_text_field": "leave it out: plain text is in the column text",
    "dataset_num_proc": _NO_LOADER,
    "truncation_mode": "{training.too_long}",
    "eval_packing": "leave it out: {training.packing} is for both",
    "eos_token": "leave it out: every stop token of the tokenizer ends a completion",
    "pad_token": _NO_PADDING,
    "max_tool_calling_iterations": "{envs.max_turns}, which counts the last turn too",
    "return_logprobs": "leave it out: the sampler always returns them",
    "cache_size": "{rollout.kv_cache_size}",
    "max_concurrency": "{rollout.slots}",
    "system_prompt": "{data.system}",
    "max_seq_token_per_tpu": "{training.max_tokens_per_micro_batch}",
    "profiler_options": "leave it out: metrics.jsonl has the seconds of each phase",
    "max_inflight_computations": "leave it out: {training.queueing} overlaps sampling and updates",
    # model and data
    "model_name": "{model.source}",
    "model_id": "{model.source}",
    "model_name_or_path": "{model.source}",
    "bf16": "{model.compute_dtype} bfloat16, and {model.dtype} for the weights",
    "fp16": "{model.compute_dtype} bfloat16, and {model.dtype} for the weights",
    "torch_dtype": "{model.dtype}",
    "data_type": "{model.dtype}",
    "gradient_checkpointing": "{model.remat}",
    "load_in_4bit": "{model.quantize} nf4",
    "load_in_8bit": "{model.quantize} int8",
    "r": "{model.lora.rank}",
    "lora_r": "{model.lora.rank}",
    "lora_rank": "{model.lora.rank}",
    "lora_alpha": "{model.lora.alpha}",
    "lora_dropout": "{model.lora.dropout}",
    "lora_targets": "{model.lora.targets}",
    "target_modules": "{model.lora.targets}",
    "lora_target_modules": "{model.lora.targets}",
    "module_path": "{model.lora.targets}",
    "peft_config": "{model.lora.rank}, {model.lora.alpha} and {model.lora.targets}",
    "tensor_parallel_size": "{model.mesh.tp}",
    "data_parallel_size": "{model.mesh.data}",
    "data_sharding_axis": "{model.mesh.data} and {model.mesh.fsdp}",
    "deepspeed": "{model.mesh.fsdp}",
    "dataset_name": "{data.path}",
    "remove_unused_columns": "leave it out: every column is kept for the reward functions",
    "shuffle_dataset": "leave it out: training data are always shuffled",
    # reward functions
    "reward_funcs": "{rewards}",
    "reward_fns": "{rewards}",
}  # fmt: skip
"""Equivalents in Covey, by the name in another library; `verl_names` has verl's."""

PREFIXES = {"vllm_": _NO_ENGINE, "rollout_vllm_": _NO_ENGINE, "rollout_sglang_": _NO_ENGINE}
"""Equivalents by name prefix, for names that are not in `SETTINGS`."""

_CONFIGS = "GRPOLearner(grpo_config=GRPOConfig(...)) or PPOLearner(ppo_config=PPOConfig(...))"
_TRAIN = "learner.train(train_ds, eval_ds)"
_OBSERVERS = "observers=[...], each called with the StepRecord of a step"
_LORA = "RLCluster.load(actor=..., lora=LoRAConfig(rank=...)); to a loaded model with_lora(model, LoRAConfig(rank=...))"

ARGUMENTS = {
    "args": f"{_CONFIGS}; RLCluster(cluster_config=ClusterConfig(...)) has training and rollout",
    "algo_config": _CONFIGS,
    "config": f"{_CONFIGS}; SFTLearner(config=SFTConfig(...))",
    "model": "RLCluster(actor=...)",
    "policy": "RLCluster(actor=...)",
    "ref_model": "RLCluster(reference=...)",
    "reference_model": "RLCluster(reference=...)",
    "reward_model": "RLCluster(reward=...)",
    "value_model": "RLCluster(critic=...)",
    "mesh": "RLCluster(cluster_config=ClusterConfig(role_to_mesh={Role.ACTOR: mesh}))",
    "processing_class": "RLCluster(tokenizer=...), or SFTLearner(tokenizer=...)",
    "train_dataset": _TRAIN,
    "eval_dataset": _TRAIN,
    "train_ds": _TRAIN,
    "eval_ds": _TRAIN,
    "callbacks": _OBSERVERS,
    "metric_fns": _OBSERVERS,
    "optimizers": "RLTrainingConfig(actor_optimizer=...): an OptimizerConfig, or an optax transformation",
    "optimizer": "RLTrainingConfig(actor_optimizer=...): an OptimizerConfig, or an optax transformation",
    "peft_config": _LORA,
    "lora_config": _LORA,
    "rewards": "GRPOLearner(reward_fns=...)",
    "reward_fn": "GRPOLearner(reward_fns=...)",
    "reward_funcs": "GRPOLearner(reward_fns=...); reward_funcs is taken there too",
    "reward_fns": "GRPOLearner(reward_fns=...)",
    "data_shuffle_seed": "RolloutConfig(seed=...), which also orders the data",
    "role_to_logical_axis_rule": "leave it out: models bring the rules of their sharding",
    "offload_to_cpu": "leave it out: this is not offered",
    "report_to": "Trackers(names, Tracked(...)), and observers=[...] that hands it the metrics",
    "output_dir": "Checkpointer(folder) in Python; Recipe(out=...) where covey.run trains",
    "checkpoint_root_directory": "Checkpointer(folder) in Python; Recipe(out=...) where covey.run trains",
}
"""Python code by keyword of another library's trainer, cluster or config; takes precedence over `SETTINGS`."""
