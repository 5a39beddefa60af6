"""The calculator: right on ten thousand random expressions, and no text can make it slow or make it run anything."""

import dataclasses
import functools
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from covey.config.schema import CALCULATOR_MARKERS, RolloutConfig
from covey.errors import RecipeError
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.rl.rollout_worker import RolloutWorker
from covey.sampling.engine import Engine, Request, generate
from covey.sampling.logits import SamplingParams, draw, sample_keys, token_keys
from covey.sampling.responder import Turn
from covey.sampling.scheduler import Sample
from covey.sampling.sequence import Ending
from covey.text.tokenizer import Tokenizer
from covey.types import Completion, FinishReason
from covey_envs.calculator import MAX_DEPTH, MAX_LENGTH, MAX_NUMBER, Tool, calculate, make_tool
from covey_plan.sampler_programs import SamplerPrograms

RULES = {
    "neg": lambda a: -a,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: Fraction(floor(a / b)),
}
BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2}
CHARACTERS = "0123456789+-*/.e x"
SPECIALS = (*CALCULATOR_MARKERS, "<stop>", "<other>")
SHORT = dict(zip("SEOPT@", SPECIALS, strict=True))
"""S and E around a question, O and P around its answer, T stops, @ is some other control token."""
CONFIG = ModelConfig(
    vocab_size=24, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_positions=96, windows=(None, 9),
)  # fmt: skip


@dataclass
class Tree:
    """An expression as a tree: its operator ("" for a number, "neg" for a sign), and what it joins or says."""

    operator: str
    parts: tuple["Tree", ...] = ()
    number: str = ""

    def value(self) -> Fraction | None:
        """By Python's fractions, over the tree; None where something is divided by zero or beyond the limit."""
        values = [part.value() for part in self.parts]
        if None in values or (self.operator in ("/", "//") and values[1] == 0):
            return None
        value = RULES[self.operator](*values) if self.operator else Fraction(Decimal(self.number.replace(",", "")))
        return value if abs(value) <= MAX_NUMBER else None

    def text(self, rng: random.Random) -> str:
        """Written with no more brackets than needed, and now and then with more; blanks anywhere."""
        if not self.operator:
            return self.number
        blank = " " * rng.choice([0, 0, 1, 2])
        if self.operator == "neg":
            return "-" + blank + self.parts[0].inside(rng, self.parts[0].binds < 3)
        left, right = self.parts
        first = left.inside(rng, left.binds < self.binds)
        return first + blank + self.operator + blank + right.inside(rng, right.binds <= self.binds)

    def inside(self, rng: random.Random, needed: bool) -> str:
        text = self.text(rng)
        return f"({text})" if needed or rng.random() < 0.1 else text

    @property
    def binds(self) -> int:
        return BINDS.get(self.operator, 3)


def a_number(rng: random.Random) -> str:
    whole = rng.choice([rng.randrange(10), rng.randrange(100), rng.randrange(100_000), rng.randrange(10**9)])
    digits = f"{whole:,}" if rng.random() < 0.3 else str(whole)
    return digits + (f".{rng.randrange(1000)}" if rng.random() < 0.3 else "")


def a_tree(rng: random.Random, depth: int) -> Tree:
    if depth == 0 or rng.random() < 0.2:
        return Tree("", number=a_number(rng))
    if rng.random() < 0.15:
        return Tree("neg", (a_tree(rng, depth - 1),))
    return Tree(rng.choice(list(BINDS)), (a_tree(rng, depth - 1), a_tree(rng, depth - 1)))


