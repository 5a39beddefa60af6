"""`python -m benchmarks.accelerator.trl_step FOLDER`: the step of '2B recipe' by TRL's trainer, as one line of JSON.

Weights are random, in bfloat16, with adapters in float32 as TRL makes them. Attention is torch's own (`sdpa`), without
the soft-cap of Gemma 2. No completion ends early. Without a GPU the shape and the work are tiny.
"""

import contextlib
import json
import statistics
import sys
import time
from typing import Any

import tokenizers
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GPU = torch.cuda.is_available()
PROMPTS, SAMPLES, PROMPT, NEW = (2, 4, 256, 512) if GPU else (2, 2, 16, 16)
VOCABULARY = 256_000 if GPU else 512
RANK = 64 if GPU else 4
STEPS = 3
"""Number of steps; the first is not measured."""
STOP = 1


def model() -> Any:
    """Return Gemma 2 2B, tiny without a GPU, with random weights."""
    large = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 4, "head_dim": 256} if GPU else {"num_key_value_heads": 2, "head_dim": 16}
    config = Gemma2Config(
        vocab_size=VOCABULARY, **(large if GPU else small), **heads, query_pre_attn_scalar=heads["head_dim"],
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=0, eos_token_id=STOP,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):
        dtype = torch.bfloat16 if GPU else torch.float32
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose word for token n is `wn`."""
    words = {"<pad>": 0, "<end>": STOP} | {f"w{n}": n for n in range(2, VOCABULARY)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


def prompts() -> Dataset:
    """Return random prompts, all of the greatest length."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (PROMPTS * (STEPS + 1), PROMPT), generator=draw).tolist()
    return Dataset.from_dict({"prompt": [" ".join(f"w{n}" for n in row) for row in tokens]})


class Timed(GRPOTrainer):
    """TRL's trainer with a clock around its rollout.

    Attributes:
        rollout: seconds of the rollouts since the last step.
    """

    rollout = 0.0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = now()
        out = super()._generate_single_turn(*args, **kwargs)
        self.rollout += now() - start
        return out


class Clock(TrainerCallback):
    """Seconds of each step and of its rollout."""

    def __init__(self) -> None:
        self.steps, self.rollouts, self.began = list[float](), list[float](), 0.0
        self.trainer: Any = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.began, self.trainer.rollout = now(), 0.0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop it."""
        self.steps.append(now() - self.began)
        self.rollouts.append(self.trainer.rollout)


def now() -> float:
    """Return the time at which the device is done."""
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(folder: str) -> dict[str, tuple[float, str]]:
    """Take the steps, and return what they took by name: a number and its unit."""
    settings = GRPOConfig(
        output_dir=folder, loss_type="grpo", beta=0.08, epsilon=0.2, num_generations=SAMPLES, max_steps=STEPS,
        per_device_train_batch_size=PROMPTS * SAMPLES, max_completion_length=NEW, temperature=0.9,
        top_k=50 if GPU else 0, learning_rate=3e-6, lr_scheduler_type="constant", max_grad_norm=0.1, bf16=GPU,
        use_cpu=not GPU, gradient_checkpointing=False, use_vllm=False, report_to="none", save_strategy="no",
        disable_tqdm=True, seed=0, generation_kwargs={"min_new_tokens": NEW},
    )  # fmt: skip
    clock = Clock()
    adapters = LoraConfig(r=RANK, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    clock.trainer = Timed(
        model=model(), args=settings, processing_class=tokenizer(), callbacks=[clock], train_dataset=prompts(),
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions], peft_config=adapters,
    )  # fmt: skip
    clock.trainer.train()
    step, rollout = (statistics.median(seconds[1:]) for seconds in (clock.steps, clock.rollouts))
    found = {"step": (step, "s"), "rollout": (rollout, "s")}
    found["completion tokens a second of the step"] = (PROMPTS * SAMPLES * NEW / step, "")
    found["completion tokens a second of the rollout"] = (PROMPTS * SAMPLES * NEW / rollout, "")
    return found | ({"peak memory": (torch.cuda.max_memory_allocated() / 1e9, "GB")} if GPU else {})


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        measured = measure(sys.argv[1])
    print(json.dumps(measured))
