"""Agreement of sampler and trainer: all tokens that the model drew, and fewer where the weights are others."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import special

from covey.config.schema import RolloutConfig
from covey.losses.logprobs import token_logps
from covey.models.attention import causal_attention
from covey.models.decoder import Decoder
from covey.packing.rows import pack, scatter_to_rows
from covey.rl.batches import token_keys_of
from covey.rl.step_data import sampled_mask
from covey.sampling.engine import Engine, Request, generate
from covey.sampling.logits import SamplingParams
from covey.sampling.responder import NewBranch, Response, Turn
from covey.types import Group
from covey_plan.agreement import token_agreement
from tests.rl.test_learning import STOPS, Run, decoder
from tests.sampling.test_logits import both_draw

pytestmark = pytest.mark.usefixtures("shared_programs")

PROMPTS = [np.arange(3, 8), np.arange(50, 60), np.array([299])]


class Reply:
    """Answers each halt, every other time by a branch that drops half of the sequence."""

    pause_id, turn_limit, is_async, answer_lag, max_num_seqs = None, 4, False, None, None

    def answer(self, turn: Turn) -> Response:
        new = np.array([70 + len(turn.tokens), 5, 6], np.int32)
        if turn.remaining_tokens <= len(new) + 1:
            return None
        return NewBranch(len(turn.tokens) // 2 + 1, new) if turn.sample.number % 2 else new


def sampled(config: RolloutConfig, responder: Any = None, samples: int = 16) -> list[Group]:
    requests = [Request(p.astype(np.int32), samples, i, 2, responder=responder) for i, p in enumerate(PROMPTS)]
    completions = generate(Engine(decoder(0), tuple(STOPS), config), requests)
    return [Group("", r.prompt, tuple(each)) for r, each in zip(requests, completions, strict=True)]


def num_drawn(groups: list[Group]) -> int:
    return sum(c.num_sampled for group in groups for c in group.completions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "responder"),
    [({}, None), ({"temperature": 1.3, "top_k": 50, "top_p": 0.9}, None), ({"temperature": 0.0}, None), ({}, Reply())],
)
def test_the_model_that_sampled_would_draw_every_token(settings: dict[str, Any], responder: Any) -> None:
    """Stop tokens too; tokens of a responder are not counted, and those behind them keep their noise."""
    config = RolloutConfig(max_new_tokens=24, slots=8, **settings)
    groups = sampled(config, responder)
    completions = [c for group in groups for c in group.completions]
    assert any(c.tokens[-1] in STOPS for c in completions) or config.temperature == 0
    assert responder is None or any(c.branches for c in completions)
    agreement = token_agreement(decoder(0), groups, config)
    assert agreement == (num_drawn(groups),) * 2
    assert token_agreement(decoder(1), groups, config).share < 0.97


@pytest.mark.slow
def test_of_truncated_draws_some_columns_are_drawn_again() -> None:
    """Those that a training step compares; each comes out as where all are drawn again."""
    config = RolloutConfig(max_new_tokens=24, slots=8, top_k=50)
    groups = sampled(config)
    rows, completions = pack(groups, max_tokens=128), [c for group in groups for c in group.completions]
    drawn = scatter_to_rows(rows, list(map(sampled_mask, completions)))
    keys = token_keys_of(rows, np.stack([c.key for c in completions]), drawn)
    graph, params = nnx.split(decoder(1))  # agrees with some tokens only
    score = partial(token_logps, graph, temperature=1.0, sampling_params=SamplingParams.from_config(config), keys=keys)
    some, all_of_them = (np.asarray(jax.jit(partial(score, every=n))(params, rows).agreed) for n in (5, 1))
    assert 0 < some.sum() < np.count_nonzero(keys[:, ::5].any(-1))
    assert np.array_equal(some[:, ::5], all_of_them[:, ::5])
    assert some.sum() == some[:, ::5].sum()


def changed(size: float) -> Decoder:
    """The decoder with other weights nearby."""
    graph, params = nnx.split(decoder(0))
    rng = np.random.default_rng(1)
    return nnx.merge(graph, jax.tree.map(lambda x: x + size * rng.normal(size=x.shape).astype(x.dtype), params))


@pytest.mark.slow
def test_other_weights_agree_as_the_formula_says() -> None:
    """The share expected from the two distributions at each token; see `race`."""
    config = RolloutConfig(max_new_tokens=24, slots=16)
    groups, near, wanted = sampled(config, samples=32), changed(0.015), []
    for group in groups:
        tokens = np.stack([np.resize(np.append(group.prompt_tokens, c.tokens), 40) for c in group.completions])
        both = [special.softmax(np.asarray(logits_of(model, tokens), np.float64), -1) for model in (decoder(0), near)]
        for row, completion in enumerate(group.completions):
            start = len(group.prompt_tokens) - 1
            for p, q in zip(*(x[row, start : start + len(completion.tokens)] for x in both), strict=True):
                blocks = [np.pad(x, (0, 84)).reshape(3, 128).T for x in (p, q)]
                of_blocks = both_draw(*(x.sum(-1) for x in blocks))
                wanted.append((of_blocks * both_draw(*blocks).sum(-1)).sum())
    agreement, share = token_agreement(near, groups, config), np.mean(wanted)
    assert 0.9 < share < 0.98
    assert abs(agreement.share - share) < 4 * np.sqrt(share * (1 - share) / agreement.drawn)


def logits_of(model: Decoder, tokens: np.ndarray) -> jax.Array:
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return model.logits(model(tokens, positions, causal_attention(jnp.ones(tokens.shape, bool), positions))[0])


@pytest.mark.slow
def test_a_run_measures_it_before_its_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with several updates on a batch; and it falls where the rollout does not get the new weights."""
    made = Run(steps=4, num_iterations=2).train(2)
    assert made.metric("sampling/token_agreement").tolist() == [1.0, 1.0]
    stale = Run(steps=3)
    stale.cluster.rollout.update_params(jax.tree.map(jnp.copy, stale.cluster.rollout.params))  # updates donate theirs
    monkeypatch.setattr(stale.cluster, "sync_weights", lambda: None)
    first, *others = stale.train(3).metric("sampling/token_agreement")
    assert first == 1.0
    assert max(others) < 0.9