def test_ten_thousand_random_expressions_have_the_value_of_their_tree() -> None:
    rng = random.Random(0)
    seen = {"whole": 0, "fraction": 0, "none": 0}
    for _ in range(10_000):
        tree = a_tree(rng, rng.choice([1, 2, 3]))
        text, want = tree.text(rng), tree.value()
        got = calculate(text)
        if want is None:
            seen["none"] += 1
            assert got is None, text
        elif want.denominator == 1:
            seen["whole"] += 1
            assert got == str(want.numerator), text
        else:
            seen["fraction"] += 1
            assert got == repr(want.numerator / want.denominator), text
    assert min(seen.values()) > 300, seen


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12/60", "0.2"),
        ("48/2", "24"),  # as the annotations of GSM8K have it; a float would say 24.0
        ("0.1+0.2", "0.3"),  # a float would say 0.30000000000000004
        ("1/3", "0.3333333333333333"),
        ("10-3-2", "5"),
        ("16/4/2", "2"),
        ("2+3*4", "14"),
        ("-2*-3", "6"),
        ("--2", "2"),
        ("+5", "5"),
        ("-7//2", "-4"),
        ("1,250.50*2", "2501"),
        (" ( 1 + 1 ) ", "2"),
        (".5+5.", "5.5"),
        ("0-0", "0"),
        ("007", "7"),
        ("1/10000000", "1e-07"),
        ("'strawberry'.count('r')", "3"),
        ('"strawberry".count("rr") + 1', "2"),
        ("'a,b,c'.count(',')", "2"),
        ("'a'.count('')", "2"),
    ],
)  # fmt: skip
def test_worked_values(text: str, value: str) -> None:
    assert calculate(text) == value


REFUSED = [
    "", " ", "1 2", "1,,2", "5,", ",5", "1.2.3", "2+", "*2", "(1", "1)", "()", "1/0", "0/0", "1//0", "3/(2-2)", "5%",
    "$5", "=", "1=1", "1<2", "2^3", "2**3", "9**9**9**9", "2* *3", "1e5", "1_000", "0x10", "1j", "٣+٣", "１+１", "−1",
    "x", "pi", "abs(-1)", "print(1)", "__import__('os')", "exit()", "().__class__", "'a'", "'a'+'b'", "'a'*9",
    "'a'.upper()", "'a'.__class__", "'a'.count", "'a'.count()", "'a'.count(1)", "'a'.count('a', 1)", "'a'.counts('a')",
    "'a'.count('a').count('a')", "3.count('a')", "'a\\x41'.count('a')", "'a\nb'.count('a')", "'a.count('a')",
    "f'{1}'.count('1')", "lambda: 1", "[1]", "1 if 1 else 2", "1;2", "1#2", "a" * 100, "\x00", "\ud800",
    "9" * 31, "9" * MAX_LENGTH, "9" * 1_000_000, "*".join(["9" * 16] * 2), "0." + "0" * 1_000_000, f"1{'0' * 30}*10",
    "(" * MAX_LENGTH, "(" * 1_000_000, "-" * MAX_LENGTH + "1", "(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1),
    "'" + "a" * 1_000_000 + "'.count('a')", "'a'*1000000000", "1+" * 1_000_000 + "1",
    "'" * MAX_LENGTH, "/" * MAX_LENGTH,
]  # fmt: skip
SLOWEST = [
    "+".join(f"1/{n}" for n in range(101, 200))[:254], "1/7/" * 63 + "1", "1*" * 127 + "1", "1/3-" * 63 + "1",
    "'a'.count('')" + "+'a'.count('')" * 17, ".".join(["1"] * 128), ",".join(["1"] * 128), " " * MAX_LENGTH,
]  # fmt: skip


def timed(text: str) -> tuple[str | None, float]:
    """What `calculate` says, and the seconds of this thread's own time that it took."""
    start = time.thread_time()
    found = calculate(text)
    return found, time.thread_time() - start


