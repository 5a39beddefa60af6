"""Programs of supervised training from shapes: those that a learner with arrays calls."""

from pathlib import Path

import jax
import pytest
from flax import nnx

from covey.config.schema import SFTConfig
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder, abstract_decoder
from covey.packing.rows import Rows
from covey.parallel import make_mesh
from covey.parallel.arrays import place_model
from covey.text.tokenizer import Tokenizer
from covey_plan.programs import SFTPrograms
from covey_plan.update_programs import apply_program
from covey_sft.batch import groups_of, pack_rows, put_micro_batches
from covey_sft.learner import SFTLearner

TOKENIZER = Tokenizer.from_folder(Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama")
SHAPE = ModelConfig(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
CONFIG = SFTConfig(row_length=64, max_tokens_per_micro_batch=128, batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, (2, 2)], ids=["one device", "mesh"])
def test_a_learner_calls_what_was_built_from_shapes(mesh: tuple[int, ...] | None) -> None:
    place = None if mesh is None else make_mesh(mesh)
    learner = SFTLearner(model=Decoder(SHAPE, rngs=nnx.Rngs(0)), tokenizer=TOKENIZER, config=CONFIG, mesh=place)
    trainer, update = learner.prepare(2), learner.prepare(2).programs
    rows: Rows = pack_rows(groups_of([{"prompt": "hello", "completion": "there"}] * 12, TOKENIZER, CONFIG), CONFIG)
    batch = next(put_micro_batches(rows, CONFIG, trainer.trainable, place)).batch
    grads = update.zeros(trainer.trainable)
    called = [
        learner.held_out.program.lower(trainer.params, batch),
        update.accumulate.lower(trainer.trainable, trainer.frozen, grads, batch, trainer.step),
        apply_program(update).lower(),
    ]
    shapes = place_model(abstract_decoder(SHAPE), place or jax.devices()[0])
    planned = SFTPrograms(SFTLearner(model=shapes, tokenizer=TOKENIZER, config=CONFIG, mesh=place), total_steps=2)
    size = batch.tokens.shape
    made = [planned.loss(*size), planned.gradients(*size), planned.apply()]
    assert [program.lower().as_text() for program in made] == [lowered.as_text() for lowered in called]
    assert [program.name for program in planned.largest()] == ["loss", "gradients", "apply"]
