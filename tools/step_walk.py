"""Print the files and functions of the package that one training step enters, in order, so that it can be followed.

    python tools/step_walk.py              # a GRPO step of a tiny model from scratch
    python tools/step_walk.py --calls      # also the functions of each file

The second step of the run is followed: the first one imports, builds and compiles. A row has the phase that the learner
named when the file was entered first, the file, and the number of its functions that were entered.
"""

import argparse
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "covey"


class Walk:
    """The functions that are entered while `on`, by file and in the order of their first entry."""

    def __init__(self) -> None:
        self.on, self.phase = False, ""
        self.files: dict[str, tuple[str, dict[str, None]]] = {}
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(f"{PACKAGE}/"):
            name = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            self.files.setdefault(name, (self.phase, {}))[1][code.co_qualname] = None


def walk_step(walk: Walk) -> None:
    """Make two steps of GRPO on a tiny model, and follow the second."""
    from covey import ClusterConfig, GRPOConfig, GRPOLearner, RLCluster, RLTrainingConfig, RolloutConfig

    training = RLTrainingConfig(max_steps=2, prompts_per_step=2)
    rollout = RolloutConfig(max_prompt_length=8, max_new_tokens=3)
    config = ClusterConfig(training_config=training, rollout_config=rollout)
    cluster = RLCluster.load(actor="scratch:arithmetic-tiny", cluster_config=config)
    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_fns=[digits],
        grpo_config=GRPOConfig(num_generations=4, beta=0.1),
        observers=[],
        on_phase=lambda name: enter(walk, name),
    )
    steps = learner.steps

    def followed(*arguments: Any) -> Iterator[Any]:
        for record in steps(*arguments):
            walk.on = False
            yield record
            walk.on = learner.step == 1

    learner.steps = followed  # type: ignore[assignment,method-assign]
    learner.train([{"prompt": f"{n}+{n}="} for n in range(4)])
    cluster.close()


def enter(walk: Walk, phase: str) -> None:
    """Note the phase of the step that begins."""
    walk.phase = phase


def digits(completions: list[str], **_: Any) -> list[float]:
    """Return the share of digits of each completion."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def main() -> None:
    """Print the walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="print the functions too")
    asked = parser.parse_args()
    walk = Walk()
    walk_step(walk)
    for number, (name, (phase, functions)) in enumerate(walk.files.items(), 1):
        print(f"{number:3}  {phase:<10} {name:<34} {len(functions):3}")
        if asked.calls:
            print("\n".join(f"     {'':<10}   {function}" for function in functions))
    print(f"{len(walk.files)} files, {sum(len(functions) for _, functions in walk.files.values())} functions")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
