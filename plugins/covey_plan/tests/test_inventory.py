"""The programs that a run compiles where few are wanted are those of its plan: counted in a run by the way of
accelerators on virtual CPU devices, without their kernels.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from covey.config import recipe
from covey.config.recipe import Recipe
from covey.packing import rows
from covey.parallel import arrays
from covey.parallel.mesh import mesh_from_config
from covey.recipes.load_model import load_source
from covey.rl.cluster import RLCluster
from covey.rl.evaluate import evaluate
from covey.rl.grpo import GRPOLearner
from covey.rl.roles import ClusterConfig, Role
from covey.sampling import cache, programs
from covey_plan.plan import inventory, policy_programs
from covey_report.token_values import TokenValuesWriter

TINY = str(Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama")
SETTINGS = [
    f"model.source={TINY}", "model.lora.rank=4", "data.task=arithmetic", "data.path=null", "rewards=[number_only]",
    "rollout.max_prompt_length=24", "rollout.max_new_tokens=8", "rollout.slots=8", "training.row_length=64",
    "training.max_tokens_per_micro_batch=128", "training.max_steps=3", "training.token_values_every_n_steps=1",
    "evaluation.accuracy=number_only", "evaluation.partial=number_only", "evaluation.format=number_only",
    "model.mesh.tp=1",
]  # fmt: skip
PROMPTS = ["1+1=", "what is two and two?", "7*6=", "a much longer one"]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are built for TPUs, and no kernel runs: each token attends to nothing."""
    monkeypatch.setattr(arrays, "platform_of", lambda place: "tpu")
    for module, name in ((rows, "span_attention"), (cache, "span_attention"), (programs, "decode_attention")):
        monkeypatch.setattr(module, name, lambda *_, **__: lambda q, k, v, cache, **_: (q, cache))


@pytest.fixture
def compiled() -> Iterator[Counter[str]]:
    """Names of the programs that JAX compiles, with their numbers."""
    names: Counter[str] = Counter()

    class Names(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text.startswith("Finished XLA compilation of "):
                names[text.split(" of ")[1].split(" in ")[0]] += 1

    handler, logger = Names(), logging.getLogger("jax._src.dispatch")
    logger.addHandler(handler)
    with jax.log_compiles():
        yield names
    logger.removeHandler(handler)


def run(ready: Recipe, compiled: Counter[str]) -> None:
    """Train and evaluate as a run does, and count from where the model is loaded."""
    mesh = mesh_from_config(ready.model.mesh)
    model, tokenizer, _ = load_source(ready.model, TINY, ready.seed, mesh)
    compiled.clear()
    meshes = {} if mesh is None else {Role.ACTOR: mesh}
    config = ClusterConfig(meshes, ready.training, ready.rollout)
    learner = GRPOLearner(
        rl_cluster=RLCluster(actor=model, tokenizer=tokenizer, cluster_config=config),
        reward_fns=lambda prompts, completions, **_: [float(len(text)) for text in completions],
        grpo_config=ready.grpo,
        observers=[],
    )
    tokens, scored = TokenValuesWriter(), list[Any]()
    folder = SimpleNamespace(write_rows=lambda name, rows: scored.extend(rows))
    tokens.begin(SimpleNamespace(folder=folder, learner=learner, total=3, recipe=ready), {})  # type: ignore[arg-type]
    learner.before_update = tokens.before_update
    learner.observers.append(tokens.step)
    data = [{"prompt": text} for text in PROMPTS]
    learner.train([*data, *data])
    evaluate(learner.cluster, data[:3], ready.evaluation, ready.rollout)


@pytest.mark.slow
@pytest.mark.usefixtures("accelerator")
def test_a_run_compiles_the_programs_of_its_plan(compiled: Counter[str]) -> None:
    """Prompts of other lengths, evaluations of other sizes and settings, and rollouts that drain take no others."""
    ready = recipe.load("gsm8k-gemma2", SETTINGS)
    mesh = mesh_from_config(ready.model.mesh)
    planned = inventory(ready, policy_programs(ready, mesh or jax.devices()[0], 3))
    run(ready, compiled)
    assert len(planned) <= 12
    del compiled["jit(learning_rates_at)"]  # on the host: of an update, and of its metric
    del compiled["jit(stack)"]  # of layers, behind the loading: a copy for each shape of a weight
    del compiled["jit(slices_of_stack)"]  # of stacks that are lent to a rollout, likewise
    assert compiled.total() == len(planned), (compiled, planned)
