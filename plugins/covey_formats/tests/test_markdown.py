"""Text in a model card is literal, whatever it holds."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_formats.markdown import escape_markdown


@pytest.mark.parametrize("text", ["# x", "- x", "1. x", "+ x", "--- ", "~~~", "=== ", "> x", "    x"])
def test_a_line_of_markdown_begins_no_block(text: str) -> None:
    assert re.match(r"[\\&x]|1\\", escape_markdown(text))


def test_markdown_means_nothing() -> None:
    assert escape_markdown("[a](b) ![x](y) | `c` * <i>") == r"\[a\](b) !\[x\](y) \| \`c\` \* &lt;i&gt;"


@given(st.text(st.characters(codec=None), max_size=30))
def test_what_is_escaped_is_one_printable_line(text: str) -> None:
    assert escape_markdown(text).isprintable()
