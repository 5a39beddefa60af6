"""TRL: its GRPOTrainer on the CPU, in one `train` that waits for the rows of each step.

Completions are given where the trainer would draw them (`_generate`), and what a row says of them (advantage, old and
reference log-probs) replaces what the trainer computed of it. All else is its own: padding, log-probs, loss, the
accumulation of micro-batches, clipping, optimizer, schedule, checkpoint.
"""

import copy
import os
import queue
import shutil
import tempfile
import threading
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

VERSION = trl.__version__
SETTINGS = {
    "": "transformers' generate; use_cpu=True, bf16=False, use_bias_correction_kl=False",
    "gradient": "per_device_train_batch_size=8, gradient_accumulation_steps=1",
    "gradient/dr_grpo": "loss_type='dr_grpo'",
    "gradient/dapo": "loss_type='dapo', epsilon_high=0.28",
    "gradient/gspo": "loss_type='grpo', importance_sampling_level='sequence'",
    "invariance": "per_device_train_batch_size of 8, 4, 2 with gradient_accumulation_steps of 1, 2, 4",
    "invariance/padding-before": "pad_to_multiple_of=16",
    "invariance/padding-behind": "pad_to_multiple_of=16",
    "mask/tool": "tool_mask, as its tool loop or a rollout_func gives it",
    "mask/cut-left-out": "mask_truncated_completions=True",
    "sampler/stored-ratio": "num_iterations=2",
    "advantage/centred": "scale_rewards='none'",
    "optimizer/warm-up": "lr_scheduler_type='constant_with_warmup'",
    "optimizer/bf16": "model in float32 (model_init_kwargs), bf16=True: autocast; weights rounded to bfloat16",
    "resume/steps": "its checkpoint and resume_from_checkpoint",
    "resume/merge": "PEFT, target_modules='all-linear'; merge_and_unload",
}
NO_LOGPS = "it keeps log-probs of its sampler with vLLM alone, which this CPU environment lacks"
NO_TURNS = "its turns are calls of tools, which the tiny model does not write; others are a rollout_func of the user's"
REASONS = {
    "gradient/grpo-k1": "a choice of design: k3 alone",
    "gradient/grpo-k2": "a choice of design: k3 alone",
    "sampler/logps": NO_LOGPS,
    "sampler/mean-ratio": NO_LOGPS,
    "sampler/fresh": NO_LOGPS,
    "sampler/agreement": "its sampler draws from torch's generator, with no noise of a token's own",
    "turns": NO_TURNS,
    "optimizer/warm-up": (
        "a choice of design of transformers: its schedules begin at lr·0/warmup_steps, so the first step has lr 0 "
        "(transformers/optimization.py, _get_constant_schedule_with_warmup_lr_lambda)"
    ),
}
LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
FIXED = {
    "report_to": "none",
    "use_cpu": True,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "constant_with_warmup",
    "max_steps": 1000,
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "shuffle_dataset": False,
    "use_bias_correction_kl": False,
    "top_k": 0,
}


class _Given(GRPOTrainer):
    """GRPOTrainer whose completions are given: `orders` holds a step's rows. `told` gets what the step computed, and
    None where the trainer asks for rows.
    """

    def _generate(self, prompts):
        self.told.put(None)
        self.order = self.orders.get()
        rows = self.order.rows
        self.seen = SimpleNamespace(gradient=None, logps=[None] * len(rows))
        masks = [[int(kept) for kept in row["mask"]] for row in rows] if "mask" in rows[0] else None
        ids = [[[int(token) for token in row[name]] for row in rows] for name in ("prompt", "completion")]
        return *ids, masks, [""] * len(rows), None, {}, None, []

    def _generate_and_score_completions(self, inputs):
        batch, rows = super()._generate_and_score_completions(inputs), self.order.rows
        self.seen.advantages = batch["advantages"].numpy().copy()
        if "advantage" in rows[0]:
            batch["advantages"] = torch.tensor([float(row["advantage"]) for row in rows])
        for key, name in (("old_logps", "old_per_token_logps"), ("ref_logps", "ref_per_token_logps")):
            if key in rows[0]:
                values = [torch.tensor(np.float32(row[key])) for row in rows]
                batch[name] = pad(values, padding_value=0.0, pad_to_multiple_of=self.pad_to_multiple_of)
        return batch | {"number": torch.arange(len(rows))}

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.scored = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.scored

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        for number, logps in zip(inputs["number"].tolist(), self.scored[0].detach().numpy(), strict=True):
            self.seen.logps[number] = logps[: len(self.order.rows[number]["completion"])]
        return loss


