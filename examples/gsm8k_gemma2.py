"""Gemma 2 learns to reason on GSM8K in a fixed layout, through LoRA adapters on four devices.

The recipe `gsm8k-gemma2` does the same with one command. This script shows every step, to be read from top to bottom,
as in a notebook, and to be changed.

    python examples/gsm8k_gemma2.py
    python examples/gsm8k_gemma2.py --model hf:Qwen/Qwen2.5-1.5B-Instruct --devices 1 --out runs/qwen

It needs the model (accept its licence on the hub, then `hf auth login`), `pip install -e '.[hub]'`, and four devices.
XLA_FLAGS=--xla_force_host_platform_device_count=4 makes four virtual devices of a CPU, enough for a small model.
"""

import argparse
import logging
from pathlib import Path

import jax
from flax import nnx

from covey import (
    Checkpointer,
    ClusterConfig,
    DataConfig,
    EvalConfig,
    GRPOConfig,
    GRPOLearner,
    LoRAConfig,
    ModelOptions,
    OptimizerConfig,
    RLCluster,
    RLTrainingConfig,
    Role,
    RolloutConfig,
    Tracked,
    Trackers,
    load_data,
    make_mesh,
    open_model,
    with_lora,
    write_peft,
)

# --- Settings. Those that a first try on a small machine changes are flags.

flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
flags.add_argument("--model", default="hf:google/gemma-2-2b-it", help="a Hugging Face folder, or hf:org/name")
flags.add_argument(
    "--data", default="hf:openai/gsm8k", help="a folder (JSONL, or Kaggle's CSV), tfds:gsm8k, or the hub"
)
flags.add_argument("--out", default="runs/gsm8k-gemma2", type=Path, help="the folder for all output")
flags.add_argument("--devices", default=4, type=int)
flags.add_argument("--steps", type=int, help="fewer than the whole epoch")
flags.add_argument("--max-prompt-length", default=256, type=int)
flags.add_argument("--max-new-tokens", default=512, type=int)
flags.add_argument("--test-batches", default=100, type=int, help="batches of the evaluation before and after")
flags.add_argument("--preset", default="greedy", choices=["greedy", "standard", "liberal", "all"])
given = flags.parse_args()

MESH_SHAPE, MESH_AXES = (1, given.devices), ("fsdp", "tp")
DTYPE = "bfloat16"

RANK, ALPHA = 64, 64.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

BATCH, BATCHES, EPOCHS, TRAIN_FRACTION = 2, 3738, 1, 1.0
NUM_ITERATIONS = 1  # μ: updates per batch
MAX_STEPS = given.steps or int(BATCHES * NUM_ITERATIONS * TRAIN_FRACTION * EPOCHS)
EVAL_EVERY, SAVE_EVERY, KEEP = min(10, MAX_STEPS), 500, 4

ROLLOUT = RolloutConfig(
    max_prompt_length=given.max_prompt_length,
    max_new_tokens=given.max_new_tokens,
    temperature=0.9,
    top_p=1.0,
    top_k=50,
)
GRPO = GRPOConfig(num_generations=4, num_iterations=NUM_ITERATIONS, beta=0.08, epsilon=0.2)
OPTIMIZER = OptimizerConfig(
    learning_rate=3e-6,
    b1=0.9,
    b2=0.99,
    weight_decay=0.1,
    warmup_ratio=0.1,  # linear, then a cosine to 0
    schedule="cosine",
    max_grad_norm=0.1,  # keeps the KL small
)
JUDGES = {"accuracy": "answer_number", "partial": "answer_close", "format": "format_exact"}

if (given.out / "policy").exists():
    raise SystemExit(f"{given.out} holds a run already: --out ANOTHER")

# --- The base: each tensor is read directly into its shards on the mesh.

logging.basicConfig(format="%(message)s")
logging.getLogger("covey").setLevel(logging.INFO)
mesh = make_mesh(MESH_SHAPE, MESH_AXES, jax.devices()[: given.devices])
loaded, tokenizer = open_model(given.model, ModelOptions(dtype=DTYPE, compute_dtype=DTYPE), mesh)
graph, weights = nnx.split(loaded)
places = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), weights)

# It is saved once. Reference and policy start from this checkpoint, restored by shapes and shardings.
with Checkpointer(given.out / "base") as base:
    if base.latest() is None:
        base.save(0, weights, {"model": given.model})
        base.wait()
    del loaded, weights  # so that it is never in memory twice
    weights, noted = base.restore(0, target=places)
