"""Export of models to the formats of other tools: a Hugging Face folder, a PEFT adapter, a GGUF file.

Each is written into a new folder, read back by our own loader and compared with the model in memory; only then is it
moved into place. This file only re-exports names.
"""

from covey.models.export.files import Difference, check_new_folder
from covey.models.export.gguf import make_metadata, write_gguf
from covey.models.export.hf import write_hf, write_settings, write_tokenizer
from covey.models.export.peft import no_adapters_error, write_peft

__all__ = [
    "Difference",
    "check_new_folder",
    "make_metadata",
    "no_adapters_error",
    "write_gguf",
    "write_hf",
    "write_peft",
    "write_settings",
    "write_tokenizer",
]