class _Steps(TrainerCallback):
    """Keeps the gradient before the optimizer's step, which it takes away where only the gradient is wanted."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        parameters, seen = self.trainer.model.named_parameters(), self.trainer.seen
        if seen.gradient is None:  # of the first update on the rows
            seen.gradient = {n: p.grad.numpy().copy() for n, p in parameters if p.grad is not None}
        if not self.trainer.order.update:
            self.trainer.model.zero_grad()  # the optimizer passes over parameters without a gradient

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.told.put(self.trainer.seen)


class _Run:
    """A trainer of TRL in its `train`, in a thread."""

    def __init__(self, folder, settings, checkpoint=None, functions=None):
        _refuse(settings)
        self.folder, self.settings, self.output = folder, settings, tempfile.TemporaryDirectory()
        rank, rows = settings["lora_rank"], settings["samples"] * settings["prompts"]
        lora = LoraConfig(r=rank, lora_alpha=settings["lora_alpha"], target_modules="all-linear", task_type="CAUSAL_LM")
        functions = functions or len(settings["reward_weights"] or [1.0])
        self.trainer = trainer = _Given(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=[lambda n=n, **_: trainer.order.rewards[:, n].tolist() for n in range(functions)],
            args=GRPOConfig(output_dir=self.output.name, **FIXED, **_arguments(rows, settings)),
            train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(rows)]}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=lora if rank else None,
        )
        trainer.orders, trainer.told = queue.Queue(), queue.Queue()
        trainer.add_callback(_Steps(trainer))
        threading.Thread(target=self._train, args=(checkpoint,), daemon=True).start()
        self._hear()

    def _train(self, checkpoint):
        try:
            self.trainer.train(resume_from_checkpoint=checkpoint)
        except Exception as error:
            self.trainer.told.put(error)

    def step(self, rows, update=False, rewards=None):
        """Let the trainer do a step of its training; return what it computed."""
        rewards = np.zeros((len(rows), len(self.trainer.reward_funcs))) if rewards is None else rewards
        torch.set_rng_state(self.noise)
        self.trainer.orders.put(SimpleNamespace(rows=rows, update=update, rewards=rewards))
        updates = [self._hear() for _ in range(self.settings["iterations"])]
        self._hear()
        return updates[0]

    def _hear(self):
        """Wait for what the trainer tells; between two steps its random state is kept, as in a process of its own."""
        if isinstance(told := self.trainer.told.get(), Exception):
            raise told
        self.noise = torch.get_rng_state()
        return told


def _refuse(settings):
    if settings["beta"] and settings["kl"] != "k3":
        raise NotImplementedError("its estimator of the KL is k3")
    if settings["samples"] < 2:
        raise NotImplementedError("it refuses groups of one: num_generations is at least 2")
    if settings["packing"]:
        raise NotImplementedError("GRPOTrainer does not pack")
    if settings["devices"] > 1 or settings["processes"] > 1:
        raise NotImplementedError("it has one process for each device, and this adapter one process")


def _arguments(rows, s):
    """TRL's names of the settings."""
    scale = {"group_zscore": "group", "centred": "none"}[s["advantage"]]
    return {
        "scale_rewards": scale,
        **LOSSES[s["algorithm"]],
        "bf16": s["dtype"] == "bfloat16",
        "per_device_train_batch_size": s["micro_batch"],
        "gradient_accumulation_steps": rows // s["micro_batch"],
        "num_generations": s["samples"],
        "num_iterations": s["iterations"],
        "epsilon": s["epsilon"],
        "epsilon_high": s["epsilon_high"],
        "beta": s["beta"],
        "max_completion_length": s["max_tokens"],
        "pad_to_multiple_of": 16 if s["pad_prompt"] or s["pad_completion"] else None,
        "temperature": s["temperature"],
        "top_p": s["top_p"],
        "mask_truncated_completions": s["mask_truncated"],
        "learning_rate": s["learning_rate"],
        "max_grad_norm": s["max_grad_norm"],
        "weight_decay": s["weight_decay"],
        "warmup_steps": s["warmup_steps"],
        "adam_beta1": s["b1"],
        "adam_beta2": s["b2"],
        "adam_epsilon": s["eps"],
        "reward_weights": s["reward_weights"],
        "seed": s["seed"],
    }


def load(folder, settings):
    return _Run(folder, settings)


def logps(run, rows):
    size = run.settings["samples"] * run.settings["prompts"]
    parts = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [x for part in parts for x in run.step(part + part[:1] * (size - len(part))).logps[: len(part)]]


def gradient(run, rows):
    return run.step(rows).gradient


def step(run, rows):
    run.step(rows, update=True)
    model = run.trainer.model
    if run.settings["lora_rank"]:
        model = copy.deepcopy(model).merge_and_unload()
    dtype = getattr(torch, run.settings["dtype"])
    return {name: p.detach().to(dtype).float().numpy().copy() for name, p in model.named_parameters()}


def sample(run, prompts, count):
    ids = [list(p) for p in run.trainer._tokenize_prompts(list(prompts))[0] for _ in range(count)]
    drawn, _ = run.trainer._generate_single_turn(ids, None, {}, count)
    stops = run.trainer.eos_token_ids
    return [
        {"prompt": p, "sampled": c, "completion": c, "finished": c[-1] in stops}
        for p, c in zip(ids, drawn, strict=True)
    ]


def advantages(run, rewards):
    prompts, samples, functions = rewards.shape
    row = {"prompt": [5], "completion": [5, 2], "finished": True}
    other = _Run(run.folder, run.settings, functions=functions)
    seen = other.step([row] * prompts * samples, rewards=rewards.reshape(-1, functions))
    return seen.advantages.reshape(prompts, samples)


def save(run, folder):
    torch.set_rng_state(run.noise)
    run.trainer._save_checkpoint(run.trainer.model, None)
    shutil.copytree(f"{run.output.name}/checkpoint-{run.trainer.state.global_step}", folder)


def restore(folder, settings):
    return _Run(settings["model"], settings, checkpoint=folder)


def export(run, folder):
    model = run.trainer.model
    (copy.deepcopy(model).merge_and_unload() if run.settings["lora_rank"] else model).save_pretrained(folder)