if noted["model"] != given.model:
    raise SystemExit(f"{given.out / 'base'} is {noted['model']}: --out ANOTHER")

reference = nnx.merge(graph, weights)
held = jax.tree.leaves(weights)
size, share = sum(x.nbytes for x in held), sum(x.addressable_shards[0].data.nbytes for x in held)
print(f"base: {size:,} bytes, {share:,} on each of {given.devices} devices")

# --- The policy: the same arrays with adapters.

policy = with_lora(reference, LoRAConfig(rank=RANK, alpha=ALPHA, targets=TARGETS))

# --- Data: GSM8K's questions, with a system message that asks for <reasoning> and <answer>.

data = load_data(DataConfig(task="gsm8k", path=given.data, train_fraction=TRAIN_FRACTION, seed=42))
fits = lambda row: len(tokenizer.encode_prompt(row["prompt"])) <= given.max_prompt_length  # noqa: E731
train, test = ([row for row in rows if fits(row)] for rows in (data.train, data.test))
print(f"data: {len(train)} questions to train on, {len(test)} to test; {len(data.train) - len(train)} are too long")
print(tokenizer.render(train[0]["prompt"]))

# --- The cluster: the mesh of each role, and the settings of training and rollout.

training = RLTrainingConfig(
    max_steps=MAX_STEPS,
    prompts_per_step=BATCH,
    actor_optimizer=OPTIMIZER,
    eval_every_n_steps=EVAL_EVERY,
    row_length=1024,
    max_tokens_per_micro_batch=2048,
)
where = {Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh}
cluster = RLCluster(
    actor=policy,
    reference=reference,
    tokenizer=tokenizer,
    cluster_config=ClusterConfig(where, training, ROLLOUT),
)

# --- Rewards by name: the layout exactly (3), tag by tag (2), the answer by its distance (3), its number (1.5).
# Your own function, fn(prompts, completions, answer, **columns) -> one float per completion, may be added.

rewards = ["format_exact", "format_approximate", "answer_ratio", "answer_number"]

# --- The learner, with the evaluation during training.

learner = GRPOLearner(
    rl_cluster=cluster,
    reward_fns=rewards,
    grpo_config=GRPO,
    eval_config=EvalConfig(prompts=16, preset="greedy", **JUDGES),
)

# --- Evaluation. Every call draws with the same noise, so before and after differ only by the weights.


def judge(when):
    """Evaluate on held-out questions with the chosen preset or each of the three, and print the accuracies."""
    config = EvalConfig(prompts=given.test_batches * BATCH, preset=given.preset, **JUDGES)
    found = learner.evaluate(test, config=config)
    for name, each in {given.preset: found, **found.others}.items():
        m = each.metrics
        print(
            f"{when}, {'greedy' if name == 'all' else name}: accuracy {m['accuracy']:.1%}  within 10 % "
            f"{m['partial_accuracy']:.1%}  format {m['format_accuracy']:.1%}  reward {m['reward']:.2f}",
            flush=True,
        )
    return found


before = judge("before")

# --- Training. Observers get every step: one saves, one logs to Weights & Biases if that is installed.

checkpoints = Checkpointer(given.out / "policy", max_to_keep=KEEP)
trackers = Trackers(["wandb"], Tracked(given.out, {"grpo": vars(GRPO), "rollout": vars(ROLLOUT)}))


def save(record):
    """Save the adapters and their optimizer; the base has its own checkpoint."""
    if record.due(SAVE_EVERY) or record.step == record.total:
        checkpoints.save(record.step, cluster.state(), {"learner": learner.state()})


learner.observers += [save, lambda record: trackers.log(record.step, record.metrics)]
with checkpoints, trackers:
    learner.train(train, test)

# --- Results: the evaluation after training, a few completions, and the exported adapters.

after = judge("after")
for group in after.groups[:2]:
    print(f"\n> {group.columns['question']}\n{group.completions[0].text}\n(right: {group.columns['answer']})")

apart = write_peft(cluster.actor, tokenizer.vocab_size, given.out / "adapter", base=given.model.removeprefix("hf:"))
print(f"\n{given.out / 'adapter'}: read back, its logits differ by {apart.max_difference:.2g} at most")
