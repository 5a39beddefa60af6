"""Supervised training: the loss is the one everybody computes, however the step is laid out; the end of an answer is
learnt and the prompt is not.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig, OptimizerConfig, SFTConfig
from covey.errors import DataError, RecipeError
from covey.models.attention import causal_attention
from covey.models.decoder import Decoder
from covey.models.loading.weights import load
from covey.models.lora import with_lora
from covey.monitor.record import StepRecord
from covey.packing.rows import tree_attention
from covey.parallel import flatten, make_mesh
from covey.text.tokenizer import Tokenizer
from covey.train.trainer import Trainer
from covey.types import Group, Mean
from covey_sft import batch
from covey_sft.batch import (
    HeldOutLoss,
    drop_long_examples,
    encode_example,
    groups_of,
    pack_rows,
    put_micro_batches,
    supervised_loss,
)
from covey_sft.learner import SFTLearner

pytestmark = pytest.mark.usefixtures("shared_programs")

TINY = Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama"
RATE = 300.0
"""High, so that what float32 loses in the sum of weight and step is far below 1e-5 of the step."""
LAYOUT = SFTConfig(row_length=256, max_tokens_per_micro_batch=256)
EXAMPLES = [
    {"prompt": "2+2=", "completion": "4"},
    {"prompt": [{"role": "user", "content": "Name a river."}], "completion": "The Rhine is one."},
    {"prompt": "", "completion": "Plain text, all of it learnt, and long enough to need a row of its own. " * 2},
    {"prompt": [{"role": "user", "content": "x"}], "completion": "y"},
    {"prompt": "a longer prompt with a short answer:", "completion": " yes"},
]


@pytest.fixture(scope="module")
def tiny() -> tuple[Decoder, Tokenizer]:
    loaded = load(TINY, remat=False)
    return loaded.model, loaded.tokenizer


def copied(model: Decoder) -> Decoder:
    graph, params = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(jnp.copy, params))


def pairs(tokenizer: Tokenizer, config: SFTConfig) -> list[tuple[np.ndarray, np.ndarray]]:
    return [encode_example(example, tokenizer, config.completion_only) for example in EXAMPLES]


def as_labels(prompt: np.ndarray, completion: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Input ids and labels as a trainer with an ignored label of −100 has them."""
    return np.concatenate([prompt, completion]), np.concatenate([np.full(len(prompt), -100), completion])


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """Σ −log softmax(logits[t])[labels[t + 1]] over labels that are not −100, in float64, and their number."""
    z, wanted = logits[:-1].astype(np.float64), labels[1:]
    z = z - z.max(axis=-1, keepdims=True)
    logps = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    keep = wanted != -100
    return float(-logps[np.arange(len(wanted))[keep], wanted[keep]].sum()), int(keep.sum())


def naive(model: Decoder, batch: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, Any]:
    """Loss and gradient without rows or chunks: padded sequences, and all their logits."""
    graph, params = nnx.split(model)
    width = max(len(p) + len(c) for p, c in batch)
    padded = [[np.pad(x, (0, width - len(x)), constant_values=-100) for x in as_labels(*pair)] for pair in batch]
    tokens, labels = (np.stack(column) for column in zip(*padded, strict=True))
    valid, positions = tokens >= 0, np.tile(np.arange(width), (len(batch), 1))

    @jax.jit
    def loss(params: Any) -> jax.Array:
        model = nnx.merge(graph, params)
        hidden, _ = model(np.maximum(tokens, 0), positions, causal_attention(valid, positions))
        logps = jax.nn.log_softmax(model.logits(hidden[:, :-1]))
        picked = jnp.take_along_axis(logps, np.maximum(labels[:, 1:], 0)[..., None], axis=-1)[..., 0]
        return -jnp.where(labels[:, 1:] >= 0, picked, 0.0).sum() / (labels[:, 1:] >= 0).sum()

    value, grad = jax.value_and_grad(loss)(params)
    return float(value), grad


