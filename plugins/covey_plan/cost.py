"""Cost of a run at a price of an hour of one device."""

from typing import Any, NamedTuple

from covey.config.recipe import Recipe, SFTRecipe
from covey.data import load_data
from covey.monitor.formats import duration
from covey.monitor.record import total_steps
from covey_plan.plan import Plan

LEFT_OUT = "compiling, evaluations and reward functions"
"""Work of a run that its cost leaves out."""


class Cost(NamedTuple):
    """Cost of a run.

    Attributes:
        price: price of an hour of one device, in any currency.
        devices: number of devices; a CPU is one, however many virtual devices it has.
        steps: optimizer updates of the whole run.
        seconds: expected seconds of all of them.
    """

    price: float
    devices: int
    steps: int
    seconds: float

    @property
    def total(self) -> float:
        """Price of the run, in the currency of `price`."""
        return self.price * self.devices * self.seconds / 3600

    def to_json(self) -> dict[str, Any]:
        """Return the cost in JSON's types."""
        return {**self._asdict(), "total": self.total, "left_out": LEFT_OUT}

    def in_words(self) -> str:
        """Return the cost as one line.

        >>> Cost(2.5, 8, 100, 7200.0).in_words()
        'costs 40.00: 100 steps in 2h00m on 8 devices at 2.5 a device-hour, without compiling, evaluations and reward functions'
        """  # noqa: E501
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        steps = f"{self.steps:,} steps in {duration(self.seconds)} on {devices}"
        return f"costs {self.total:.2f}: {steps} at {self.price:g} a device-hour, without {LEFT_OUT}"


def cost_of(plan: Plan, recipe: Recipe | SFTRecipe, price: float) -> Cost:
    """Return the cost of a planned run; the data are read where its length follows from them.

    Raises:
        DataError: they cannot be read.
    """
    updates = recipe.grpo.num_iterations if isinstance(recipe, Recipe) else 1
    batch = recipe.training.prompts_per_step if isinstance(recipe, Recipe) else recipe.training.batch_size
    batches = 0 if recipe.training.max_steps else -(-len(load_data(recipe.data).train) // batch)
    steps = total_steps(recipe.training, batches, updates)
    return Cost(price, plan.target.count or 1, steps, -(-steps // updates) * plan.step_seconds)
