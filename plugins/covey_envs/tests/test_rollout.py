"""Episodes with a model: the tokens trained are the tokens sampled, whatever the order in which environments answer.

The decoder has random weights, and a tenth of its vocabulary ends a turn. Its tokenizer has merges, so that what it
samples is seldom what its text would be encoded to.
"""

import functools
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from covey import EnvironmentRunner, Step
from covey.config.schema import CALCULATOR_MARKERS, EnvsConfig, RolloutConfig
from covey.errors import EpisodeError, RecipeError
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.rl.rollout_worker import RolloutWorker
from covey.sampling.engine import Engine, Launched
from covey.sampling.scheduler import Sample
from covey.text.tokenizer import Tokenizer
from covey.types import Completion
from covey_envs import episodes as episodes_module
from covey_envs.continuation import encode_turn
from covey_envs.tool_calls import FORMATS, Call, CallFormat

pytestmark = pytest.mark.slow  # whichever test is the first compiles the sampler

TINY = Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama"
PLAIN = Tokenizer.from_folder(TINY)
CONTROLS = [PLAIN.inner.token_to_id(text) for text in ("<|im_start|>", "<|im_end|>", "</s>", "<s>", "<unk>")]
STOPS = [i for i in range(PLAIN.vocab_size) if i % 9 == 0 and i not in CONTROLS]
TOKENIZER = Tokenizer(
    PLAIN.inner,
    eos_id=PLAIN.inner.token_to_id("<|im_end|>"),
    stop_ids=STOPS,
    chat_template=PLAIN.chat_template,
)
CONFIG = ModelConfig(
    vocab_size=TOKENIZER.vocab_size, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_positions=256, windows=(None, 20),
)  # fmt: skip
ROWS = [{"prompt": [{"role": "user", "content": "play " * n}], "turns": 1 + n} for n in range(3)]
DELAYS = random.Random(0)


class Sums:
    """Answers a reply with the sum of its characters, sooner or later."""

    delay = 0.0

    def __init__(self, row: Mapping[str, Any]):
        self.row, self.turns = row, 0

    def reset(self) -> Any:
        return self.row["prompt"]

    def step(self, reply: str) -> Step:
        time.sleep(DELAYS.random() * self.delay)
        self.turns += 1
        return Step("so: " + str(sum(map(ord, reply))), float(len(reply)), self.turns >= self.row["turns"])


class LateSums(Sums):
    delay = 0.05


SETTINGS: dict[str, Any] = {"max_prompt_length": 80, "max_new_tokens": 120, "slots": 4, "decode_chunk": 4}


@functools.cache
def worker() -> RolloutWorker:
    """The sampler of all tests; it is not made for those who only collect them."""
    return RolloutWorker(Decoder(CONFIG, rngs=nnx.Rngs(0)), TOKENIZER, RolloutConfig(**SETTINGS))


def played(factory: Any = Sums, samples: int = 2, rows: Any = ROWS, **envs: Any) -> list[Completion]:
    config = EnvsConfig(environment="guess", **{"max_turn_tokens": 9, "max_turns": 3, **envs})
    with EnvironmentRunner(factory, config) as worker().environments:
        groups = worker().generate(rows, samples, step=3)
    return [completion for group in groups for completion in group.completions]


@pytest.fixture(scope="module")
def episodes() -> list[Completion]:
    return played()


@jax.jit
def plain_logps(params: Any, tokens: np.ndarray) -> jax.Array:
    model = nnx.merge(worker()._graph, params)
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _ = model(tokens, positions, causal_attention(jnp.ones(tokens.shape, bool), positions))
    return jax.nn.log_softmax(model.logits(hidden)[0])