class OneStep:
    """Makes the first plain gradient step again and again with one compiled trainer."""

    def __init__(self, model: Decoder, mesh: Any = None):
        model = SFTLearner(model=copied(model), tokenizer=object(), mesh=mesh).model  # type: ignore[arg-type]
        self.trainer, self.mesh = Trainer(model, optax.sgd(RATE), supervised_loss), mesh
        self.start = jax.tree.map(np.array, self.trainer.trainable)
        self.places = jax.tree.map(lambda x: x.sharding, self.trainer.trainable)

    def __call__(self, groups: list[Group], config: SFTConfig) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """The metrics, and the gradient that the step must have taken."""
        trainer = self.trainer
        trainer.trainable = jax.tree.map(jax.device_put, jax.tree.map(np.array, self.start), self.places)
        metrics = trainer.update(put_micro_batches(pack_rows(groups, config), config, trainer.trainable, self.mesh))
        before, after = flatten(self.start), flatten(trainer.trainable)
        return metrics, {name: (before[name] - np.asarray(after[name], np.float64)) / RATE for name in before}


@pytest.fixture(scope="module")
def step(tiny: tuple[Decoder, Tokenizer]) -> OneStep:
    return OneStep(tiny[0])


def same_gradient(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Compare two that were computed in float32, each rounded in two layers, forward and back, in sums of 64 terms."""
    largest = max(np.abs(g).max() for g in wanted.values())
    assert largest > 0.01
    for name, g in wanted.items():
        atol = 2 * 2 * 2 * 64 * 2.0**-24 * largest
        np.testing.assert_allclose(found[name], g, rtol=0, atol=atol, err_msg=name)


# --- the loss


@pytest.mark.slow
def test_the_loss_is_that_of_transformers(step: OneStep) -> None:
    """Against logits that transformers computed: mean cross-entropy of the completions' tokens, in float64."""
    golden = np.load(TINY / "logits.npz")
    for split in (1, 10, 23):
        groups = [batch._group(tokens[:split], tokens[split:], 24) for tokens in golden["tokens"]]
        labels = [as_labels(tokens[:split], tokens[split:])[1] for tokens in golden["tokens"]]
        found = [cross_entropy(z, wanted) for z, wanted in zip(golden["logits"], labels, strict=True)]
        total, count = (sum(part) for part in zip(*found, strict=True))
        assert count == 3 * (24 - split)
        assert step(groups, LAYOUT)[0]["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("completion_only", [True, False])
def test_loss_and_gradient_do_not_depend_on_the_layout(
    tiny: tuple[Decoder, Tokenizer], step: OneStep, completion_only: bool
) -> None:
    """Packed, one row at a time or all at once, or one a row and two at a time: what padded sequences give."""
    model, tokenizer = tiny
    config = dataclasses.replace(LAYOUT, completion_only=completion_only)
    loss, grad = naive(model, pairs(tokenizer, config))
    wanted = {name: np.asarray(g, np.float64) for name, g in flatten(grad).items()}
    for packing, tokens in [(True, 1), (True, 2048), (False, 512)]:
        laid = dataclasses.replace(config, packing=packing, max_tokens_per_micro_batch=tokens)
        metrics, found = step(groups_of(EXAMPLES, tokenizer, laid), laid)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
        same_gradient(found, wanted)


@pytest.mark.slow
def test_the_gradient_does_not_depend_on_the_devices(tiny: tuple[Decoder, Tokenizer], step: OneStep) -> None:
    groups = groups_of(EXAMPLES, tiny[1], LAYOUT)
    one, wanted = step(groups, LAYOUT)
    several, found = OneStep(tiny[0], make_mesh((2, 2)))(groups, LAYOUT)
    assert several["loss"] == pytest.approx(one["loss"], rel=1e-5)
    same_gradient(found, wanted)


def test_examples_that_share_a_row_do_not_see_each_other(tiny: tuple[Decoder, Tokenizer]) -> None:
    """The trap of plain packing: a token attends to the example before its own."""
    model, tokenizer = tiny
    config = SFTConfig(row_length=256)
    rows = pack_rows(groups_of(EXAMPLES, tokenizer, config), config)
    assert len(rows.tokens) < len(EXAMPLES)
    other = rows._replace(tokens=np.where(rows.group_ids == 1, (rows.tokens + 7) % 300, rows.tokens))
    forward = jax.jit(lambda r: model(r.tokens, r.positions, tree_attention(model, r))[0])
    hidden = [forward(r) for r in (rows, other)]
    changed = np.abs(np.asarray(hidden[0] - hidden[1])).max(axis=-1)
    assert (changed[rows.group_ids == 1] > 0).all()
    assert (changed[rows.group_ids > 1] == 0).all()


# --- what is learnt


def scored(example: dict[str, Any], tokenizer: Tokenizer, **settings: Any) -> tuple[list[int], list[int]]:
    """The tokens that are fed, and those that are scored."""
    config = SFTConfig(packing=False, **settings)
    rows = pack_rows(groups_of([example], tokenizer, config), config)
    return rows.tokens[rows.group_ids > 0].tolist(), rows.target[rows.scored].tolist()


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("completion_only", [True, False])
def test_the_stop_token_is_learnt_once_and_last(
    tiny: tuple[Decoder, Tokenizer], example: dict[str, Any], completion_only: bool
) -> None:
    """The trap: a completion without its end teaches a model that never stops."""
    _, learnt = scored(example, tiny[1], completion_only=completion_only)
    assert learnt[-1] in tiny[1].stop_ids
    ends = [token for token in learnt if token in tiny[1].stop_ids]
    turns = 2 if not completion_only and isinstance(example["prompt"], list) else 1
    assert len(ends) == turns


def test_the_prompt_is_fed_and_not_learnt(tiny: tuple[Decoder, Tokenizer]) -> None:
    tokenizer = tiny[1]
    example = EXAMPLES[1]
    prompt = tokenizer.encode_prompt(example["prompt"]).tolist()
    answer = tokenizer.encode_completion(example["prompt"], example["completion"]).tolist()
    assert scored(example, tokenizer) == (prompt + answer[:-1], answer)
    assert scored(example, tokenizer, completion_only=False) == (prompt + answer[:-1], prompt[1:] + answer)


def test_plain_text_is_learnt_but_for_its_first_token(tiny: tuple[Decoder, Tokenizer]) -> None:
    tokens = tiny[1].encode("Rivers run.").tolist()
    assert scored({"prompt": "", "completion": "Rivers run."}, tiny[1]) == (tokens, [*tokens[1:], tiny[1].eos_id])


def test_with_a_bos_token_the_first_token_of_a_text_is_learnt_too(tiny: tuple[Decoder, Tokenizer]) -> None:
    with_bos = Tokenizer.from_folder(TINY)
    with_bos.add_bos, with_bos.bos_id = True, 1
    tokens = with_bos.encode("Rivers run.").tolist()
    assert scored({"prompt": "", "completion": "Rivers run."}, with_bos) == ([1, *tokens], [*tokens, with_bos.eos_id])


# --- lengths


def test_a_long_example_is_an_error_dropped_or_cut_as_told(tiny: tuple[Decoder, Tokenizer]) -> None:
    long, short = {"prompt": "count: ", "completion": "12345 " * 20}, {"prompt": "say ", "completion": "a"}
    alone = {"prompt": "no room for an answer " * 5, "completion": "x"}
    config = SFTConfig(max_length=40)
    with pytest.raises(DataError, match=r"row 2 of the training data has \d+ tokens") as caught:
        drop_long_examples([short, long], tiny[1], config, 512, "training data")
    assert "--training.too-long drop or truncate" in str(caught.value)
    dropping = dataclasses.replace(config, too_long="drop")
    assert drop_long_examples([short, long, alone], tiny[1], dropping, 512, "data") == ([short], 2, 0)
    cutting = dataclasses.replace(config, too_long="truncate")
    kept, dropped, truncated = drop_long_examples([short, long, alone], tiny[1], cutting, 512, "data")
    assert (kept, dropped, truncated) == ([short, long], 1, 1)
    fed, learnt = scored(long, tiny[1], max_length=40, too_long="truncate")
    assert len(fed) + 1 == 40
    assert learnt[-1] not in tiny[1].stop_ids  # its end is not where it was cut
    with pytest.raises(DataError, match="no row of the data has at most 40 tokens"):
        drop_long_examples([long], tiny[1], dropping, 512, "data")


def test_the_model_itself_limits_the_length_too(tiny: tuple[Decoder, Tokenizer]) -> None:
    with pytest.raises(DataError, match="at most 512"):
        drop_long_examples(
            [{"prompt": "x", "completion": "word " * 600}], tiny[1], SFTConfig(max_length=4096), 512, "data"
        )


# --- the loop


def learner(tiny: tuple[Decoder, Tokenizer], **settings: Any) -> SFTLearner:
    given = {"optimizer": OptimizerConfig(learning_rate=3e-3), "batch_size": 2, "max_steps": 4} | settings
    config = dataclasses.replace(LAYOUT, **given)
    return SFTLearner(model=copied(tiny[0]), tokenizer=tiny[1], config=config, observers=[])


@pytest.mark.slow
def test_the_loop_learns_and_reports(tiny: tuple[Decoder, Tokenizer]) -> None:
    sft, seen = learner(tiny, max_steps=None, num_epochs=6, batch_size=5, eval_every_n_steps=3), list[StepRecord]()
    sft.observers.append(seen.append)
    trained = sft.train(EXAMPLES, EXAMPLES)
    assert [r.step for r in seen] == list(range(1, 7))  # one batch an epoch
    rows = [r.metrics for r in seen]
    assert [("eval/loss" in row) for row in rows] == [step % 3 == 0 for step in range(1, 7)]
    assert rows[-1]["eval/loss"] < rows[2]["eval/loss"] < rows[0]["loss"]
    wanted = {"loss", "perplexity", "entropy", "grad_norm", "learning_rate", "step_time", "tokens_per_second"}
    assert all(wanted <= row.keys() for row in rows)
    assert rows[0]["perplexity"] == pytest.approx(np.exp(rows[0]["loss"]))
    assert rows[4]["epoch"] == pytest.approx(5.0)
    batch = pairs(tiny[1], sft.config)
    assert rows[0]["num_tokens"] == sum(len(p) + len(c) for p, c in batch)
    assert rows[0]["loss_tokens"] == sum(len(c) for _, c in batch)
    fresh = SFTLearner(model=trained, tokenizer=tiny[1], config=sft.config).held_out_loss(EXAMPLES)
    assert fresh == pytest.approx(sft.held_out_loss(EXAMPLES))


def test_a_loss_over_no_token_is_no_number() -> None:
    held_out = HeldOutLoss(None, LAYOUT)({}, [])
    assert np.isnan([held_out["loss"], held_out["perplexity"]]).all()


def test_with_adapters_only_those_are_trained(tiny: tuple[Decoder, Tokenizer]) -> None:
    model = with_lora(copied(tiny[0]), LoRAConfig(rank=2))
    trained = flatten(SFTLearner(model=model, tokenizer=tiny[1], config=LAYOUT, observers=[]).prepare(2).trainable)
    assert trained.keys() == {name for name in flatten(nnx.state(model)) if ".lora." in name} != set()


@pytest.mark.slow
def test_a_loss_of_ones_own_reports_what_it_registers(
    tiny: tuple[Decoder, Tokenizer], capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(graph: Any, params: Any, rows: Any) -> Any:
        share = Mean((rows.target == 10).sum() * 1.0, rows.scored.sum() * 1.0)
        return jax.tree.leaves(params)[0].sum(), {"share_of_tens": share, "entropy": share, "odd": share}

    config = dataclasses.replace(LAYOUT, max_steps=1, batch_size=2, show=("share_of_tens", "entropy"))
    SFTLearner(model=copied(tiny[0]), tokenizer=tiny[1], config=config, loss_fn=loss).train(EXAMPLES)
    line = capsys.readouterr().out
    assert "share_of_tens " in line
    assert "entropy " in line
    assert "odd" not in line


def test_wrong_settings_are_refused(tiny: tuple[Decoder, Tokenizer]) -> None:
    with pytest.raises(RecipeError, match=r"training\.batch_size is 0"):
        SFTLearner(model=tiny[0], tokenizer=tiny[1], config=SFTConfig(batch_size=0))
    with pytest.raises(RecipeError, match="no tokenizer"):
        SFTLearner(model=tiny[0])
    SFTLearner(model=tiny[0], tokenizer=tiny[1], config=SFTConfig(optimizer=optax.sgd(0.1)))  # type: ignore[arg-type]
