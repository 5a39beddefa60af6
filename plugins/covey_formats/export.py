"""Export a run or a model to other formats; the result is read back and compared before it is renamed into place.

Several processes divide the model over all of their devices, and each writes its shards to the common folder.

An export has a model card: the runs that made the model, its base, the settings and the results. A run may begin with
another run's model; the card lists all of them, the first one first. Its text is `model_card.md.jinja`. Values from
recipes and summaries are untrusted: the template escapes each one, unless a filter has made it `Markdown`. `publish`
sends an export and the records of its run to the Hugging Face hub.
"""

import math
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jinja2
from jax.sharding import Mesh

from covey import __version__
from covey.config.algorithms import algorithm_of
from covey.config.processes import MODE
from covey.config.recipe import AnyRecipe, Recipe, chain_of_runs
from covey.config.recipe import load_any as load_recipe
from covey.config.schema import ModelOptions
from covey.display import echo, escape_markdown, printable, show_log
from covey.errors import CoveyError, WeightsError, foreign_errors
from covey.files import number, open_below
from covey.models.decoder import Decoder
from covey.models.loading import hf_config, sources
from covey.monitor.run_files import SUMMARY
from covey.parallel import make_mesh, processes
from covey.recipes.load_model import abstract_for, load_for
from covey.registry import import_package, offered
from covey.run.folder import model_folder, read_summary
from covey.text.tokenizer import Tokenizer, read_json
from covey_formats.files import Difference, check_new_folder
from covey_formats.gguf_writer import make_metadata, write_gguf
from covey_formats.hf import write_hf, write_tokenizer
from covey_formats.peft import no_adapters_error, write_peft
from covey_report.run_files import REPORT


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
        """Local Hugging Face folder of the base; that of a run if the base is gone; None for a base in another form."""
        kept = [folder for run in self.runs if (folder := model_folder(run)).is_dir()]
        try:
            path = sources.resolve_source(sources.adapter_base(self.base) or self.base).path
        except WeightsError:
            if not kept:
                raise
            return kept[0]
        return path if path.is_dir() else None

    def repository(self) -> str | None:
        """Repository of the base on the hub, `org/name`; None when it is a path."""
        if self.base in sources.NAMED_MODELS:
            return sources.NAMED_MODELS[self.base]
        match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(@.*)?", self.base, re.A)
        return match[1] if match else None

    def origin(self) -> str | None:
        """Exact weights of the base, where they are public: one name may stand for several versions."""
        origin = str((read_summary(self.runs[-1] / SUMMARY) or {}).get("model", "")) if self.runs else self.base
        return origin if origin.startswith(("hf:", "pypi:")) else None


def export(source: str, out: Path, kind: str, dtype: str | None, shard_size: int) -> None:
    """Write the run or model at `source` to the new folder `out`, and report how well it agrees with the one in memory.

    Args:
        kind: hf, peft or gguf.
        dtype: float32, bfloat16, or q8_0 (gguf); None for the run's own, or float32 for a model that is not a run.
        shard_size: hf: maximum size of a weights file in bytes.

    Raises:
        CoveyError: `out` is taken; the run has no adapters, or their base is the result of another run (peft); the
            family does not support the format, or there are several processes (gguf).
    """
    check_new_folder(out)
    lineage = Lineage.of(source)
    if kind == "peft":
        _check_adapters(lineage, source, out)
    if kind == "gguf" and processes.here().count > 1:
        raise CoveyError(
            f"a GGUF file is written by one process, and there are {processes.here().count}",
            want="--format hf or peft; llama.cpp converts the first to GGUF",
            fix=f"{MODE}=off before the command, where one process can hold the model",
        )
    words = (source, str(out), kind, dtype, shard_size)
    processes.here().check_same("export", lambda: words, "the same command for all of them")
    processes.here().check_shared_folder(out.absolute().parent)
    options = ModelOptions(source=source, dtype="bfloat16" if dtype == "bfloat16" else "float32")
    if kind == "gguf":
        model, tokenizer = abstract_for(AnyRecipe(model=options), "cpu")
        make_metadata(model.config, tokenizer)  # refused before the weights are read
    with show_log(info=_say, warning=_say):
        model, tokenizer, _ = load_for(AnyRecipe(model=options), _mesh_over_processes(), source)
    _say(f"writing {kind}, and reading it back")
    difference = _write(lineage, model, tokenizer, out, kind, dtype, shard_size)
    files = list(out.iterdir())
    _say(f"{out}: {len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB")
    if math.isnan(difference.max_logit):
        _say("each process has read back what it has written: all bytes are equal")
        return
    largest = f"{difference.max_difference:.2g} at most; the largest is {difference.max_logit:.2g}"
    _say(f"logits of what was read back differ by {largest}")


def _say(text: str) -> None:
    """Print a line, from the first process alone."""
    if processes.here().is_first:
        echo(text)


def _mesh_over_processes() -> Mesh | None:
    """Return a mesh that divides a model over all devices of several processes; None in one process, which has all of
    it on one device.
    """
    return make_mesh((len(jax.devices()),), ("fsdp",)) if processes.here().count > 1 else None


