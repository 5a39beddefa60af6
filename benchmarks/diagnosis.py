"""`python -m benchmarks.diagnosis FOLDER`: broken and healthy runs on purpose, and what the diagnosis says of each.

A model of 100,000 weights is taught to reverse strings of digits, and is then trained further in many ways: some with
one setting that cannot work, some sound. Every run is made by `covey.run`, as the command makes it. The runs of the
half "set" served to set the thresholds of `covey.report.diagnosis`, those of "judge" to judge them, and those of
"fresh" were made when all thresholds were set. Runs that are in FOLDER already are not made again. Told at the end: a
table of the runs with the first finding of each, and how many were right.
"""

import argparse
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

DIGITS = "123456789"
BASE, WEAK = "base", "weak"
"""Names of the supervised runs that the others start from: one that solves about half of the tasks, and one that solves
few."""


class Case(NamedTuple):
    """One run.

    Attributes:
        name: name of its folder.
        cause: names of the rules of which one has to be the first finding; none for a healthy run.
        half: "set" if the run served to set thresholds, "judge" if it judges them, "fresh" if it was made later.
        settings: what differs from the common recipe.
        method: "rl" or "sft".
    """

    name: str
    cause: tuple[str, ...]
    half: str
    settings: tuple[str, ...]
    method: str = "rl"


RL = """
name: reverse
model: {source: SOURCE, remat: false}
data: {task: jsonl, path: TRAIN, test_path: TEST}
rewards: [arithmetic_answer]
rollout: {max_prompt_length: 6, max_new_tokens: 8, temperature: 1.0, slots: 128, decode_chunk: 4}
grpo: {num_generations: 8, beta: 0.0}
training:
  max_steps: 40
  prompts_per_step: 16
  actor_optimizer: {learning_rate: 1.0e-3, warmup_ratio: 0.1, schedule: constant}
  row_length: 128
  max_tokens_per_micro_batch: 2048
  eval_every_n_steps: 10
evaluation: {prompts: 100, accuracy: arithmetic_answer, format: number_only, temperature: 0}
"""

SFT = """
name: reverse-sft
method: sft
model: {source: "scratch:reverse", remat: false}
data: {task: jsonl, path: TRAIN, test_path: TEST}
training:
  max_steps: 300
  batch_size: 64
  optimizer: {learning_rate: 3.0e-3, warmup_ratio: 0.1, schedule: constant}
  row_length: 128
  max_tokens_per_micro_batch: 1024
  eval_every_n_steps: 10
rollout: {max_prompt_length: 6, max_new_tokens: 8, slots: 128, decode_chunk: 4}
evaluation: {prompts: 100, answers: 100, accuracy: arithmetic_answer, format: number_only, temperature: 0}
"""


def constant(completions: Sequence[Any]) -> list[float]:
    """Return the same reward for every completion."""
    return [0.5] * len(completions)


def one(completions: Sequence[Any]) -> list[float]:
    """Return 1 for every completion."""
    return [1.0] * len(completions)


def impossible(completions: Sequence[Any]) -> list[float]:
    """Return 1 for a letter, of which the model has none."""
    return [float("x" in str(text)) for text in completions]


def mark(completions: Sequence[Any]) -> list[float]:
    """Return 1 for a question mark, which has nothing to do with the task."""
    return [float("?" in str(text)) for text in completions]


def never(completions: Sequence[Any]) -> list[float]:
    """Return 1 for a completion of 40 characters, which is longer than any can be."""
    return [float(len(str(text)) >= 40) for text in completions]


def long(completions: Sequence[Any]) -> list[float]:
    """Return the share of the longest length that a completion has."""
    return [len(str(text)) / 8 for text in completions]


def ones(completions: Sequence[Any]) -> list[float]:
    """Return the share of the digit 1 among the first three characters."""
    return [str(text)[:3].count("1") / 3 for text in completions]


def odd(completions: Sequence[Any]) -> list[float]:
    """Return 1 for an odd number."""
    return [float(str(text)[-1:] in tuple("13579")) for text in completions]


def short(completions: Sequence[Any]) -> list[float]:
    """Return 1 for a completion of two digits."""
    return [float(len(str(text)) == 2) for text in completions]


