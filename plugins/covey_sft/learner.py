"""The loop of supervised fine-tuning.

Each step takes examples, tokenizes them, lays them out as rows and updates the model. Observers log, print and save the
results. If the model has LoRA adapters, only those are trained. The model may be of shapes, on devices that need not be
there: then the learner makes its programs, and nothing else.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from covey.config.recipe import SFTRecipe, validate
from covey.config.schema import SFTConfig, SFTDataConfig
from covey.config.schema.data import FROM_PYTHON
from covey.data.loader import FittedPrompts
from covey.data.rows import Row
from covey.errors import NumbersError, RecipeError
from covey.files import require_entry
from covey.models.decoder import Decoder, num_parameters
from covey.models.layer_stack import stack_layers, unstack_layers
from covey.models.loading.weights import load
from covey.monitor.record import Observer, OnBadBatch, StepRecord, total_steps
from covey.packing.bins import compile_cost
from covey.packing.rows import Rows, padding_fraction, rows_at_a_time
from covey.parallel import processes
from covey.parallel.arrays import place_model
from covey.parallel.mesh import default_mesh
from covey.run.outputs import Measured
from covey.run.saved_run import ReadyRun, SavedRun
from covey.run.script import checksum, model_options
from covey.run.trainee import Trainee
from covey.text.tokenizer import Tokenizer
from covey.train.optimizers import make_optimizer
from covey.train.programs import LossFn
from covey.train.trainer import Metrics, NonFiniteGuard, Trainer
from covey.types import Group
from covey_sft.batch import (
    HeldOutLoss,
    drop_long_examples,
    groups_of,
    pack_rows,
    perplexity,
    put_micro_batches,
    supervised_loss,
)
from covey_sft.examples import ExampleLoader, as_examples

HELD_OUT = "held-out data"


class SFTLearner(Trainee):
    """Train a model on examples.

    Args:
        model: the model, with or without adapters, or a source that `models.loading.weights.load` accepts. The
            learner takes over its trainable arrays; read the result from `learner.model`. On accelerators its layers
            are copied into stacks (`models.layer_stack`): drop other references to it, or their memory stays in use.
        tokenizer: optional when `model` is a source.
        config: batch, length, optimizer.
        mesh: the devices; by default the device of the model, or in several processes a device of each, along `data`.
        seed: seed for the order of the examples.
        loss_fn: replaces `supervised_loss`; values it returns besides the loss are added to the metrics, and to
            the progress line where `config.show` names them.
        observers: called with a `StepRecord` after each step, in order. Without any, one line per step is printed.
        on_phase: called with the name of each phase as it begins.
        on_bad_batch: called with the batch of an update whose loss or gradient is not finite, and the error.

    Attributes:
        history, evaluations, settings: see `Trainee`.
        held_out: computes the loss on held-out examples.
        answer: answers held-out examples with the current weights before and after training; nothing when None.
        step: optimizer updates made; `nonfinite_guard.skipped` of them were skipped.
    """

    def __init__(
        self,
        *,
        model: Decoder | str,
        tokenizer: Tokenizer | None = None,
        config: SFTConfig | None = None,
        mesh: Mesh | None = None,
        seed: int = 0,
        loss_fn: LossFn = supervised_loss,
        observers: Sequence[Observer] | None = None,
        on_phase: Callable[[str], None] = lambda name: None,
        on_bad_batch: OnBadBatch = lambda step, groups, arrays, error: None,
    ):
        self.mesh = mesh = mesh or default_mesh()
        self.config, self.seed, self.loss_fn = config or SFTConfig(), seed, loss_fn
        if isinstance(model, str):
            loaded = load(model, mesh=mesh)
            model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
        if tokenizer is None:
            raise RecipeError("SFTLearner got a model but no tokenizer", fix="pass tokenizer=", where="SFTLearner")
        if mesh is not None:
            processes.here().check_even_mesh(mesh)
        show = ("loss", *self.config.show, "eval/loss", "step_time")
        super().__init__(self.config, show, observers, on_phase, on_bad_batch)
        self.tokenizer, self.nonfinite_guard = tokenizer, NonFiniteGuard(self.config.skip_nonfinite)
        self.answer: Callable[[SFTLearner], Measured] | None = None
        self._model, self._longest = stack_layers(place_model(model, mesh)), model.config.max_positions
        self.held_out = HeldOutLoss(nnx.split(self._model)[0], self.config, loss_fn, mesh)
        self.trainer: Trainer | None = None
        self.settings = SFTRecipe(seed=seed, data=SFTDataConfig(task=FROM_PYTHON), training=self.config)
        # A loss of the user's may have metrics of its own.
        own: Any = {} if loss_fn is supervised_loss else {"show": (), "keep_best": ""}
        validate(replace(self.settings, training=replace(self.config, **own)))

    def train(self, train_ds: Any, eval_ds: Any = None, *, out: str | Path | None = None) -> Decoder:
        """Train for `max_steps` updates, or for `num_epochs` epochs over the data.

        Args:
            train_ds: examples in any of the forms `examples` takes, or a ready `loader` (whose position a resumed
                run has restored).
            eval_ds: held-out examples, in the same forms. Their loss is computed before and after training
                (`evaluations` has the metrics) and every `eval_every_n_steps`.
            out: the run folder: metrics, checkpoints and report go there. A run that is in it already is resumed from
                its last checkpoint, and gives the bits of a run that was never stopped. Without `out` nothing is
                written.

        Raises:
            DataError: an example has none of these forms, or is longer than `max_length`.
            ResumeError: the run in `out` was saved with other settings, data or weights.
            Stopped: a signal came (Ctrl-C, SIGTERM); the run in `out` is saved, and the same call resumes it.
        """
        loader = (
            train_ds if isinstance(train_ds, ExampleLoader) else self.loader(self.drop_long_examples(train_ds).rows)
        )
        held_out = () if eval_ds is None else self.drop_long_examples(eval_ds, HELD_OUT).rows
        model = lambda: model_options(self.program_model)  # noqa: E731
        self.train_on(loader, held_out, out, model, partial(self._ready, loader, held_out))
        return self.model

    def _ready(self, loader: ExampleLoader, held_out: Sequence[Row], run: SavedRun) -> ReadyRun:
        """Return the run of a script in a folder."""
        trainer = self.prepare(total_steps(self.config, len(loader)))
        self.initial_weights = self.initial_weights or checksum([trainer.params])
        counts = {"examples": len(loader.rows)}
        return ReadyRun(self, loader, self.tokenizer, self._model.config, held_out, self.initial_weights, counts)

    def begin(self, loader: ExampleLoader, held_out: Sequence[Row]) -> int:
        """Build the trainer, and return the number of updates of the whole run."""
        total = total_steps(self.config, len(loader))
        self.prepare(total)
        return total

    def steps(self, loader: ExampleLoader, total: int) -> Generator[StepRecord]:
        """Train to step `total`, and yield the record of each step."""
        cost = compile_cost(num_parameters(self._model), total, self._model.fixed_shapes)
        while self.step < total:
            started = time.perf_counter()
            self.on_phase("update")
            groups = self._to_groups(next(loader))
            rows = pack_rows(groups, self.config, cost)
            with processes.here().phase("update", self.step):
                metrics = self._update_or_skip(self.prepared, groups, rows)
            self.step += 1
            metrics["learning_rate"] = self.prepared.last_learning_rate
            metrics |= self._work_metrics(groups, rows, time.perf_counter() - started)
            metrics["perplexity"] = perplexity(metrics["loss"])
            place = {"step": self.step, "epoch": loader.position / len(loader.rows)}
            yield StepRecord(self.step, 1, total, place | metrics)

    def evaluate_rows(self, held_out: Sequence[Row], during_training: bool = False) -> Measured:
        """Compute the held-out loss for the run; before and after training, the answers of `answer` too."""
        answered = Measured({}) if during_training or self.answer is None else self.answer(self)
        found = self.held_out_loss(held_out) | ({} if during_training else {"examples": len(held_out)})
        return answered._replace(metrics=found | answered.metrics)

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arrays of a checkpoint, and its JSON values."""
        return self.prepared.state(), {"skipped": self.nonfinite_guard.skipped}

    def checkpoint_shapes(self, saved: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the shapes of these arrays."""
        return self.prepared.state_shapes()

    def load_checkpoint(
        self, arrays: dict[str, Any], extra: Mapping[str, Any], step: int, changed: Mapping[str, str]
    ) -> None:
        """Restore a checkpoint."""
        self.prepared.load_state(arrays, step)
        self.step, self.nonfinite_guard.skipped = step, require_entry(extra, "skipped", int)

    def drop_long_examples(self, data: Any, name: str = "training data") -> FittedPrompts:
        """Return the examples of `data` that are not too long; see `config.too_long`."""
        return drop_long_examples(as_examples(data), self.tokenizer, self.config, self._longest, name)

    def loader(self, examples: Sequence[Row]) -> ExampleLoader:
        """Return a loader of batches of `examples`, in the order given by the seed."""
        return ExampleLoader(examples, self.config.batch_size, seed=self.seed)

    def prepare(self, total_steps: int) -> Trainer:
        """Build the trainer for a run of `total_steps` updates, once."""
        if self.trainer is None:
            optimizer = make_optimizer(self.config.optimizer, total_steps)
            self.trainer = Trainer(self._model, optimizer, self.loss_fn)
        return self.trainer

    @property
    def prepared(self) -> Trainer:
        """The trainer, which `prepare` has built."""
        assert self.trainer is not None, "prepare builds it"
        return self.trainer

    def held_out_loss(self, examples: Sequence[Row]) -> dict[str, float]:
        """Compute `loss` and `perplexity` on `examples` with the current weights."""
        params = nnx.split(self._model)[1] if self.trainer is None else self.trainer.params
        return self.held_out(params, self._to_groups(examples))

    @property
    def model(self) -> Decoder:
        """The model with its current weights, its layers a list; on accelerators their arrays are copies."""
        return unstack_layers(self.program_model)

    @property
    def program_model(self) -> Decoder:
        """The model with its current weights as programs take it: on accelerators with stacks of layers.

        With stacks, a call of it with a cache fails: to decode so, take `model`. A `RolloutWorker` takes either.
        """
        if self.trainer is None:
            return self._model
        graph: Any = self.trainer.graph
        model: Decoder = nnx.merge(graph, self.trainer.params)
        return model

    def _to_groups(self, examples: Sequence[Row]) -> list[Group]:
        return groups_of(examples, self.tokenizer, self.config, self._longest)

    def _update_or_skip(self, trainer: Trainer, groups: Sequence[Group], rows: Rows) -> Metrics:
        """Make one update; skip a non-finite one, with no effect on the state, as often as `skip_nonfinite` allows."""
        try:
            metrics = trainer.update(put_micro_batches(rows, self.config, trainer.trainable, self.mesh))
            return self.nonfinite_guard.accept(metrics)
        except NumbersError as error:
            self.on_bad_batch(self.step + 1, groups, rows._asdict(), error)
            metrics = self.nonfinite_guard.skip(error)
            trainer.skip()
            return metrics

    def _work_metrics(self, groups: Sequence[Group], rows: Rows, seconds: float) -> Metrics:
        """Return the metrics of the step's cost, in tokens and seconds."""
        tokens = sum(len(group.prompt_tokens) + len(group.completions[0].tokens) for group in groups)
        return {
            "num_tokens": tokens,
            "loss_tokens": int(rows.scored.sum()),
            "waste/rows": padding_fraction(
                rows, rows_at_a_time(rows, self.mesh, self.config.max_tokens_per_micro_batch)
            ),
            "tokens_per_second": tokens / seconds,
            "step_time": seconds,
        }
