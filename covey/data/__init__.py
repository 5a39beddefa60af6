"""Training and test rows, and the batches they come in."""

from covey.data.loader import PromptLoader
from covey.data.rows import Row, as_rows
from covey.data.source import Dataset, load

__all__ = ["Dataset", "PromptLoader", "Row", "as_rows", "load"]
