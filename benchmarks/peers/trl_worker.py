"""Worker of TRL: its GRPOTrainer with `generate` of transformers, since its faster engine (vLLM) wants an accelerator.

Activations are kept (its default recomputes them, which is slower), and everything is in float32 (its default is
bfloat16). It pads a step to the longest prompt and completion that it has.
"""

import os
from itertools import islice
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.work import STEPS_OF_DATA, Work, even_words
from benchmarks.peers.worker import Steps


class _Trainer(GRPOTrainer):
    """The trainer with a clock at its phases."""

    steps: Steps

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.steps.phase("rollout"):
            return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        compute = super()._get_per_token_logps_and_entropies
        if torch.is_grad_enabled():
            return compute(*args, **kwargs)
        with self.steps.phase("logps"):
            return compute(*args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        out = super()._generate_and_score_completions(*args, **kwargs)
        self.steps.lengths = out["completion_mask"].sum(dim=1).tolist()
        return out


class _Turns(TrainerCallback):
    def __init__(self, steps: Steps):
        self.steps = steps

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.turn()


def main() -> None:
    """Set up, and train until the driver ends the process."""
    _Trainer.steps = steps = Steps()
    work = steps.work
    rows = [text for batch in islice(work.batches(), STEPS_OF_DATA) for text in batch]
    trainer = _Trainer(
        model=steps.folder,
        reward_funcs=even_words,
        args=_settings(work, f"{steps.folder}/trl", steps.options),
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=AutoTokenizer.from_pretrained(steps.folder),
        peft_config=_lora(work),
        callbacks=[_Turns(steps)],
    )
    sizes = [(p.numel(), p.requires_grad) for p in trainer.model.parameters()]
    trainable = sum(size for size, trained in sizes if trained)
    steps.ready(sum(size for size, _ in sizes), trainable, ("trl", "torch", "transformers", "peft"))
    steps.turn()
    trainer.train()


def _lora(work: Work) -> LoraConfig | None:
    if not work.lora_rank:
        return None
    return LoraConfig(r=work.lora_rank, lora_alpha=work.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")


def _settings(work: Work, folder: str, options: dict[str, Any]) -> GRPOConfig:
    together, batch = work.micro_prompts * work.samples, work.prompts * work.samples
    given = {
        "output_dir": folder,
        "loss_type": "grpo",
        "beta": work.beta,
        "epsilon": work.epsilon,
        "num_generations": work.samples,
        "per_device_train_batch_size": together,
        "gradient_accumulation_steps": batch // together,
        "max_completion_length": work.max_new_tokens,
        "temperature": work.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "learning_rate": work.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": work.b1,
        "adam_beta2": work.b2,
        "weight_decay": work.weight_decay,
        "max_grad_norm": work.max_grad_norm,
        "max_steps": work.steps,
        "gradient_checkpointing": False,
        "use_vllm": False,
        "bf16": False,
        "use_cpu": True,
        "shuffle_dataset": False,
        "model_init_kwargs": {"dtype": "float32"},
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    return GRPOConfig(**{**given, **options})


if __name__ == "__main__":
    main()