def test_each_token_is_the_models_own_or_the_environments_by_the_template(episodes: list[Completion]) -> None:
    lengths, changed = set(), 0
    for number, c in enumerate(episodes):
        assert c.episode is not None
        chat, turn_ends, messages = ROWS[number // 2]["prompt"], c.episode.turn_ends, list(c.episode.messages)
        start, drawn = 0, np.zeros(len(c.tokens), bool)
        for end, following in pairwise([*turn_ends, None]):
            said, *others = messages[:2]
            messages = messages[2:]
            turn = c.tokens[start:end]
            stopped = turn[-1] in TOKENIZER.stop_ids
            assert said == {"role": "assistant", "content": TOKENIZER.decode(turn[:-1] if stopped else turn)}
            assert stopped or len(turn) == 9 or following is None
            changed += TOKENIZER.encode(said["content"]).tolist() != turn[: len(turn) - stopped].tolist()
            drawn[start:end] = True
            if following is not None:
                after = encode_turn(TOKENIZER, chat, others, int(turn[-1]))
                assert c.tokens[end : end + len(after)].tolist() == after.tolist()
                start, chat = end + len(after), [*chat, said, *others]
        lengths.add(len(turn_ends))
        assert c.mask.tolist() == drawn.tolist()
        assert c.episode.reward == sum(c.episode.turn_rewards)
        ended = c.tokens[turn_ends[-1] - 1] in TOKENIZER.stop_ids
        assert c.finish == (
            "length" if not ended else "stop" if c.episode.done else "turns" if len(turn_ends) == 3 else "length"
        )
    assert lengths == {1, 2, 3}
    assert changed > len(episodes) / 2  # a turn that is encoded anew has other tokens


def test_log_probs_behind_a_response_are_those_of_the_whole_sequence(episodes: list[Completion]) -> None:
    """The tokens of the environment are in the cache, at their own positions."""
    for number, c in enumerate(episodes):
        prompt = TOKENIZER.encode_prompt(ROWS[number // 2]["prompt"])
        full = np.concatenate([prompt, c.tokens, np.zeros(256 - len(prompt) - len(c.tokens), np.int32)])
        logps = np.asarray(plain_logps(worker().params, full[None]))[len(prompt) - 1 :][: len(c.tokens)]
        picked = np.where(c.mask, logps[np.arange(len(c.tokens)), c.tokens], 0)
        np.testing.assert_allclose(c.logps, picked, atol=1e-4)


DROPS = str(PLAIN.chat_template).replace(
    "message['content']", "(message['content'] if message['role'] == 'user' or loop.last else message['content'][:2])"
)
"""A template that keeps two characters of earlier replies."""


@pytest.fixture
def template_drops_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = TOKENIZER.stop_ids
    drops = Tokenizer(PLAIN.inner, eos_id=TOKENIZER.eos_id, stop_ids=stops, chat_template=DROPS)
    monkeypatch.setattr(worker(), "tokenizer", drops)


@pytest.mark.usefixtures("template_drops_replies")
def test_a_rewritten_history_is_a_branch_in_which_the_next_turn_is_sampled() -> None:
    """Each token is drawn after what the template renders then."""
    sampled = played(history="template")
    num_branches = 0
    for number, c in enumerate(sampled):
        assert c.episode is not None
        assert c.branches is not None
        prompt = TOKENIZER.encode_prompt(ROWS[number // 2]["prompt"])
        sequence = prompt
        for (start, kept), (end, _) in pairwise([(0, len(prompt)), *c.branches, (len(c.tokens), 0)]):
            sequence = np.concatenate([sequence[:kept], c.tokens[start:end]])
            padded = np.concatenate([sequence, np.zeros(256 - len(sequence), np.int32)])
            logps = np.asarray(plain_logps(worker().params, padded[None]))[len(sequence) - 1 - (end - start) :]
            own, drawn = np.arange(end - start), c.mask[start:end]
            picked = np.where(drawn, logps[own, c.tokens[start:end]], 0)
            np.testing.assert_allclose(c.logps[start:end], picked, atol=1e-4)
            if start:
                shown = sequence[: kept + int(drawn.argmax())]
                turns = sum(turn_end <= start for turn_end in c.episode.turn_ends)
                chat = [*ROWS[number // 2]["prompt"], *c.episode.messages[: 2 * turns]]
                assert worker().tokenizer.encode_prompt(chat).tolist() == shown.tolist()
            num_branches += start > 0
    assert num_branches > len(sampled) / 2
    for other in (played(LateSums, history="template"), played(LateSums, history="template", max_live=6)):
        for a, b in zip(sampled, other, strict=True):
            assert a.branches == b.branches
            assert a.tokens.tobytes() == b.tokens.tobytes()
            assert a.logps.tobytes() == b.logps.tobytes()


@pytest.mark.usefixtures("template_drops_replies")
def test_by_default_a_history_stays_as_it_was_sampled(caplog: pytest.LogCaptureFixture) -> None:
    assert all(c.branches is None for c in played())
    assert "renders earlier turns of an episode differently" in caplog.text


def test_samples_do_not_depend_on_the_order_of_the_answers(episodes: list[Completion]) -> None:
    """Bit for bit, though four slots play six episodes in another order each time."""
    for other in (played(LateSums), played(LateSums, concurrency=1), played(LateSums, max_live=6)):
        for a, b in zip(episodes, other, strict=True):
            assert a.tokens.tobytes() == b.tokens.tobytes()
            assert a.logps.tobytes() == b.logps.tobytes()
            assert a.sampler_logps.tobytes() == b.sampler_logps.tobytes()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, Sample]]:
    """The sample in each slot of each program that draws, one program after the other."""
    programs: list[dict[int, Sample]] = []

    def recorded(launch: Callable[[Engine], Launched]) -> Callable[[Engine], Launched]:
        def record(engine: Engine) -> Launched:
            one = launch(engine)
            programs.append(dict(one.samples))
            return one

        return record

    for name in ("_admit", "_decode"):
        monkeypatch.setattr(Engine, name, recorded(getattr(Engine, name)))
    return programs


@pytest.mark.parametrize("max_live", [None, 6])
def test_with_a_lag_not_even_the_programs_depend_on_the_time_of_answers(
    max_live: int | None, launched: list[dict[int, Sample]]
) -> None:
    """Without one, they do: this is found by what the programs hold, since on a CPU they compute the same for a sample
    in any slot and beside any other.
    """

    def programs_of(factory: Any, lag: int | None) -> list[dict[int, Sample]]:
        launched.clear()
        played(factory, answer_lag=lag, max_live=max_live)
        return [*launched]

    for lag in (0, 1, 3):
        assert programs_of(Sums, lag) == programs_of(LateSums, lag)
    assert programs_of(LateSums, None) != programs_of(LateSums, None)


def test_a_lag_that_is_too_short_is_a_warning_that_names_a_longer_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes_module, "MUCH_WAITING", 0.0)
    played(LateSums, max_live=6, answer_lag=0)
    assert re.search(r"and the 6 episodes under way waited .*; envs\.answer_lag: \d+ lets the others", caplog.text)


def test_a_sample_that_waits_gives_its_slot_to_another() -> None:
    """Four slots and six episodes: none has an answer before all have ended their first turn."""

    class Meets(Sums):
        first_turns = threading.Barrier(6, timeout=50)

        def step(self, reply: str) -> Step:
            if self.turns == 0:
                self.first_turns.wait()
            return super().step(reply)

    assert len(played(Meets, rows=[ROWS[2]] * 3, max_live=6)) == 6


def test_slots_that_wait_for_environments_are_a_warning_once_that_names_max_live(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six episodes on four slots; two would not need more, and whoever has set max_live knows."""
    monkeypatch.setattr(episodes_module, "MUCH_WAITING", 0.0)
    played(LateSums, rows=ROWS[:1])
    played(LateSums, max_live=6)
    assert "max_live" not in caplog.text
    config = EnvsConfig(environment="guess", max_turn_tokens=9, max_turns=3)
    with EnvironmentRunner(LateSums, config) as worker().environments:
        for _ in range(2):
            worker().generate(ROWS, 2)
    (told,) = [record.message for record in caplog.records if "max_live" in record.message]
    assert re.search(
        r"the 4 episodes under way waited for it in \d+% of the rollout's time; envs\.max_live: [56] ", told
    )
    assert worker().stats.slot_waste > worker().stats.waste


def test_tools_answer_turns_and_the_last_turn_is_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(text: str) -> int:
        """Count the characters of a text.

        Args:
            text: The text.
        """
        return len(text)

    def every_other(text: str) -> list[Call]:
        return [Call("size", {"text": text})] if len(text) % 2 else []

    monkeypatch.setitem(FORMATS, "hermes", CallFormat("hermes", every_other, lambda schemas: "T"))
    config = EnvsConfig(tools=("calculator",), max_turn_tokens=9, max_turns=3)
    with EnvironmentRunner(tools=[size], config=config) as worker().environments:
        groups = worker().generate([ROWS[0]] * 3, 2, step=3)
    counts = set()
    for c in (completion for group in groups for completion in group.completions):
        assert c.episode is not None
        *before, last = [m["content"] for m in c.episode.messages if m["role"] == "assistant"]
        assert c.text == last
        results = [m["content"] for m in c.episode.messages if m["role"] == "user"]
        shown = [f"<tool_response>\n{len(text)}\n</tool_response>" for text in [*before, last] if len(text) % 2]
        assert results == shown
        assert c.episode.done == (len(last) % 2 == 0)
        counts.add(c.episode.tool_calls)
    assert {0, 1} <= counts


def test_a_failure_is_raised_where_the_sampler_runs() -> None:
    class Breaks(Sums):
        def step(self, reply: str) -> Step:
            raise ValueError("broken")

    with pytest.raises(EpisodeError, match="'breaks' raised ValueError in step: broken"):
        played(Breaks)
    left_out = played(Breaks, on_error="none")
    assert {c.episode.reward for c in left_out if c.episode} == {None}


def test_an_environment_and_a_tool_exclude_each_other() -> None:
    marked, config = Tokenizer.from_folder(TINY), RolloutConfig(**SETTINGS, tool="calculator")
    marked.inner.add_special_tokens([*CALCULATOR_MARKERS])
    with pytest.raises(RecipeError, match=r"rollout\.tool"):
        RolloutWorker(worker().model, marked, config, EnvironmentRunner(Sums))
