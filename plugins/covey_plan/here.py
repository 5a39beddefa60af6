"""`covey plan --here`: two steps of a recipe in a process of its own, and its peak of memory in each phase.

python -m covey_plan.here RECIPE.yaml FOLDER PEAKS.json
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from covey import recipes
from covey.config.recipe import OF_TABLE, Recipe, SFTRecipe, load_any, to_yaml
from covey.errors import CoveyError
from covey.recipes.build import build
from covey.run.saved_run import ReadyRun, SavedRun
from covey_plan.compiled import peak_memory, reset_peak_memory
from covey_plan.memory import SAMPLING
from covey_plan.table import make_table

STEPS = 2
PHASES = {"rollout": SAMPLING, "logps": ("score",), "update": ("gradients", "apply", "token values")}
"""Phase of a run → names of its programs."""


def overrides(recipe: Recipe | SFTRecipe) -> list[str]:
    """Return the settings that shorten a run of `recipe` to `STEPS` steps and a small evaluation."""
    never = ["training.eval_every_n_steps=0", "training.checkpoint_every_n_steps=0"]
    table = [f"{name}={getattr(Recipe, name)}" for name in ("log_completions", *OF_TABLE.names)]
    of_kind = ["evaluation.answers=0"] if isinstance(recipe, SFTRecipe) else table
    return [f"training.max_steps={STEPS}", "tracking=[]", "evaluation.prompts=4", *never, *of_kind]


def measure(recipe: Recipe | SFTRecipe) -> dict[str, int]:
    """Return the peak of resident memory in bytes by phase, of a process that runs `recipe`.

    Raises:
        CoveyError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="covey-plan-") as folder:
        file, peaks = Path(folder) / "recipe.yaml", Path(folder) / "peaks.json"
        file.write_text(to_yaml(recipe), encoding="utf-8")
        words = [sys.executable, "-m", "covey_plan.here", str(file), str(Path(folder) / "run"), str(peaks)]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise CoveyError("the run of two steps failed:\n" + done.stdout.decode(errors="replace")[-2000:])
        measured: dict[str, int] = json.loads(peaks.read_text())
        return measured


def predicted(plan: dict[str, Any]) -> dict[str, int]:
    """Return the predicted peak by phase of a plan in JSON's types, for phases that have programs."""
    peaks = {
        phase: max((one["peak"] for one in plan["programs"] if one["name"] in names), default=0)
        for phase, names in PHASES.items()
    }
    return {phase: peak for phase, peak in peaks.items() if peak}


def show(plan: dict[str, Any], console: Console) -> None:
    """Print measured and predicted peaks."""
    rows = [
        (phase, f"{peak / 1e9:.2f}", f"{measured / 1e9:.2f}", f"{peak / measured - 1:+.0%}")
        for phase, peak in predicted(plan).items()
        if (measured := plan["measured"].get(phase))
    ]
    console.print(make_table(["phase, two steps here", "predicted GB", "measured GB", "difference"], rows))


class PeakRecorder:
    """Record the highest resident memory of this process in each phase of a run.

    Attributes:
        peaks: bytes by phase, the most of all its times.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._phase = "start"

    def wrap(self, begin: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that begins a phase as `begin` does, and records the one before it."""

        def phase(name: str) -> None:
            self.record()
            begin(name)  # may return free memory to the system, which belongs to neither phase
            self._phase = name
            reset_peak_memory()

        return phase

    def record(self) -> None:
        """Record the phase that ends now."""
        self.peaks[self._phase] = max(peak_memory(), self.peaks.get(self._phase, 0))


def main(words: list[str]) -> None:
    """Run the recipe words[0] in the folder words[1]; write the peaks to the file words[2]."""
    recorder, recipe = PeakRecorder(), load_any(words[0])

    def watched(recipe: Any, data: Any, mesh: Any, run: SavedRun) -> ReadyRun:
        run.phase = recorder.wrap(run.phase)  # type: ignore[method-assign,assignment]
        return build(recipe, data, mesh, run)

    recipes.train(recipe, Path(words[1]), watched)  # type: ignore[type-var]
    recorder.record()
    Path(words[2]).write_text(json.dumps(recorder.peaks))


if __name__ == "__main__":
    main(sys.argv[1:])