def _write(
    lineage: Lineage, model: Decoder, tokenizer: Tokenizer, out: Path, kind: str, dtype: str | None, shard_size: int
) -> Difference:
    card = model_card(lineage, "transformers" if kind == "hf" else kind)
    recipe = load_recipe(lineage.runs[0]) if lineage.runs else None
    sampling = recipe.rollout if isinstance(recipe, Recipe) else None
    if kind == "gguf":
        return write_gguf(model, tokenizer, out, dtype=dtype, card=card, sampling=sampling)
    source = lineage.folder()
    if kind == "peft":
        return write_peft(
            model,
            tokenizer.vocab_size,
            out,
            base=_base(lineage),
            inside=_module(lineage),
            card=card,
            write_beside=lambda folder: write_tokenizer(tokenizer, source, folder, sampling),
        )
    return write_hf(
        model, tokenizer, out, source=source, dtype=dtype, shard_size=shard_size, card=card, sampling=sampling
    )


def _check_adapters(lineage: Lineage, source: str, out: Path) -> None:
    """Refuse a run whose adapters are not usable elsewhere: it has none, or their base is the model of another run."""
    trained = load_recipe(source).model if lineage.runs else ModelOptions()
    if not (trained.adapter or trained.lora.rank):
        raise no_adapters_error()
    if len(lineage.runs) > 1:
        raise WeightsError(
            f"the adapters of this run belong on the model that the run {lineage.runs[1].name!r} left, and nobody else "
            "has that",
            want="adapters of a model that others can load",
            fix=f"export base and adapters merged: covey export {shlex.quote(source)} --out {shlex.quote(str(out))}",
            where=source,
        )


def _module(lineage: Lineage) -> str:
    """Return the module of the base that is our decoder: in a model with images it is a part."""
    folder = lineage.folder()
    whole = folder is not None and hf_config.is_whole(read_json(folder / "config.json"))
    return hf_config.MODULE if whole else "model"


def _base(lineage: Lineage) -> str:
    """Return the base's name for adapter_config.json: its repository, or the name of a local one without its path."""
    if repository := lineage.repository():
        return repository
    local = Path(lineage.base).expanduser()
    if not local.exists():
        return lineage.base
    name = local.resolve().name
    _say(f"adapter_config.json calls the base {name!r}: paths of this machine stay out of it")
    return name


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
    environment.filters |= {
        "code": lambda text: Markdown("`" + printable(text).replace("`", "") + "`"),
        "figure": lambda value: Markdown("" if number(value) is None else f"{value:.4g}"),
        "verbatim": Markdown,
        "basename": lambda path: Path(path).name,
    }
    return environment.from_string(Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8"))


def _describe(run: Path) -> dict[str, Any]:
    """Return recipe, steps, and the held-out results before and after training by name."""
    summary = read_summary(run / SUMMARY) or {}
    before, after = (summary.get(name) or {} for name in ("before", "after"))
    names = [name for name in {**before, **after} if number(after.get(name, before.get(name))) is not None]
    results = [(name, before.get(name), after.get(name)) for name in names]
    return {"recipe": load_recipe(run), "steps": summary.get("steps"), "results": results}


def publish(
    run: Path, repository: str, records: Sequence[str], private: bool, form: str, dtype: str | None, shard_size: int
) -> None:
    """Upload the trained model of `run` and its `records` to `repository` in one commit.

    Args:
        run: the run folder.
        repository: `org/name` on the hub; it is created if it does not exist.
        records: names of files of the run folder; the report is written anew.
        private: whether a new repository is private.
        form, dtype, shard_size: of the model's files, as for `export`.

    Raises:
        CoveyError: the package for the hub or a login is missing, the hub refuses, or the run cannot be exported.
    """
    api = open_hub()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        export(str(run), folder, form, dtype, shard_size)
        for name in records:
            if name == REPORT:
                offered("covey.pages", "report")(folder / REPORT, [run])
            else:
                with open_below(run, name) as record, (folder / name).open("xb") as copy:
                    shutil.copyfileobj(record, copy)
        with foreign_errors(CoveyError, f"publishing {repository} failed", fix=HUB_FIX):
            api.create_repo(repository, private=private, exist_ok=True)
            echo(f"uploading {len(list(folder.iterdir()))} files")
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Publish a run of Covey")
    echo(f"published: {api.endpoint}/{repository}")


def open_hub() -> Any:
    """Return the client of the hub, logged in.

    Raises:
        CoveyError: the package is missing, there is no valid login, or the hub cannot be reached.
    """
    huggingface_hub = import_package(
        "huggingface_hub", CoveyError, "publishing needs the package huggingface_hub", "hub"
    )
    api = huggingface_hub.HfApi()
    with foreign_errors(CoveyError, "asking the hub who is logged in failed", fix=HUB_FIX):
        try:
            user = api.whoami()
        except (huggingface_hub.errors.LocalTokenNotFoundError, huggingface_hub.errors.HfHubHTTPError) as error:
            raise CoveyError(f"no login that {api.endpoint} accepts", fix="hf auth login") from error
    echo(f"logged in at {api.endpoint} as {user.get('name', 'unknown')}")
    return api


HUB_FIX = "check the name, your right to write there, and the network"
