"""Programs of supervised training, built from its settings for devices that need not be there; see `Program`."""

import jax
from flax import nnx
from jax.sharding import Mesh

from covey.config.schema import SFTConfig
from covey.models.decoder import Decoder
from covey.models.layer_stack import stack_layers
from covey.packing.bins import most_rows, row_length_bucket
from covey.packing.rows import abstract_rows
from covey.parallel.placement import place_abstract, rows_placement
from covey.parallel.programs import Program
from covey.parallel.sharding import num_row_shards
from covey.sft.batch import HeldOutLoss, supervised_loss
from covey.train.optimizers import make_optimizer
from covey.train.programs import UpdatePrograms


class SFTPrograms:
    """Programs of supervised training, by what they do.

    Args:
        model: with shapes in place of arrays (`models.abstract`), not yet on its devices.
        config: batch, length, optimizer.
        place: a mesh or one device.
        total_steps: optimizer updates of the whole run.

    Attributes:
        model: the model in shapes, on its devices.
    """

    def __init__(self, model: Decoder, config: SFTConfig, place: Mesh | jax.Device, total_steps: int):
        self.model = stack_layers(place_abstract(model, place))
        self.config, self._mesh = config, place if isinstance(place, Mesh) else None
        graph, self._params = nnx.split(self.model)
        self._update = UpdatePrograms(self.model, make_optimizer(config.optimizer, total_steps), supervised_loss)
        self._held_out = HeldOutLoss(graph, config, mesh=self._mesh)

    def loss(self, count: int, length: int) -> Program:
        """Return the program of the held-out loss of `count` rows of `length` tokens."""
        return self._held_out.program(self._params, count, length)

    def gradients(self, count: int, length: int) -> Program:
        """Return the program of the gradients of a micro-batch of `count` rows of `length` tokens."""
        return self._update.gradients_program(abstract_rows(count, length, rows_placement(self._params)))

    def apply(self) -> Program:
        """Return the program of the optimizer's update."""
        return self._update.apply_program()

    def largest(self) -> list[Program]:
        """Return the programs of the largest shapes that the settings provide for."""
        length = row_length_bucket(self.config.row_length)
        rows = most_rows(length, self.config.max_tokens_per_micro_batch, num_row_shards(self._mesh)), length
        return [self.loss(*rows), self.gradients(*rows), self.apply()]
