"""Names of verl's settings and their equivalents in Covey; `foreign_names` describes the form of an entry.

verl names a setting by a long path, and the end of the path alone may mean several things. A name is looked up by the
longest end of its path that is in the table: `actor_rollout_ref.rollout.n` is found as `rollout.n`.
"""

OPTIMIZER = "{{training.actor_optimizer.{0}|training.optimizer.{0}}}".format
BATCH = "{training.prompts_per_step|training.batch_size}"
MICRO = "{training.train_micro_batch_size|training.max_tokens_per_micro_batch}"
LOGPS = "{training.ref_logps_micro_batch_size} and {training.old_logps_micro_batch_size}"
NO_ENGINE = "leave it out: the sampler is built in and runs in the same process"
NO_TURNS = "leave it out: a recipe names its tool in {rollout.tool}"
NO_TORCH = "leave it out: XLA compiles and fuses every program"
MESH = "{model.mesh.fsdp}, {model.mesh.tp} and {model.mesh.data}: numbers of devices"

VERL = {
    # sections of a whole file
    "actor_rollout_ref": f"{{model.source}} for model, {{rollout.temperature}} and its neighbours for rollout, "
    f"{{grpo.algorithm}} and {OPTIMIZER('learning_rate')} for actor",
    "trainer": "{training.num_epochs}, {training.checkpoint_every_n_steps}, {training.eval_every_n_steps}, {tracking} "
    "and {out}",
    "custom_reward_function": "{rewards} module:function",
    "global_profiler": "leave it out: metrics.jsonl has the seconds of each phase",
    "ray_init": "leave it out: a run needs no Ray",
    # data
    "train_files": "{data.path}",
    "val_files": "{data.test_path}",
    "prompt_key": "{data.prompt_column}",
    "response_key": "{data.completion_column}",
    "val_batch_size": "{evaluation.prompts}, all at once",
    "reward_fn_key": "leave it out: a reward function takes any column of the data as an argument of its name",
    "filter_overlong_prompts": "{training.too_long} drop",
    "truncation": "{training.too_long} error, drop or truncate",
    "data.tokenizer": "leave it out: the tokenizer is the model's",
    "data.shuffle": "leave it out: training data are always shuffled",
    "return_raw_chat": "leave it out: reward functions get the prompt as the data have it",
    "return_raw_input_ids": "leave it out: a reward function that takes prompt_ids gets them",
    "apply_chat_template_kwargs": "leave it out: the model's chat template is applied without variables",
    "custom_chat_template": "leave it out: the chat template is the model's",
    # model
    "model.path": "{model.source}",
    "tokenizer_path": "leave it out: the tokenizer is the model's",
    "hf_config_path": "leave it out: the config is the model's",
    "override_config": "leave it out: the config is the model's",
    "enable_gradient_checkpointing": "{model.remat}",
    "enable_activation_offload": "leave it out: activations are computed again ({model.remat})",
    "use_remove_padding": "leave it out: rows are packed, and padding is not computed",
    "use_fused_kernels": NO_TORCH,
    "use_liger": NO_TORCH,
    "use_torch_compile": NO_TORCH,
    "model_dtype": "{model.dtype}",
    # actor
    "ppo_mini_batch_size": f"{BATCH}: every update is made on a whole step; {{grpo.num_iterations}} repeats it",
    "ppo_micro_batch_size": MICRO,
    "ppo_micro_batch_size_per_gpu": MICRO,
    "ppo_max_token_len_per_gpu": "{training.max_tokens_per_micro_batch}",
    "use_dynamic_bsz": "leave it out: micro-batches are always cut by {training.max_tokens_per_micro_batch}",
    "use_kl_loss": "{grpo.beta} above 0",
    "kl_loss_coef": "{grpo.beta}",
    "kl_loss_type": "{grpo.kl}: k1 is kl, k2 is mse, k3 is low_var_kl",
    "clip_ratio_c": "{grpo.dual_clip}, with {grpo.surrogate} dual_clip",
    "tis_imp_ratio_cap": "{grpo.correction_cap}, with {grpo.correction} token_truncate",
    "loss_mode": "{grpo.algorithm} (grpo, gspo, cispo, ...)",
    "policy_loss": "{grpo.algorithm}, or its part {grpo.surrogate}",
    "freeze_vision_tower": "leave it out: models of text alone are trained",
    "optim.betas": f"{OPTIMIZER('b1')} and {OPTIMIZER('b2')}",
    "clip_grad": OPTIMIZER("max_grad_norm"),
    "lr_warmup_steps_ratio": OPTIMIZER("warmup_ratio"),
    "lr_warmup_steps": f"{OPTIMIZER('warmup_ratio')}, a share of the steps",
    "warmup_style": OPTIMIZER("schedule"),
    "min_lr_ratio": f"leave it out: {OPTIMIZER('schedule')} cosine and linear end at 0",
    "num_cycles": f"leave it out: {OPTIMIZER('schedule')} cosine falls once",
    "fsdp_config": MESH,
    "fsdp_size": "{model.mesh.fsdp}",
    "param_offload": "leave it out: this is not offered; {model.quantize} stores the base in fewer bits",
    "optimizer_offload": "leave it out: this is not offered; adapters ({model.lora.rank}) need little optimizer state",
    "ulysses_sequence_parallel_size": "leave it out: sequences are not split; {model.mesh.tp} splits the model",
    "strategy": MESH,
    "critic.optim.lr": "{training.critic_optimizer.learning_rate}",
    "critic.model.path": "{critic}",
    "reward_model.model.path": "{reward_model}",
    # rollout
    "rollout.n": "{grpo.num_generations}",
    "val_kwargs.n": "{evaluation.samples}",
    "n": "{grpo.num_generations}",
    "val_kwargs": "{evaluation.temperature}, {evaluation.top_p} and {evaluation.samples}",
    "rollout.name": NO_ENGINE,
    "rollout.mode": NO_ENGINE,
    "rollout.temperature": "{rollout.temperature}",
    "rollout.top_p": "{rollout.top_p}",
    "rollout.top_k": "{rollout.top_k}, where 0 is off",
    "prompt_length": "{rollout.max_prompt_length}",
    "response_length": "{rollout.max_new_tokens}",
    "do_sample": "leave it out: a {rollout.temperature} above 0 samples",
    "max_num_seqs": "{rollout.slots}",
    "max_model_len": "{rollout.kv_cache_size}",
    "tensor_model_parallel_size": "{model.mesh.tp}",
    "log_prob_micro_batch_size": LOGPS,
    "log_prob_micro_batch_size_per_gpu": LOGPS,
    "log_prob_max_token_len_per_gpu": "{training.max_tokens_per_micro_batch}",
    "multi_turn": NO_TURNS,
    "tool_config_path": NO_TURNS,
    **dict.fromkeys(
        (
            "gpu_memory_utilization", "enforce_eager", "free_cache_engine", "max_num_batched_tokens", "load_format",
            "enable_chunked_prefill", "enable_prefix_caching", "engine_kwargs", "disable_log_stats", "ignore_eos",
        ),
        NO_ENGINE,
    ),
    # algorithm
    "norm_adv_by_std_in_grpo": "{grpo.advantage}: group_zscore, or centred for no division",
    "use_kl_in_reward": "{grpo.kl_in} reward",
    "kl_penalty": "{grpo.kl}",
    "kl_ctrl": "{grpo.beta}, and {grpo.kl_target} to adapt it",
    "target_kl": "{grpo.kl_target}",
    "horizon": "{grpo.kl_horizon}",
    "filter_groups": "{grpo.max_sampling_rounds} above 1",
    "max_num_gen_batches": "{grpo.max_sampling_rounds}",
    "penalty_factor": "{grpo.overlong_penalty}",
    "reward_manager": "{rewards}",
    "compute_score": "{rewards} module:function",
    # trainer
    "total_training_steps": "{training.max_steps}",
    "total_epoches": "{training.num_epochs}",
    "project_name": "leave it out: trackers are named in {tracking}",
    "experiment_name": "{name}",
    "logger": "{tracking}",
    "log_val_generations": "leave it out: before.jsonl and after.jsonl have every held-out completion",
    "rollout_data_dir": "leave it out: samples.jsonl has every completion",
    "validation_data_dir": "leave it out: before.jsonl and after.jsonl have every held-out completion",
    "nnodes": "leave it out: each host starts the same command",
    "n_gpus_per_node": MESH,
    "save_freq": "{training.checkpoint_every_n_steps}",
    "test_freq": "{training.eval_every_n_steps}",
    "val_before_train": "leave it out: a run is always evaluated before and after",
    "val_only": "leave it out: covey eval RUN evaluates",
    "resume_mode": "leave it out: covey train --resume RUN goes on with a run",
    "resume_from_path": "leave it out: covey train --resume RUN goes on with a run",
    "default_local_dir": "{out}",
    "max_actor_ckpt_to_keep": "{training.max_to_keep}",
    "critic_warmup": "leave it out: critic and actor are trained from the first step",
    "balance_batch": "leave it out: rows are packed and shared out by length",
}  # fmt: skip
"""Equivalents in Covey, by the end of the path of verl's name."""
