"""What these tests share: one tiny decoder, and a cluster that plays its models.

What its models say is made up, everything else is the real thing: such a cluster is for what the loop does and when.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
import pytest
from flax import nnx

from covey.config.schema import GRPOConfig, RLTrainingConfig, RolloutConfig
from covey.data.loader import PromptLoader
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.monitor.record import StepRecord
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.micro_batches import TrainBatch
from covey.rl.roles import ClusterConfig
from covey.text.tokenizer import Tokenizer
from covey.types import Completion, FinishReason, Group

LIMIT = 10.0
"""Seconds after which a wait is a defect; no claim rests on how long anything takes."""
SIZES = ("rollout", "ref_logps", "old_logps", "train")
CONFIG = ModelConfig(
    vocab_size=300, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    tie_embeddings=True,
)  # fmt: skip


class Note(NamedTuple):
    """That something was done, to how many samples, in which thread."""

    what: str
    samples: int
    thread: str


class Played(RLCluster):
    """A cluster that notes what it is asked for, and makes up what its models would have said."""

    def __init__(self, grpo: GRPOConfig, **given: Any):
        super().__init__(**given)
        self.grpo, self.notes, self.records = grpo, list[Note](), list[StepRecord]()
        self.updates: list[list[TrainBatch]] = []
        self._noted = threading.Condition()

    def note(self, what: str, samples: int) -> None:
        with self._noted:
            self.notes.append(Note(what, samples, threading.current_thread().name))
            self._noted.notify_all()

    def seen(self, what: str, within: float = LIMIT) -> bool:
        """Waits until `what` has been noted; False when it never is."""
        with self._noted:
            return self._noted.wait_for(lambda: any(n.what == what for n in self.notes), within)

    def samples(self, what: str) -> list[int]:
        return [n.samples for n in self.notes if n.what == what]

    def order(self) -> list[str]:
        return [n.what for n in self.notes]

    def learner(self, reward_fns: Any = None, **others: Any) -> GRPOLearner:
        given = {"reward_fns": reward_fns or self.by_length, "observers": [self.records.append], **others}
        return GRPOLearner(rl_cluster=self, grpo_config=self.grpo, **given)

    def train(self, data: Any, reward_fns: Any = None, **others: Any) -> "Played":
        """The learner's whole run over a count of prompts, in their order, or over what a learner takes."""
        self.learner(reward_fns, **others).train(self.loader(data) if isinstance(data, int) else data)
        return self

    def loader(self, count: int, **options: Any) -> PromptLoader:
        rows = [{"prompt": f"p{i}", "answer": str(i)} for i in range(count)]
        return PromptLoader(rows, self.config.training_config.prompts_per_step, shuffle=False, **options)

    def by_length(self, prompts: Sequence[str], completion_ids: Sequence[list[int]]) -> list[float]:
        self.note("reward", len(prompts))
        return [float(len(ids)) for ids in completion_ids]

    def generate(
        self, examples: Sequence[Mapping[str, Any]], samples: int, *, step: int = 0, first: int = 0, **_: Any
    ) -> list[Group]:
        self.note("rollout", len(examples) * samples)
        return [_group(row, samples, (step, first + i)) for i, row in enumerate(examples)]

    def get_ref_per_token_logps(self, rows: Any, lengths: Sequence[int]) -> list[np.ndarray]:
        self.note("ref_logps", len(lengths))
        return [np.full(n, -1.0, np.float32) for n in lengths]

    def get_old_per_token_logps(self, rows: Any, lengths: Sequence[int]) -> list[np.ndarray]:
        self.note("old_logps", len(lengths))
        return [np.full(n, -1.0, np.float32) for n in lengths]

    def update_actor(self, batches: Iterable[TrainBatch]) -> dict[str, float]:
        self.updates.append([])
        for batch in batches:
            self.updates[-1].append(batch)
            self.note("train", sum(len(g.completions) for g in batch.groups))
        self.note("update", 0)
        return {"loss": 0.0, "grad_norm": 0.0, "kl": 0.0}

    def sync_weights(self) -> None:
        self.note("sync", 0)

    def prepare(self, *given: Any) -> None:
        super().prepare(*given)
        self.notes.clear()  # the loop's own are wanted


def _group(row: Mapping[str, Any], samples: int, noise: tuple[int, int]) -> Group:
    """Answers of 1 to 5 tokens that depend on the noise alone; every second one was cut off."""
    ends = (FinishReason.STOP, FinishReason.LENGTH)
    tokens = [np.random.default_rng([*noise, s]).integers(0, 300, 1 + (sum(noise) + s) % 5) for s in range(samples)]
    logps = [np.full(len(t), -1.0, np.float32) for t in tokens]
    made = (Completion(t, p, p, ends[s % 2], f"says {s}") for s, (t, p) in enumerate(zip(tokens, logps, strict=True)))
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return Group(row["prompt"], np.arange(3), tuple(made), columns)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama")


@pytest.fixture(scope="session")
def base() -> Decoder:
    """For reading only: a trainer would use up its arrays."""
    return Decoder(CONFIG, rngs=nnx.Rngs(0), remat=False)


@pytest.fixture
def played(base: Decoder, tokenizer: Tokenizer) -> Callable[..., Played]:
    """`played(prompts=4, samples=2, updates=1, batches=1, meshes={}, rollout=None, ..., train=None, **settings)`: sizes
    of the stages by their short names, other settings where they belong.
    """

    def make(
        prompts: int = 4, samples: int = 2, updates: int = 1, batches: int = 1, meshes: Any = None, **settings: Any
    ) -> Played:
        sizes = {f"{name}_micro_batch_size": settings.pop(name, None) for name in SIZES}
        training = {name: settings.pop(name) for name in list(settings) if hasattr(RLTrainingConfig, name)}
        grpo = GRPOConfig(**{"num_generations": samples, "num_iterations": updates, "beta": 0.04, **settings})
        given = {"prompts_per_step": prompts, "max_steps": batches * updates, **sizes, **training}
        given = {"actor_optimizer": optax.sgd(0.1), **given}
        config = ClusterConfig(meshes or {}, RLTrainingConfig(**given), RolloutConfig(max_new_tokens=8))
        return Played(grpo, actor=base, tokenizer=tokenizer, cluster_config=config)

    return make
