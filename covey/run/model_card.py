"""Write the model card of an export: the runs that made a model, its base, the settings, and the results.

A run may begin with another run's model; the card lists all of them, the first one first. Its text is
`model_card.md.jinja`. Values from recipes and summaries are untrusted: the template escapes each one, unless a filter
has made it `Markdown`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from covey import __version__
from covey.config.algorithms import algorithm_of
from covey.config.recipe import chain_of_runs
from covey.config.recipe import load_any as load_recipe
from covey.display import escape_markdown, printable
from covey.models.loading import sources
from covey.monitor.run_files import SUMMARY
from covey.run.folder import read_summary


@dataclass(frozen=True)
class Lineage:
    """The runs that made a model, the last one first, and the model that the first of them began with."""

    runs: tuple[Path, ...]
    base: str

    @classmethod
    def of(cls, source: str) -> "Lineage":
        """Follow `model.source` from run to run."""
        runs, base = chain_of_runs(source)
        return cls(tuple(runs), base)

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

    def origin(self) -> str | None:
        """Exact weights of the base, where they are public: one name may stand for several versions."""
        origin = str(_summary(self.runs[-1]).get("model", "")) if self.runs else self.base
        return origin if origin.startswith(("hf:", "pypi:")) else None


def model_card(lineage: Lineage, library: str) -> str:
    """Return README.md of an export: base, recipe, algorithm, and the results in summary.json.

    Args:
        library: the library that reads the export: transformers, peft or gguf.

    It contains no local paths.
    """
    base = Path(lineage.base).name
    runs = [_describe(run) for run in reversed(lineage.runs)]
    return _template().render(
        library=library,
        repository=lineage.repository(),
        base=base,
        origin=lineage.origin(),
        title=runs[-1]["recipe"].name if runs else base.removesuffix(".gguf"),
        version=__version__,
        runs=runs,
        algorithm_of=algorithm_of,
    )


class Markdown(str):
    """Text that the template does not escape."""


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        finalize=lambda value: value if isinstance(value, Markdown) else escape_markdown(str(value)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"code": _code, "figure": _figure, "verbatim": Markdown, "basename": lambda p: Path(p).name}
    return environment.from_string(Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8"))


def _describe(run: Path) -> dict[str, Any]:
    """Return recipe, steps, and the held-out results before and after training by name."""
    summary = _summary(run)
    before, after = (summary.get(name) or {} for name in ("before", "after"))
    names = [name for name in {**before, **after} if _is_number(after.get(name, before.get(name)))]
    results = [(name, before.get(name), after.get(name)) for name in names]
    return {"recipe": load_recipe(run), "steps": summary.get("steps"), "results": results}


def _summary(run: Path) -> dict[str, Any]:
    return read_summary(run / SUMMARY) or {}


def _code(text: str) -> Markdown:
    return Markdown("`" + printable(text).replace("`", "") + "`")


def _figure(value: Any) -> Markdown:
    return Markdown(f"{value:.4g}" if _is_number(value) else "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