def test_what_is_no_arithmetic_or_too_large_is_refused_at_once_from_any_thread() -> None:
    """The traps: eval behind a filter of characters, and a time limit by signal, which only the main thread has."""
    texts = [text for text in REFUSED for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        for text, (found, seconds) in zip(texts, pool.map(timed, texts), strict=True):
            assert found is None, text[:80]
            assert seconds < 0.010, text[:80]
        assert max(seconds for _, seconds in pool.map(timed, SLOWEST)) < 0.010


def test_the_limits_are_the_last_values_within() -> None:
    assert calculate(str(MAX_NUMBER)) == str(MAX_NUMBER)
    assert calculate(f"{MAX_NUMBER}+1-1") is None  # on the way too
    assert calculate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == "1"
    assert calculate("1" + "+1" * ((MAX_LENGTH - 1) // 2)) == str(1 + (MAX_LENGTH - 1) // 2)
    assert calculate(" " * (MAX_LENGTH - 1) + "1") == "1"


@given(st.one_of(st.text(), st.text(alphabet="0123456789.,+-*/() '\"countr")))
def test_any_text_gives_a_number_or_nothing(text: str) -> None:
    found, seconds = timed(text)
    assert found is None or len(found) <= 32
    assert found is None or abs(Fraction(found)) <= MAX_NUMBER
    assert seconds < 0.010


def made_tokenizer(specials: tuple[str, ...] = SPECIALS, stop: str = "<stop>") -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, []))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(list(specials))
    return Tokenizer(inner, eos_id=inner.token_to_id(stop))


TOKENIZER = made_tokenizer()


def ids(short: str) -> np.ndarray:
    """`"S6*7E"` → int32 [n]."""
    return TOKENIZER.encode("".join(SHORT.get(character, character) for character in short))


def short(tokens: np.ndarray) -> str:
    """The inverse of `ids`."""
    text = TOKENIZER.decode(tokens, skip_special=False)
    for character, special in SHORT.items():
        text = text.replace(special, character)
    return text


def following(successors: dict[str, str], logit: float, *, attention: bool) -> Decoder:
    """A decoder in which each token gives its `successors` about this `logit`, more to those written more than once,
    and all others 0.
    """
    model = Decoder(CONFIG, rngs=nnx.Rngs(1))
    head = np.zeros((24, 32), np.float32)
    for token, after in successors.items():
        for one in after:  # the norm makes √32 of a one-hot embedding
            head[ids(one)[0], ids(token)[0]] = (logit + np.log(after.count(one))) / 32**0.5
    model.embed.embedding[...] = jnp.eye(24, 32)
    model.head.embedding[...] = head
    for layer in model.layers:
        for out in (layer.attn.o_proj, layer.mlp.down_proj):
            out.kernel[...] = out.kernel[...] * (0.2 if attention else 0.0)
    return model


TALK = {
    **dict.fromkeys("0123456789", "+-*/EEEEEE123"), **dict.fromkeys("+-*/.", "123456789"), "S": "123456789", "E": "xS",
    "P": "xSSSE", "x": "SSSE", "O": "1", "e": "1", " ": "S", "T": "x", "@": "S",
}  # fmt: skip


@functools.cache
def talker() -> tuple[Any, Any]:
    """Graph and weights of the model that talks; made late, since every worker imports this file."""
    return nnx.split(following(TALK, 4.5, attention=True))


@functools.cache
def shared_engine() -> Engine:
    """One for all, so that its programs are compiled once."""
    return Engine(nnx.merge(*talker()), TOKENIZER.stop_ids, RolloutConfig())


LIMIT, STEP = 48, 1
BASE: dict[str, Any] = {"max_new_tokens": LIMIT, "temperature": 0.9, "top_k": 20, "slots": 16, "tool": "calculator"}
TOOL = make_tool(TOKENIZER, RolloutConfig(**BASE))
PROMPTS = ["x", "1+1xx", "S12", "x 9 x"]


def requests() -> list[Request]:
    return [Request(ids(text), 8, index, step=STEP) for index, text in enumerate(PROMPTS)]


def sample(wanted: list[Request], tool: Tool | None = TOOL, **settings: Any) -> list[list[Completion]]:
    return run([dataclasses.replace(one, responder=tool) for one in wanted], RolloutConfig(**{**BASE, **settings}))


def run(wanted: list[Request], config: RolloutConfig, params: Any = None) -> list[list[Completion]]:
    shared_engine().configure(config)
    shared_engine().update_weights(talker()[1] if params is None else params)
    return generate(shared_engine(), wanted)


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


@pytest.fixture(scope="module")
def drawn() -> list[list[Completion]]:
    return sample(requests())


# --- what is asked, and what is put there


@pytest.mark.parametrize(
    ("before", "answer"),
    [
        ("S6*7E", "O42P"),
        ("x1S12/60E", "O0.2P"),
        ("S1-9E", "O-8P"),
        ("S1+1EO2PxS3+3E", "O6P"),
        ("S1+1ES3+3E", "O6P"),
        ("S9S6*7E", "O42P"),  # a second start begins the question anew
        ("S6*E", ""),
        ("S6/0E", ""),
        ("S6x7E", ""),
        ("S6@7E", ""),  # a control token is not swallowed: 6 and 7 are not 67
        ("S6OE", ""),
    ],
)
def test_the_question_is_what_stands_since_the_last_start(before: str, answer: str) -> None:
    assert short(TOOL.respond(ids(before))) == answer


@pytest.mark.parametrize(("reason", "answer"), [(FinishReason.STOP, "O42P"), (FinishReason.STOP_STRING, None)])
def test_a_stop_string_ends_a_question_without_an_answer(reason: FinishReason, answer: str | None) -> None:
    tokens = ids("S6*7E")
    response = TOOL.answer(Turn(Sample(0, 0), tokens, 10, Ending(len(tokens), reason)))
    assert (None if response is None else short(response)) == answer


def test_without_an_open_question_the_tool_is_not_asked() -> None:
    asked: list[str] = []
    tool = dataclasses.replace(TOOL, evaluate=lambda text: asked.append(text) or "1")
    for before in ("E", "6*7E", "SE", "S6*7EE", "S6*7EO42P1E"):
        assert short(tool.respond(ids(before))) == ""
    assert asked == []


@pytest.mark.parametrize(
    ("links", "stream", "cut"),
    [
        (["xS6*7E", "Px"], "S6*7EO42PxS6*7EO42PxS6*7EO42PxS6", True),  # several calls
        (["xS7/2E", "PT"], "S7/2EO3.5PT", True),
        (["xS6*7ET", "PE"], "S6*7EO42PET", False),  # an end behind an answer asks nothing
        (["x6*E7T"], "6*E7T", False),
        (["xSE7T"], "SE7T", False),
        (["xS7/E9T"], "S7/E9T", False),
        (["xS7/0E9T"], "S7/0E9T", False),
        (["xS9*8@7E6T"], "S9*8@7E6T", False),
    ],
)
@pytest.mark.slow
def test_completions_known_beforehand(links: list[str], stream: str, cut: bool) -> None:
    """Greedy, one successor a token (`"xS6"`: x is followed by S, S by 6); some are cut at every place."""
    successors = {a: b for link in links for a, b in pairwise(link)}
    _, params = nnx.split(following(successors, 9.0, attention=False))
    for limit in range(1 if cut else len(stream), len(stream) + 1):
        config = RolloutConfig(max_new_tokens=limit, temperature=0.0, slots=1, decode_chunk=4)
        ((got,),) = run([Request(ids("x"), responder=TOOL)], config, params)
        assert short(got.tokens) == stream[:limit]
        assert got.mask.tolist() == known_mask(stream[:limit])
        assert got.finish is (FinishReason.STOP if stream[:limit].endswith("T") else FinishReason.LENGTH)


def known_mask(stream: str) -> list[bool]:
    mask, answer = [], False
    for character in stream:
        answer |= character == "O"
        mask.append(not answer)
        answer &= character != "P"
    return mask


def replay(completion: Completion) -> Counter[str]:
    """Checks a completion token by token, with the bookkeeping of nanochat's engine, and counts what happened."""
    inside, asked, due, seen = False, [], [], Counter[str]()
    start, end, output_start, output_end = TOOL.markers
    for token, drawn in zip(completion.tokens.tolist(), completion.mask.tolist(), strict=True):
        assert drawn == (not due)
        if due:
            assert token == due.pop(0)
        elif token == start:
            seen["nested"] += inside
            inside, asked = True, []
        elif token == end and inside:
            result = calculate(TOKENIZER.decode(asked, skip_special=False)) if asked else None
            due = [] if result is None else [output_start, *TOKENIZER.encode(result).tolist(), output_end]
            seen["answered" if due else "unanswered"] += 1
            inside = False
        elif token == end:
            seen["stray"] += 1
        elif inside:
            asked.append(token)
    seen["cut"] = bool(due) and not completion.mask[-1]
    assert not due or len(completion.tokens) == LIMIT
    return seen


@pytest.mark.slow
def test_every_answer_stands_behind_its_question_and_nowhere_else(drawn: list[list[Completion]]) -> None:
    counts = [replay(completion) for completion in flat(drawn)]
    seen = sum(counts, Counter())
    assert min(seen[what] for what in ("answered", "unanswered", "nested", "stray", "cut")) > 0, seen
    assert max(count["answered"] for count in counts) >= 3


# --- the cache, the noise, the schedule


@jax.jit
def plain_logits(params: Any, tokens: np.ndarray) -> jax.Array:
    model = nnx.merge(talker()[0], params)
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _ = model(tokens, positions, causal_attention(jnp.ones(tokens.shape, bool), positions))
    return model.logits(hidden)[0]


def logits_at(prompt: np.ndarray, tokens: np.ndarray) -> jax.Array:
    """The plain forward's logits from which each of `tokens` was to be predicted."""
    full = np.concatenate([prompt, tokens, np.zeros(64 - len(prompt) - len(tokens), np.int32)])
    return plain_logits(talker()[1], full[None])[len(prompt) - 1 :][: len(tokens)]


@pytest.mark.slow
def test_logps_equal_the_trainers_over_the_whole_stream(drawn: list[list[Completion]]) -> None:
    """Behind an answer too: its tokens went through the cache at their own places."""
    for request, group in zip(requests(), drawn, strict=True):
        for c in group:
            logps = jax.nn.log_softmax(logits_at(request.prompt, c.tokens) / 0.9)
            logps = np.where(c.mask, np.asarray(logps)[np.arange(len(c.tokens)), c.tokens], 0)
            np.testing.assert_allclose(c.logps, logps, atol=1e-4)
            assert (c.sampler_logps[~c.mask] == 0).all()


@pytest.mark.slow
def test_noise_depends_on_the_place_in_the_completion_whatever_was_put_before_it(drawn: list[list[Completion]]) -> None:
    redraw = jax.jit(lambda logits, keys: draw(logits, keys, SamplingParams(0.9, top_k=20)))
    for request, group in zip(requests(), drawn, strict=True):
        for number, c in enumerate(group):
            key = sample_keys(0, np.array([[STEP, request.index, number]], np.uint32))
            keys = token_keys(key, np.arange(LIMIT))
            logits = jnp.zeros((LIMIT, 24)).at[: len(c.tokens)].set(logits_at(request.prompt, c.tokens))
            token, _, sampler_logp = redraw(logits, keys)
            size = len(c.tokens)
            assert (np.asarray(token)[:size] == c.tokens)[c.mask].all()
            np.testing.assert_allclose(np.asarray(sampler_logp)[:size][c.mask], c.sampler_logps[c.mask], atol=1e-4)


@pytest.mark.slow
def test_samples_do_not_depend_on_slots_chunks_or_order(drawn: list[list[Completion]]) -> None:
    same(drawn, sample(requests()[::-1], slots=3, decode_chunk=5)[::-1])


def same(a: list[list[Completion]], b: list[list[Completion]]) -> None:
    for one, other in zip(flat(a), flat(b), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.mask is None) == (other.mask is None)
        assert one.mask is None or one.mask.tolist() == other.mask.tolist()
        assert one.finish == other.finish
        np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)
        np.testing.assert_allclose(one.sampler_logps, other.sampler_logps, atol=1e-5)


