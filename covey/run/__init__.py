"""Execute whole runs from their recipes, and use finished ones. This file only re-exports names."""

from covey.run.export import export
from covey.run.inference import chat, evaluate, generate, play
from covey.run.load_model import open_model, use_compilation_cache
from covey.run.rl import resume, train
from covey.run.sft import evaluate as evaluate_sft
from covey.run.sft import resume as resume_sft
from covey.run.sft import train as train_sft

__all__ = [
    "chat",
    "evaluate",
    "evaluate_sft",
    "export",
    "generate",
    "open_model",
    "play",
    "resume",
    "resume_sft",
    "train",
    "train_sft",
    "use_compilation_cache",
]
