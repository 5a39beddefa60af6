"""Settings of a Hugging Face folder, as a run keeps them: what is read back is the model's config and tokenizer."""

import json
from pathlib import Path

import pytest
import tokenizers

from covey.models.hf_folder import write_settings
from covey.models.loading import weights
from covey.text.tokenizer import Tokenizer

PARITY = Path(__file__).parents[1] / "parity"
TINY = PARITY / "golden" / "tiny-llama"
TEXTS = json.loads((PARITY / "tricky.json").read_text())


@pytest.mark.parametrize("bos", [False, True])
def test_a_tokenizer_written_anew_gives_the_same_ids(tmp_path: Path, bos: bool) -> None:
    tiny = weights.load(TINY)
    inner = tokenizers.Tokenizer.from_str(tiny.tokenizer.inner.to_str())
    template = tiny.tokenizer.chat_template
    ours = Tokenizer(inner, eos_id=2, stop_ids=[0, 9], bos_id=0, pad_id=1, add_bos=bos, chat_template=template)
    write_settings(tiny.config, ours, tmp_path, "float32")
    config, theirs = weights.read_settings(tmp_path)
    assert config == tiny.config
    names = ("stop_ids", "eos_id", "bos_id", "pad_id", "add_bos", "chat_template")
    assert [getattr(theirs, n) for n in names] == [getattr(ours, n) for n in names]
    for text in TEXTS:
        assert theirs.encode_prompt(text).tolist() == ours.encode_prompt(text).tolist()
    chat = [{"role": "user", "content": "Hi <|im_end|>"}]
    assert theirs.encode_prompt(chat).tolist() == ours.encode_prompt(chat).tolist()
    added = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("ab").ids
    assert (added[0] == 0) == bos  # what transformers will do by itself