@pytest.mark.slow
def test_a_tool_that_never_answers_changes_nothing() -> None:
    silent = dataclasses.replace(TOOL, evaluate=lambda text: None)
    with_tool, without = sample(requests(), silent), sample(requests(), None)
    assert all(c.mask.all() for c in flat(with_tool))
    assert all(c.mask is None for c in flat(without))
    assert sum(int(TOOL.markers.end in c.tokens) for c in flat(without)) > 20  # it was asked often enough
    for one, other in zip(flat(with_tool), flat(without), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)


def test_a_tool_costs_the_decode_program_no_input() -> None:
    """What a tool answers is appended by a program of its own, so its decode steps are those of a run without one."""
    config = RolloutConfig(decode_chunk=4)
    made, params = shared_engine().programs, talker()[1]
    programs = [SamplerPrograms(made, params).decode(8, 128, config, pause_id) for pause_id in (None, 20)]
    plain, with_tool = ([x.shape for x in jax.tree.leaves(program.args)] for program in programs)
    assert plain == with_tool


# --- the worker


def worker(**settings: Any) -> RolloutWorker:
    base = {"max_prompt_length": 8, "max_new_tokens": 24, "slots": 1, "decode_chunk": 4, "temperature": 0.0}
    model = following({**dict(zip("xS6*7", "S6*7E", strict=True)), "P": "@", "@": "9", "9": "T"}, 9.0, attention=False)
    return RolloutWorker(model, TOKENIZER, RolloutConfig(**{**base, **settings}))


