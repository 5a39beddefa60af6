"""Write the summary of a recipe's data as one HTML page that needs no other file and no network, as reports do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.display import mask_secrets
from covey.files import replace_file
from covey_report.page import fill_page
from covey_report.sections import DATA

HEAD, TAIL = 1500, 500
"""Number of tokens of a long segment that are kept from its beginning and its end."""


def write_data_page(out: Path, summary: Mapping[str, Any]) -> int:
    """Write the page of `DataSummary.to_json` to the file `out`, atomically; return its size in bytes."""
    rows = [row | {"segments": [_shortened(segment) for segment in row["segments"]]} for row in summary["shown"]]
    data = mask_secrets({**summary, "shown": rows})
    page = fill_page(f"Data of {summary['recipe']}", DATA, data, "data_page")
    replace_file(out, page)
    return len(page)


def _shortened(segment: Mapping[str, Any]) -> dict[str, Any]:
    """Return a segment with its number of tokens, and of a long one the first and the last tokens."""
    texts = segment["texts"]
    if len(texts) <= HEAD + TAIL:
        return {"role": segment["role"], "count": len(texts), "texts": texts, "tail": []}
    return {"role": segment["role"], "count": len(texts), "texts": texts[:HEAD], "tail": texts[-TAIL:]}
