"""Training and test rows or examples, and loaders that batch them."""

from covey.data.loader import PromptLoader
from covey.data.rows import Row, as_rows
from covey.data.sources import Dataset, load_data

__all__ = ["Dataset", "PromptLoader", "Row", "as_rows", "load_data"]