@pytest.mark.slow
def test_the_answer_is_visible_in_the_text_and_a_call_may_turn_the_tool_on() -> None:
    """Without the markers the text would read 6*7429. Other control tokens are left out as ever."""
    made = worker()
    ((plain,),) = (group.completions for group in made.generate([{"prompt": "x"}], 1))
    assert plain.text.startswith("6*7")
    assert "42" not in plain.text
    assert plain.mask is None
    config = dataclasses.replace(made.config, tool="calculator")
    ((asked,),) = (group.completions for group in made.generate([{"prompt": "x"}], 1, config=config))
    assert asked.text == "<|python_start|>6*7<|python_end|><|output_start|>42<|output_end|>9"
    assert asked.mask.tolist() == known_mask("S6*7EO42P@9T")


def test_a_tool_without_its_markers_is_an_error_that_names_them() -> None:
    bare = made_tokenizer(("<stop>", "<|python_start|>", "<|python_end|>", "<|output_end|>"))
    with pytest.raises(RecipeError, match=r"no token '<\|output_start\|>'"):
        make_tool(bare, RolloutConfig(tool="calculator"))
    with pytest.raises(RecipeError, match=r"<\|python_end\|>' is a stop token"):
        make_tool(made_tokenizer(stop="<|python_end|>"), RolloutConfig(tool="calculator"))


@pytest.mark.parametrize("markers", [(), ("<other>",), ("<other>",) * 4, (*CALCULATOR_MARKERS, "<other>")])
def test_markers_are_four_and_different(markers: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError, match="four different tokens"):
        make_tool(TOKENIZER, RolloutConfig(tool="calculator", tool_markers=markers))


def test_a_prompt_and_answer_beyond_the_models_positions_are_refused_up_front() -> None:
    """The trap: positions that the model never saw, without a word."""
    with pytest.raises(RecipeError, match=r"max_prompt_length = 73 .* 97 tokens(.|\n)*at most 96"):
        worker(max_prompt_length=73)
    made = worker(max_prompt_length=72)
    with pytest.raises(RecipeError, match="at most 96"):
        made.generate([{"prompt": "x"}], 1, config=RolloutConfig(max_prompt_length=72, max_new_tokens=25))
