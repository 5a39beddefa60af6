"""A run or a model in the formats of others, read back and compared before it is in place."""

from pathlib import Path

from covey import recipe as recipes
from covey.configs import ModelOptions
from covey.models import export as formats
from covey.models.decoder import Decoder
from covey.recipe import is_run
from covey.run.card import USES, History, model_card
from covey.run.opening import open_model
from covey.tokenizer import Tokenizer


def export(source: str, out: Path, kind: str, dtype: str | None, shard_size: int) -> None:
    """Writes the run or model at `source` to the new folder `out`, and says how well it agrees with what is in memory.

    Args:
        kind: hf, peft or gguf.
        dtype: float32 or bfloat16; as the run held its weights when None, float32 for a model that is no run's.
        shard_size: hf: most bytes in a file of weights.

    Raises:
        CoveyError: `out` is taken; the run has no adapters (peft); the family has no such format (gguf).
    """
    formats.check_new(out)
    trained = recipes.load_any(source).model if is_run(source) else ModelOptions()
    if kind == "peft" and not (trained.adapter or trained.lora.rank):
        raise formats.no_adapters()
    model, tokenizer = open_model(source, ModelOptions(dtype="bfloat16" if dtype == "bfloat16" else "float32"), _say)
    _say(f"writing {kind}, and reading it back")
    apart = _write(History.of(source), model, tokenizer, out, kind, dtype, shard_size)
    files = list(out.iterdir())
    _say(f"{out}: {len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB")
    _say(f"logits of what was read back differ by {apart.largest:.2g} at most; the largest is {apart.of:.2g}")


def _write(
    history: History, model: Decoder, tokenizer: Tokenizer, out: Path, kind: str, dtype: str | None, shard_size: int
) -> formats.Difference:
    library = "transformers" if kind == "hf" else kind
    assert library in USES
    card = model_card(history, library)
    if kind == "peft":
        return formats.write_peft(model, tokenizer.vocab_size, out, base=_adapted(history), card=card)
    if kind == "gguf":
        return formats.write_gguf(model, tokenizer, out, dtype=dtype, card=card)
    folder = history.folder()
    return formats.write_hf(model, tokenizer, out, source=folder, dtype=dtype, shard_size=shard_size, card=card)


def _adapted(history: History) -> str:
    """What the adapters were trained on: the base itself, or the model that an earlier run left."""
    if len(history.runs) > 1:
        return str(history.runs[1].resolve())
    local = Path(history.base).expanduser()
    return history.repository() or (str(local.resolve()) if local.exists() else history.base)


def _say(text: str) -> None:
    print(text, flush=True)
