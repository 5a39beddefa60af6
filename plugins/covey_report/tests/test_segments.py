"""Tokens of a prompt by role: the template's own text is never taken for that of a message."""

from pathlib import Path

import pytest

from covey.text.tokenizer import Tokenizer
from covey_report.segments import prompt_segments

TINY = Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama"


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


def test_messages_that_spell_the_template_are_told_apart(tiny: Tokenizer) -> None:
    chat = [("system", "user"), ("user", " assistant\n"), ("assistant", "<|im_end|>"), ("user", "user")]
    messages = [{"role": role, "content": content} for role, content in chat]
    segments = prompt_segments(tiny, tiny.encode_prompt, messages)
    texts = [text for segment in segments for text in segment.texts]
    assert len(texts) == len(tiny.encode_prompt(messages))
    assert "".join(texts) == tiny.render(messages)
    shown = [(segment.role, "".join(segment.texts).strip()) for segment in segments if segment.role != "template"]
    assert shown == [(role, content.strip()) for role, content in chat]


def test_a_text_is_one_segment(tiny: Tokenizer) -> None:
    (segment,) = prompt_segments(tiny, tiny.encode_prompt, "Once upon")
    assert (segment.role, "".join(segment.texts)) == ("prompt", "Once upon")
