"""Export of models as a Hugging Face folder (`hf`), and functions by which packages write other formats (`files`).

A model is written into a new folder, read back by our own loader and compared with the model in memory; only then is
it moved into place.
"""
