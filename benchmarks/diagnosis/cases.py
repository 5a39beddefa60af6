"""The runs: causes with three runs each, and sound ones.

A run is the name of a recipe and settings. Each has a seed of its own. The runs of the first half served to
set rules and thresholds, beside the recorded runs of an earlier version; those of the second half judge them.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Case(NamedTuple):
    """One run.

    Attributes:
        name: name of its folder.
        half: "first" or "second"; "third" for the runs of `THIRD`, "table" for those of `TABLE`.
        cause: what is wrong; "" for a sound run.
        rules: names of the rules of which one has to be the first finding; none for a sound run.
        words: recipe and settings.
        seed: seed of the run.
    """

    name: str
    half: str
    cause: str
    rules: tuple[str, ...]
    words: str
    seed: int


class Cause(NamedTuple):
    """Something wrong: the names of the rules of which one has to be the first finding, and the runs."""

    rules: tuple[str, ...]
    runs: tuple[str, ...]


def broken(rules: tuple[str, ...], *runs: str) -> Cause:
    """Return a cause that these rules find in these runs."""
    return Cause(rules, runs)


SUMS_FILES = "arithmetic-tiny data.task=jsonl data.path=FOLDER/sums-train.jsonl data.test_path=FOLDER/sums-test.jsonl"
TRUNCATE = "training.too_long=truncate rollout.max_prompt_length"
ENVS = "envs.on_error=none envs.budget=1000000 envs.rehearsal=false envs.environment"
LENIENT = "reward_safety.budget=1000000 reward_safety.on_error"
HACK = ("possible reward hacking",)
RATE = ("learning rate too high", "KL runaway")
CAUSES = {
    "rate too high": broken(RATE, "reverse LR=6e-2", "arithmetic-tiny LR=5e-2", "guess-tiny LR=3e-2"),
    "rate too high for adapters": broken(
        RATE,
        "reverse RANK=8 LR=2e-1",
        "arithmetic-tiny RANK=1 LR=2e-2",
        "reverse RANK=1 LR=1e-1",
        "reverse RANK=8 LR=1e-2 STEPS=32",
    ),
    "rate too low": broken(
        ("learning rate too low", "learning rate next to 0"),
        "reverse LR=1e-6",
        "reverse LR=1e-8 grpo.algorithm=dr_grpo",
        "reverse RANK=8 LR=1e-7",
    ),
    "rate of 0": broken(
        ("learning rate next to 0",),
        "reverse LR=0 STEPS=8",
        "guess-tiny LR=0 STEPS=4",
        "reverse RANK=4 LR=0 STEPS=8",
    ),
    "beta too large": broken(
        ("beta too large",),
        "reverse grpo.beta=10",
        "reverse grpo.beta=100 grpo.kl=k2",
        "reverse RANK=8 LR=3e-3 grpo.beta=30",
    ),
    "sign flipped": broken(
        HACK,
        "reverse rewards=OWN:wrong",
        "reverse rewards=OWN:wrong RANK=8 LR=3e-3",
        "arithmetic-tiny rewards=OWN:wrong",
    ),
    "random reward": broken(
        ("noisy reward",),
        "reverse rewards=OWN:luck STEPS=12",
        "arithmetic-tiny rewards=OWN:luck STEPS=8",
        "reverse rewards=OWN:noisy RANK=8 STEPS=12",
    ),
    "pays for length": broken(
        HACK,
        "reverse rewards=OWN:length evaluation.accuracy= STEPS=12",
        "quickstart rewards=OWN:length",
        "arithmetic-tiny rewards=OWN:length STEPS=8",
    ),
    "pays for nothing": broken(
        HACK,
        "reverse rewards=OWN:empty RANK=8 LR=3e-3",
        "arithmetic-tiny rewards=OWN:empty",
        "reverse rewards=[arithmetic_answer,OWN:empty] grpo.reward_weights=[1,5]",
    ),
    "pays for a sign": broken(
        HACK,
        "reverse rewards=OWN:mark",
        "reverse rewards=OWN:ones",
        "reverse rewards=OWN:ones RANK=8 LR=3e-3",
    ),
    "constant reward": broken(
        ("constant reward",),
        "reverse rewards=OWN:half STEPS=8",
        "guess-tiny envs.environment=OWN:Constant STEPS=6",
        "reverse rewards=OWN:one grpo.algorithm=rloo STEPS=8",
    ),
    "never reached": broken(
        ("reward never reached",),
        "arithmetic-tiny rewards=OWN:impossible STEPS=6",
        "reverse rewards=OWN:impossible STEPS=8",
        "reverse rewards=OWN:impossible RANK=8 STEPS=8",
    ),
    "cut off": broken(
        ("answers cut off",),
        "reverse rollout.max_new_tokens=2 STEPS=12",
        "guess-tiny rollout.max_new_tokens=3 STEPS=6",
        "reverse rollout.max_new_tokens=3 grpo.mask_truncated=true RANK=8 STEPS=12",
    ),
    "too cold": broken(
        ("samples too similar",),
        "reverse rollout.temperature=0.05 STEPS=8",
        "arithmetic-tiny rollout.temperature=0.05 STEPS=6",
        "reverse rollout.top_k=1 STEPS=8",
    ),
    "too hot": broken(
        ("temperature too high",),
        "reverse rollout.temperature=4 STEPS=12",
        "reverse rollout.temperature=10 grpo.algorithm=rloo STEPS=12",
        "arithmetic-tiny rollout.temperature=5 STEPS=8",
    ),
    "held-out rows of another kind": broken(
        ("held-out rows of another kind",),
        "reverse data.test_path=FOLDER/longer.jsonl STEPS=8",
        SUMS_FILES + " data.test_path=FOLDER/products.jsonl STEPS=6",
        "reverse data.test_path=FOLDER/longer.jsonl RANK=8 STEPS=8",
    ),
    "seldom scored": broken(
        ("few completions scored",),
        "reverse rewards=OWN:seldom STEPS=8",
        "reverse rewards=OWN:seldom grpo.algorithm=dr_grpo STEPS=8",
        "reverse rewards=OWN:seldom RANK=8 STEPS=8",
    ),
    "failing reward": broken(
        ("reward fails",),
        f"reverse rewards=OWN:failing {LENIENT}=value STEPS=8",
        f"reverse rewards=OWN:failing {LENIENT}=none STEPS=8",
        f"reverse rewards=[arithmetic_answer,OWN:failing] {LENIENT}=value STEPS=8",
    ),
    "failing environment": broken(
        ("episodes fail",),
        f"guess-tiny {ENVS}=OWN:Failing STEPS=4",
        f"guess-tiny {ENVS}=OWN:Slow envs.timeout=0.05 STEPS=4",
        f"guess-tiny {ENVS}=OWN:Failing envs.on_error=value STEPS=4",
    ),
    "supervised rate too high": broken(
        ("learning rate too high",),
        "reverse-sft SFT_LR=1",
        "reverse-sft SFT_LR=1e-1 model.source=FOLDER/base",
        "reverse-sft SFT_LR=0.5",
    ),
    "wrong labels": broken(
        ("wrong answers learnt",),
        "reverse-sft data.path=FOLDER/wrong.jsonl model.source=FOLDER/base",
        "reverse-sft data.path=FOLDER/wrong.jsonl model.source=FOLDER/base SFT_LR=1e-3",
        "reverse-sft data.path=FOLDER/wrong.jsonl model.source=FOLDER/base RANK=8",
    ),
    "repeated rows": broken(
        ("overfitting", "few distinct rows"),
        "reverse-sft data.path=FOLDER/repeated.jsonl",
        "reverse data.path=FOLDER/repeated.jsonl STEPS=8",
        "reverse-sft data.path=FOLDER/few.jsonl training.batch_size=24 STEPS=100 SFT_LR=6e-3",
    ),
    "weight decay": broken(
        ("weight decay too large",),
        "reverse training.actor_optimizer.weight_decay=100",
        "reverse-sft training.optimizer.weight_decay=100",
        "reverse training.actor_optimizer.weight_decay=30 grpo.algorithm=rloo",
    ),
    "entropy bonus": broken(
        ("entropy bonus too large",),
        "reverse grpo.entropy_bonus=1",
        "reverse RANK=8 LR=3e-3 grpo.entropy_bonus=3",
        "reverse grpo.entropy_bonus=5 grpo.algorithm=dr_grpo",
    ),
    "one row": broken(
        ("one training row",),
        "reverse data.path=FOLDER/one.jsonl STEPS=4",
        "reverse data.path=FOLDER/one.jsonl RANK=8 STEPS=4",
        "reverse-sft data.path=FOLDER/one.jsonl STEPS=8",
    ),
    "pairs": broken(
        ("groups too small",),
        "reverse grpo.num_generations=2 model.source=FOLDER/weak LR=3e-4 training.prompts_per_step=8",
        "reverse grpo.num_generations=2 model.source=FOLDER/weak LR=3e-4",
        "reverse grpo.num_generations=2 model.source=FOLDER/weak RANK=8 LR=1e-3",
    ),
    "one part dominates": broken(
        HACK,
        "reverse rewards=[arithmetic_answer,OWN:length] grpo.reward_weights=[1,3]",
        "reverse rewards=[arithmetic_answer,OWN:ones] grpo.reward_weights=[1,3]",
        "reverse rewards=[arithmetic_answer,OWN:short] grpo.reward_weights=[1,4] RANK=8 LR=3e-3",
    ),
    "reward of the prompt alone": broken(
        ("reward ignores completions",),
        "reverse rewards=OWN:of_prompt STEPS=8",
        "guess-tiny rewards=OWN:of_prompt grpo.reward_weights=[0,1] STEPS=6",
        "reverse rewards=OWN:of_prompt RANK=8 STEPS=8",
    ),
    "gradient clipped away": broken(
        ("gradient clipped away",),
        "reverse training.actor_optimizer.max_grad_norm=1e-10",
        "reverse RANK=8 LR=3e-3 training.actor_optimizer.max_grad_norm=1e-11",
        "reverse-sft training.optimizer.max_grad_norm=1e-10",
    ),
    "held-out rows trained on": broken(
        ("held-out rows trained on",),
        "reverse data.test_path=FOLDER/train.jsonl STEPS=4",
        "reverse-sft data.test_path=FOLDER/few.jsonl STEPS=8",
        "reverse data.test_path=FOLDER/few.jsonl RANK=8 STEPS=4",
    ),
    "too easy": broken(
        ("constant reward", "prompts too easy"),
        "reverse rewards=number_only STEPS=8",
        "reverse rewards=number_only grpo.algorithm=dapo STEPS=8",
        "reverse rewards=number_only RANK=8 STEPS=8",
    ),
    "prompts cut": broken(
        ("prompts cut",),
        f"reverse {TRUNCATE}=2 STEPS=4",
        f"reverse {TRUNCATE}=2 model.source=FOLDER/weak STEPS=4",
        f"reverse {TRUNCATE}=3 RANK=8 STEPS=4",
    ),
    "supervised rate too low": broken(
        ("learning rate too low", "learning rate next to 0"),
        "reverse-sft SFT_LR=1e-6",
        "reverse-sft SFT_LR=1e-7 model.source=FOLDER/weak",
        "reverse-sft SFT_LR=0 STEPS=20",
    ),
    "rewards of the batch before": broken(
        ("noisy reward",), "reverse rewards=OWN:late STEPS=12", "reverse rewards=OWN:late RANK=8 STEPS=12"
    ),
    "no clip range": broken(
        ("updates beyond the clip range",),
        "reverse grpo.epsilon=1e-6 grpo.num_iterations=4",
        "reverse RANK=8 LR=3e-3 grpo.epsilon=1e-6 grpo.num_iterations=4",
    ),
    "a game that hears nothing": broken(
        ("answers cut off", "reward never reached"), f"guess-tiny {ENVS}=OWN:Deaf STEPS=6"
    ),
    "weight of 0": broken(
        ("reward never reached",),
        "reverse rewards=[arithmetic_answer,OWN:impossible] grpo.reward_weights=[0,1] STEPS=8",
    ),
    "many updates of a batch": broken(
        ("learning rate too high", "updates beyond the clip range", "KL runaway"),
        "reverse grpo.num_iterations=12 LR=1e-2",
    ),
    "rare reward": broken(
        ("groups too small", "learning rate too high"),
        "reverse rewards=OWN:rare",
        "reverse rewards=OWN:rare grpo.algorithm=dr_grpo",
        "reverse rewards=OWN:rare RANK=8 LR=1e-2",
    ),
    "rate too low for adapters": broken(
        ("learning rate too low", "learning rate next to 0"),
        "reverse RANK=8 LR=3e-3",
        "reverse RANK=8 LR=3e-4 grpo.algorithm=rloo",
    ),
}
NEW = (
    "random reward", "failing reward", "seldom scored", "reward of the prompt alone", "sign flipped", "weight decay",
    "gradient clipped away", "rate of 0", "beta too large", "wrong labels", "held-out rows of another kind",
    "failing environment", "prompts cut", "repeated rows", "too easy", "rare reward", "rate too low for adapters",
)  # fmt: skip
"""Causes for which rules were new; the first run of each is in the first half."""
SOUND = {
    "first": ("reverse LR=2e-3 STEPS=32", "reverse rewards=OWN:close LR=2e-3 STEPS=32"),
    "second": (
        "reverse",
        "reverse-sft",
        "arithmetic-tiny",
        "guess-tiny",
        "reverse grpo.algorithm=dr_grpo",
        "reverse RANK=8 model.lora.alpha=16 LR=3e-3 STEPS=40",
        "arithmetic-tiny grpo.algorithm=dr_grpo",
        "quickstart",
        "reverse-sft model.source=FOLDER/weak SFT_LR=1e-3",
        "reverse rewards=OWN:offset",
        "arithmetic-tiny rewards=OWN:slightly_noisy",
        "guess-tiny grpo.algorithm=dapo",
        "reverse grpo.algorithm=ppo training.critic_optimizer.learning_rate=3e-3",
        "reverse-sft STEPS=120 SFT_LR=2e-3",
        "arithmetic-tiny rewards=OWN:large",
        "reverse rewards=OWN:odd evaluation.accuracy= evaluation.format=",
        "guess-tiny grpo.num_generations=16",
        "reverse grpo.algorithm=gspo grpo.num_iterations=2",
        "arithmetic-tiny grpo.beta=0.04",
        "reverse-sft RANK=16 model.source=FOLDER/weak SFT_LR=1e-2",
    ),
}
THIRD = (
    ("", "guess-tiny"),
    ("", "arithmetic-tiny STEPS=20"),
    ("rate too low", "guess-tiny LR=1e-8"),
    ("", "guess-tiny STEPS=20"),
    ("", "arithmetic-tiny rewards=OWN:large grpo.algorithm=rloo"),
    ("supervised rate too high", "reverse-sft SFT_LR=0.7"),
    ("", "guess-tiny training.prompts_per_step=32 grpo.algorithm=rloo"),
    ("", "arithmetic-tiny"),
    ("rewards of the batch before", "arithmetic-tiny rewards=OWN:late STEPS=8"),
    ("", "reverse-sft SFT_LR=6e-3"),
    ("", "arithmetic-tiny rewards=OWN:offset"),
    ("rate too low", "arithmetic-tiny LR=1e-8"),
    ("", "guess-tiny grpo.algorithm=dr_grpo"),
    ("", "reverse rewards=OWN:large"),
    ("too hot", "guess-tiny rollout.temperature=6 STEPS=12"),
    ("", "reverse grpo.algorithm=bnpo"),
    ("rate too low", "reverse RANK=8 LR=1e-8"),
    ("", "arithmetic-tiny grpo.algorithm=rloo STEPS=20"),
    ("held-out rows of another kind", SUMS_FILES + " data.test_path=FOLDER/products.jsonl STEPS=8"),
    ("", "guess-tiny STEPS=24"),
)
"""Causes and runs of the third part, which were made when four rules had been mended after the second half."""
AS_IT_STANDS = "STEPS=24 training.prompts_per_step=48 training.eval_every_n_steps=6 evaluation.prompts=0"
TABLE = (
    (HACK, "arithmetic-tiny rewards=OWN:empty evaluation.accuracy=OWN:empty"),
    (HACK, "arithmetic-tiny rewards=OWN:length"),
    (("one training row",), "arithmetic-tiny data.task=jsonl data.path=FOLDER/sums-one.jsonl"),
    *((("learning rate too high",), "arithmetic-tiny RANK=1 LR=1e-2") for _ in range(3)),
)
"""Runs of arithmetic-tiny of which an earlier version said something else."""


def _cases() -> Iterator[Case]:
    for number, (cause, (rules, runs)) in enumerate(CAUSES.items()):
        for i, words in enumerate(runs):
            half = "first" if i == 3 or (cause in NEW and i == 0) else "second"
            yield Case(f"{cause.replace(' ', '-')}-{i + 1}", half, cause, rules, words, 100 + 3 * number + i)
    for half, runs in SOUND.items():
        yield from (Case(f"sound-{half}-{i + 1}", half, "", (), words, i + 1) for i, words in enumerate(runs))
    for i, (cause, words) in enumerate(THIRD):
        yield Case(f"third-{i + 1}", "third", cause, CAUSES[cause].rules if cause else (), words, 300 + i)
    for i, (rules, words) in enumerate(TABLE):
        yield Case(f"table-{i + 1}", "table", "of the table", rules, f"{words} {AS_IT_STANDS}", i)


CASES = tuple(_cases())