def close(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """Return the share of the digits that are right."""
    pairs = zip(map(str, completions), answer, strict=True)
    return [sum(a == b for a, b in zip(text, truth, strict=False)) / len(truth) for text, truth in pairs]


def make_data(folder: Path) -> None:
    """Write `train.jsonl`, `test.jsonl` and `few.jsonl`: strings of three digits, and their reversal."""
    every = [a + b + c for a in DIGITS for b in DIGITS for c in DIGITS]
    random.Random(0).shuffle(every)
    for name, chosen in (("train", every[:600]), ("test", every[600:]), ("few", every[:24])):
        rows = [{"prompt": f"{text}=", "completion": text[::-1], "answer": text[::-1]} for text in chosen]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(case: Case, folder: Path) -> None:
    """Make the run of `case` in `folder`, unless it is there."""
    from covey import run
    from covey.config import recipe

    out = folder / case.name
    if (out / "summary.json").is_file() and "after" in (out / "summary.json").read_text():
        return
    text = (SFT if case.method == "sft" else RL).replace("SOURCE", str(folder / BASE))
    text = text.replace("TRAIN", str(folder / "train.jsonl")).replace("TEST", str(folder / "test.jsonl"))
    settings = [setting.replace("FOLDER", str(folder)) for setting in case.settings]
    if case.method == "sft":
        run.train(recipe.parse(text, settings, case.name, recipe.SFTRecipe), out)
    else:
        run.train(recipe.parse(text, settings, case.name), out)


LR, SFT_LR = "training.actor_optimizer.learning_rate", "training.optimizer.learning_rate"
CRITIC = "training.critic_optimizer.learning_rate"
WARM = "training.actor_optimizer.warmup_ratio"

BASES = (
    Case(BASE, (), "", ("training.max_steps=56",), "sft"),
    Case(WEAK, (), "", ("training.max_steps=30",), "sft"),
)

CASES = (
    Case("rate-60", ("learning rate too high",), "set", (f"{LR}=6e-2",)),
    Case("rate-30-steep", ("learning rate too high",), "judge", (f"{LR}=3e-2", f"{WARM}=0", "seed=1")),
    Case("rate-100-short", ("learning rate too high",), "judge", (f"{LR}=1e-1", "training.max_steps=12", "seed=2")),
    Case("rate-small", ("learning rate too low",), "set", (f"{LR}=1e-6",)),
    Case("rate-tiny", ("learning rate too low",), "judge", (f"{LR}=3e-7", "grpo.algorithm=dr_grpo", "seed=1")),
    Case("cut-2", ("answers cut off",), "set", ("rollout.max_new_tokens=2",)),
    Case("cut-1", ("answers cut off",), "judge", ("rollout.max_new_tokens=1", "seed=1")),
    Case("constant-half", ("constant reward",), "set", ("rewards=benchmarks.diagnosis:constant",)),
    Case("constant-one", ("constant reward",), "judge", ("rewards=benchmarks.diagnosis:one", "seed=1")),
    Case("impossible", ("reward never reached",), "set", ("rewards=benchmarks.diagnosis:impossible",)),
    Case("never", ("reward never reached",), "judge", ("rewards=benchmarks.diagnosis:never", "seed=1")),
    Case(
        "pairs", ("groups too small",), "set",
        ("grpo.num_generations=2", f"model.source=FOLDER/{WEAK}", "training.prompts_per_step=8", f"{LR}=3e-4"),
    ),
    Case(
        "pairs-few", ("groups too small",), "judge",
        ("grpo.num_generations=2", f"model.source=FOLDER/{WEAK}", "seed=3", f"{LR}=3e-4"),
    ),
    Case(
        "hack-long", ("possible reward hacking",), "set",
        ("rewards=[arithmetic_answer,benchmarks.diagnosis:long]", "grpo.reward_weights=[1,3]"),
    ),
    Case(
        "hack-ones", ("possible reward hacking",), "judge",
        ("rewards=[arithmetic_answer,benchmarks.diagnosis:ones]", "grpo.reward_weights=[1,2]", "seed=1"),
    ),
    Case("hack-mark", ("possible reward hacking",), "judge", ("rewards=benchmarks.diagnosis:mark",)),
    Case(
        "kl", ("KL runaway", "learning rate too high"), "set",
        (f"{LR}=2e-2", "grpo.beta=1e-4", "rewards=benchmarks.diagnosis:odd"),
    ),
    Case(
        "kl-2", ("KL runaway", "learning rate too high"), "judge",
        (f"{LR}=1e-2", "grpo.beta=1e-5", "rewards=benchmarks.diagnosis:short", "seed=1"),
    ),
    Case("cold", ("samples too similar",), "set", ("rollout.temperature=0.05", "evaluation.temperature=0")),
    Case("cold-top-1", ("samples too similar",), "judge", ("rollout.top_k=1", "seed=1")),
    Case("hot", ("temperature too high", "entropy too high"), "set", ("rollout.temperature=4",)),
    Case("hot-2", ("temperature too high", "entropy too high"), "judge", ("rollout.temperature=10", "seed=1")),
    Case("bonus", ("entropy bonus too large",), "set", ("grpo.entropy_bonus=1",)),
    Case("bonus-2", ("entropy bonus too large",), "judge", ("grpo.entropy_bonus=5", "seed=1")),
    Case(
        "memorised", ("overfitting",), "set",
        ("data.path=FOLDER/few.jsonl", "training.max_steps=120", "training.batch_size=24"), "sft",
    ),
    Case(
        "memorised-2", ("overfitting",), "judge",
        ("data.path=FOLDER/few.jsonl", "training.max_steps=80", "seed=1", f"{SFT_LR}=6e-3"), "sft",
    ),
    Case("sft-rate-300", ("learning rate too high",), "set", (f"{SFT_LR}=1", "training.max_steps=60"), "sft"),
    Case(
        "sft-rate-30", ("learning rate too high",), "judge",
        (f"{SFT_LR}=1e-1", "training.max_steps=60", f"model.source=FOLDER/{BASE}", "seed=1"), "sft",
    ),
    Case("sft-rate-small", ("learning rate too low",), "judge", (f"{SFT_LR}=1e-6", "training.max_steps=60"), "sft"),
    Case("rate-lora", ("learning rate too high",), "fresh", ("model.lora.rank=8", f"{LR}=3e-1", "seed=13")),
    Case("rate-small-rloo", ("learning rate too low",), "fresh", (f"{LR}=1e-6", "grpo.algorithm=rloo", "seed=14")),
    Case("cut-dapo", ("answers cut off",), "fresh", ("rollout.max_new_tokens=2", "grpo.algorithm=dapo", "seed=15")),
    Case(
        "hack-short", ("possible reward hacking",), "fresh",
        ("rewards=[arithmetic_answer,benchmarks.diagnosis:short]", "grpo.reward_weights=[1,3]", f"{LR}=3e-3"),
    ),
    Case(
        "bonus-3", ("entropy bonus too large",), "fresh",
        ("grpo.entropy_bonus=2", "grpo.algorithm=dr_grpo", "training.max_steps=20", "seed=17"),
    ),
    # meant as a sound run: the diagnosis showed that its reward does not see digits behind the right ones
    Case(
        "weak-close", ("possible reward hacking",), "fresh",
        (f"model.source=FOLDER/{WEAK}", "rewards=benchmarks.diagnosis:close", "seed=25"),
    ),
    # --- sound ones
    Case("grpo", (), "set", ()),
    Case("grpo-seed", (), "judge", ("seed=5",)),
    Case("dr-grpo", (), "set", ("grpo.algorithm=dr_grpo",)),
    Case("dapo", (), "judge", ("grpo.algorithm=dapo", "seed=1")),
    Case("gspo", (), "set", ("grpo.algorithm=gspo", "grpo.num_iterations=2")),
    Case("rloo", (), "judge", ("grpo.algorithm=rloo", "seed=2")),
    Case("ppo", (), "set", ("grpo.algorithm=ppo", f"{CRITIC}=3e-3")),
    Case(
        "ppo-single", (), "judge",
        ("grpo.algorithm=ppo", "grpo.num_generations=1", "training.prompts_per_step=128", f"{CRITIC}=3e-3", "seed=1"),
    ),
    Case("odd", (), "set", ("rewards=benchmarks.diagnosis:odd", "evaluation.accuracy=", "evaluation.format=")),
    Case("close", (), "judge", ("rewards=[arithmetic_answer,benchmarks.diagnosis:close]", "seed=1")),
    Case("lora", (), "set", ("model.lora.rank=8", "model.lora.alpha=16", f"{LR}=3e-3")),
    Case("beta", (), "judge", ("grpo.beta=0.04", "seed=3")),
    Case("iterations", (), "judge", ("grpo.num_iterations=2", "grpo.algorithm=cispo", f"{LR}=5e-4", "seed=4")),
    Case("short", (), "judge", ("training.max_steps=12", "seed=6")),
    Case("bnpo", (), "fresh", ("grpo.algorithm=bnpo", "seed=21", f"{LR}=2e-3")),
    Case("sapo", (), "fresh", ("grpo.algorithm=sapo", "grpo.num_iterations=2", "seed=22")),
    Case("cispo", (), "fresh", ("grpo.algorithm=cispo", "grpo.num_iterations=2", f"{LR}=5e-4", "seed=23")),
    Case("warm", (), "fresh", ("rollout.temperature=1.3", "grpo.num_generations=16", "seed=24")),
    Case("sft-long", (), "fresh", ("training.max_steps=200", f"{SFT_LR}=1e-3", "seed=26"), "sft"),
    Case("sft", (), "set", ("training.max_steps=120",), "sft"),
    Case("sft-seed", (), "judge", ("training.max_steps=80", "seed=1", f"{SFT_LR}=2e-3"), "sft"),
)  # fmt: skip


def judge(case: Case, folder: Path) -> tuple[str, str]:
    """Return the name and the evidence of the first problem of the run of `case`; "" and what the note says if there is
    none.
    """
    from covey.report.diagnosis import PROBLEM, RunHistory, diagnose
    from covey.report.run_data import read_run

    first = diagnose(RunHistory.of(read_run(folder / case.name)))[0]
    return (first.rule if first.level == PROBLEM else "", f"{first.title}: {first.evidence}")


def table(folder: Path) -> str:
    """Return the runs in `folder` with their first findings as a table, and how many of each half are right."""
    lines = ["| run | half | made | first finding | right |", "|---|---|---|---|---|"]
    right: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for case in (case for case in CASES if (folder / case.name / "summary.json").is_file()):
        found, _ = judge(case, folder)
        kind = f"{'broken' if case.cause else 'sound'}, {case.half}"
        good = found in case.cause if case.cause else not found
        made[kind] += 1
        right[kind] += good
        settings = ", ".join(case.settings).replace("benchmarks.diagnosis:", "").replace("training.", "")
        settings = settings.replace("actor_optimizer.", "").replace("optimizer.", "") or "as the recipe"
        what = f"{'supervised, ' if case.method == 'sft' else ''}{settings}".replace("|", "\\|")
        lines.append(f"| {case.name} | {case.half} | `{what}` | {found or 'none'} | {'yes' if good else '**no**'} |")
    return "\n".join([*lines, "", *(f"{kind}: {right[kind]} of {made[kind]} right" for kind in made)])


def metrics_of(folder: Path) -> str:
    """Return the runs in `folder` as JSON lines, each with its settings and the metrics that rules read,
    rounded to three digits: the recorded runs of the tests.
    """
    lines = []
    for case in (case for case in CASES if (folder / case.name / "summary.json").is_file()):
        from covey.report.run_data import read_run

        run = read_run(folder / case.name)
        series = {name: _packed(run.steps, one) for name, one in run.series.items() if READ.fullmatch(name)}
        figures = {name: run.summary.get(name) for name in ("before", "after")}
        settings = {name: run.settings[name] for name in READ_SETTINGS if name in run.settings}
        row = {"name": case.name, "half": case.half, "cause": case.cause, "method": run.method, "settings": settings}
        lines.append(json.dumps(row | figures | {"steps": [*run.steps], "series": series}, separators=(",", ":")))
    return "\n".join(lines) + "\n"


def _packed(steps: Sequence[int], series: Any) -> Any:
    """Return the values of `series` by step; one value if all are equal, and pairs if steps lack it."""
    values = [float(f"{value:.3g}") for value in series.values]
    if len(values) < len(steps):
        return [*zip(series.steps, values, strict=True)]
    return values[0] if len(set(values)) == 1 else values


READ = re.compile(
    "reward|reward_error|reward_std|frac_reward_zero_std|rewards/.*|entropy|kl|grad_norm|learning_rate|skipped|loss"
    "|reward_correlation/.*|frac_reward_all_(best|worst)"
    "|completions/(mean_length|max_length|clipped_ratio|distinct_ratio|empty_ratio|rewarded_empty_ratio)"
    "|sampling/(logp_difference/mean|mass_kept)"
    "|clip_ratio/region_mean|critic/explained_variance|eval/(accuracy|error|format_accuracy|samples|reward|loss)"
)
"""Pattern of the metrics that rules read."""
READ_SETTINGS = (
    "grpo.algorithm", "grpo.advantage", "grpo.ratio", "grpo.num_generations", "grpo.entropy_bonus", "grpo.beta",
    "training.prompts_per_step", "training.max_steps", "rollout.temperature", "rollout.max_new_tokens",
)  # fmt: skip
"""Names of the settings that rules read."""


def main(words: Sequence[str] | None = None) -> int:
    """Make the runs, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where the runs are made")
    parser.add_argument("--only", default="", metavar="TEXT", help="make only runs with this in their names")
    parser.add_argument("--judge", action="store_true", help="make no run, judge those that are there")
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="write the metrics of the runs, for the tests")
    asked = parser.parse_args(words)
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    make_data(folder)
    from covey.models import scratch
    from covey.run import use_compilation_cache

    use_compilation_cache()

    scratch.SCRATCH_MODELS["reverse"] = scratch.ScratchSpec(
        f"0{DIGITS}=?", hidden_size=64, num_layers=2, head_dim=16, rope_theta=100.0
    )
    broken, sound = [case for case in CASES if case.cause], [case for case in CASES if not case.cause]
    mixed = [case for pair in zip_longest(broken, sound) for case in pair if case]
    for case in () if asked.judge else (*BASES, *mixed):
        if asked.only in case.name or case in BASES:
            begun = time.monotonic()
            make(case, folder)
            print(f"{case.name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    print(table(folder))
    if asked.metrics:
        asked.metrics.write_text(metrics_of(folder), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
