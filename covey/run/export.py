"""Export a run or a model to other formats; the result is read back and compared before it is renamed into place.

Several processes divide the model over all of their devices, and each writes its shards to the common folder.
"""

import math
import shlex
from pathlib import Path

import jax
from jax.sharding import Mesh

from covey.config import processes
from covey.config.recipe import AnyRecipe
from covey.config.recipe import load_any as load_recipe
from covey.config.schema import ModelOptions
from covey.display import echo, show_log
from covey.errors import CoveyError, WeightsError
from covey.models import export as formats
from covey.models.decoder import Decoder
from covey.models.loading import text_part
from covey.parallel import distributed, make_mesh
from covey.parallel.checks import check_shared_folder
from covey.run.load_model import load_for
from covey.run.model_card import Lineage, model_card
from covey.text.tokenizer import Tokenizer, read_json


def export(source: str, out: Path, kind: str, dtype: str | None, shard_size: int) -> None:
    """Write the run or model at `source` to the new folder `out`, and report how well it agrees with the one in memory.

    Args:
        kind: hf, peft or gguf.
        dtype: float32 or bfloat16; None for the run's own, or float32 for a model that is not a run.
        shard_size: hf: maximum size of a weights file in bytes.

    Raises:
        CoveyError: `out` is taken; the run has no adapters, or their base is the result of another run (peft); the
            family does not support the format, or there are several processes (gguf).
    """
    formats.check_new_folder(out)
    lineage = Lineage.of(source)
    if kind == "peft":
        _check_adapters(lineage, source, out)
    if kind == "gguf":
        _refuse_processes()
    words = (source, str(out), kind, dtype, shard_size)
    distributed.refuse_differences("export", lambda: words, "the same command for all of them")
    check_shared_folder(out.absolute().parent)
    options = ModelOptions(dtype="bfloat16" if dtype == "bfloat16" else "float32")
    with show_log(info=_say, warning=_say):
        model, tokenizer, origin = load_for(AnyRecipe(model=options), _mesh_over_processes(), source)
    distributed.refuse_differences("model", lambda: origin, "the same weights for all of them")
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
    if distributed.is_first():
        echo(text)


def _mesh_over_processes() -> Mesh | None:
    """Return a mesh that divides a model over all devices of several processes; None in one process, which has all of
    it on one device.
    """
    return make_mesh((len(jax.devices()),), ("fsdp",)) if distributed.count() > 1 else None


def _refuse_processes() -> None:
    if distributed.count() > 1:
        raise CoveyError(
            f"a GGUF file is written by one process, and there are {distributed.count()}",
            want="--format hf or peft; llama.cpp converts the first to GGUF",
            fix=f"{processes.MODE}=off before the command, where one process can hold the model",
        )


def _write(
    lineage: Lineage, model: Decoder, tokenizer: Tokenizer, out: Path, kind: str, dtype: str | None, shard_size: int
) -> formats.Difference:
    card = model_card(lineage, "transformers" if kind == "hf" else kind)
    if kind == "peft":
        return formats.write_peft(
            model, tokenizer.vocab_size, out, base=_base(lineage), inside=_module(lineage), card=card
        )
    if kind == "gguf":
        return formats.write_gguf(model, tokenizer, out, dtype=dtype, card=card)
    folder = lineage.folder()
    return formats.write_hf(model, tokenizer, out, source=folder, dtype=dtype, shard_size=shard_size, card=card)


def _check_adapters(lineage: Lineage, source: str, out: Path) -> None:
    """Refuse a run whose adapters are not usable elsewhere: it has none, or their base is the model of another run."""
    trained = load_recipe(source).model if lineage.runs else ModelOptions()
    if not (trained.adapter or trained.lora.rank):
        raise formats.no_adapters_error()
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
    whole = folder is not None and text_part.is_whole(read_json(folder / "config.json"))
    return text_part.MODULE if whole else "model"


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
