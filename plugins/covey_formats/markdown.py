"""Text that is not trusted, as literal Markdown of a model card."""

import html
import re

from covey.display import printable

LINK = re.compile(r"://|www\.|@", re.I)
"""Pattern of words that Markdown turns into links without link syntax (GitHub's autolinks, `user@host` included)."""


def escape_markdown(text: str) -> str:
    """Escape `text` as one line of literal Markdown: it forms no tag, table cell, heading or link. An address, which
    Markdown would turn into a link, becomes inline code.

    >>> escape_markdown("a|b `c`\\n<img src=x> at https://x.example")
    'a\\\\|b \\\\`c\\\\`\\\\\\\\n&lt;img src=x&gt; at `https://x.example`'
    """
    parts = re.split(r"([^\s<>`*|\\\[\]]+)", printable(text).strip())
    shown = "".join(
        f"`{part}`" if LINK.search(part) else re.sub(r"([\\`*|\[\]])", r"\\\1", html.escape(part, quote=False))
        for part in parts
    )
    # A mark at the start of the line would begin a heading, list, rule or block.
    return re.sub(
        r"^([#+=~-]|\d+(?=[.)]))", lambda mark: f"{mark[0]}\\" if mark[0].isdigit() else f"\\{mark[0]}", shown
    )
