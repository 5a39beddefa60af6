"""Token-exact episodes under seven real chat templates, some of which rewrite history, with random ids.

A list of tokens per sample takes the place of the sampler; everything from the environment to the packed rows is real.
`COVEY_CONVERSATIONS` sets the number of conversations for each template and setting, and `COVEY_TOKENIZER` the folder
of another tokenizer.
"""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey import EnvironmentRunner, Step
from covey.config.schema import EnvsConfig
from covey.models.spans import span_mask
from covey.packing.rows import attention_spans, pack
from covey.sampling.responder import NewBranch, Turn
from covey.sampling.scheduler import Sample
from covey.sampling.sequence import Ending, StopIds
from covey.text.tokenizer import Tokenizer
from covey.types import Branch, Completion, FinishReason, Group
from covey_envs.episodes import Episodes

COUNT = int(os.environ.get("COVEY_CONVERSATIONS", "4"))
TINY = Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama"
STOPS = {
    "Qwen-Qwen2.5-7B-Instruct": ["<|im_end|>"],
    "Qwen-Qwen3-0.6B": ["<|im_end|>"],
    "HuggingFaceTB-SmolLM3-3B": ["<|im_end|>"],
    "openai-gpt-oss-120b": ["<|return|>", "<|call|>"],
    "GLM-4.6": ["<|user|>", "<|observation|>"],
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ["<｜end▁of▁sentence｜>"],
    "mistralai-Mistral-Nemo-Instruct-2407": ["</s>"],
}
"""Tokens that end a turn of the model, by template."""
BRANCHING = STOPS.keys() - {"Qwen-Qwen2.5-7B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407"}
"""Templates that rewrite the history of some of these conversations; SmolLM3's only trims spaces."""
WORDS = ["yes", " no ", "\n", "7", "<think>", "</think>", "\n\n", "é", "…", "Answer: 12", "  "]


def tokenizer_for(name: str) -> Tokenizer:
    """The tokenizer, with the control tokens of the template."""
    plain = Tokenizer.from_folder(Path(os.environ.get("COVEY_TOKENIZER", TINY)))
    template = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()
    found = re.findall(r"<\|[a-z_]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]+\]|</?s>", template)
    plain.inner.add_special_tokens(sorted({*found, *STOPS[name]}))
    stops = [plain.inner.token_to_id(text) for text in STOPS[name]]
    return Tokenizer(plain.inner, eos_id=stops[0], stop_ids=stops, chat_template=template, bos_id=plain.bos_id)


class Talks:
    """Says something for as many turns as the row has."""

    def __init__(self, row: Any):
        self.row, self.turns = row, 0

    def reset(self) -> Any:
        return self.row["prompt"]

    def step(self, reply: str) -> Step:
        self.turns += 1
        return Step(self.row["says"][self.turns - 1], done=self.turns == len(self.row["says"]))


def conversation(rng: np.random.Generator) -> dict[str, Any]:
    def text() -> str:
        return "".join(rng.choice(WORDS[:4] + WORDS[7:], rng.integers(1, 6))) + "?"

    return {"prompt": [{"role": "user", "content": text()}], "says": [text() for _ in range(rng.integers(2, 5))]}


def turn_of(rng: np.random.Generator, tokenizer: Tokenizer) -> np.ndarray:
    """Random ids, some of them words and marks of reasoning, with a stop token or cut."""
    controls = set(tokenizer.inner.get_added_tokens_decoder())
    ids = [i for i in rng.integers(0, tokenizer.vocab_size, rng.integers(1, 6)).tolist() if i not in controls]
    words = tokenizer.encode("".join(rng.choice(WORDS, rng.integers(0, 5)))).tolist()
    end = [int(rng.choice(tokenizer.stop_ids))] if rng.random() < 0.8 else []
    return np.array([*words, *ids, *words[:2], *end] or [5], np.int32)


def play(episodes: Episodes, tokenizer: Tokenizer, number: int, prompt: np.ndarray, rng: Any) -> tuple[Completion, Any]:
    """An episode, and for each token that was drawn the tokens that were held then."""
    held, tokens, drawn, branches, seen = prompt.tolist(), [], [], [], []
    while True:
        for token in turn_of(rng, tokenizer).tolist():
            seen.append([*held])
            held.append(token)
            tokens.append(token)
            drawn.append(True)
        stopped = StopIds(tokenizer.stop_ids)(np.array(tokens, np.int32), 1)
        ending = stopped or Ending(len(tokens), FinishReason.LENGTH)
        turn = Turn(Sample(number, 0), np.array(tokens, np.int32), 10_000, ending)
        response = episodes.answer(turn).result(30)
        if response is None:
            break
        if isinstance(response, NewBranch):
            assert response.kept < len(held)
            branches.append(Branch(len(tokens), response.kept))
            held = held[: response.kept]
        new = response.tokens if isinstance(response, NewBranch) else response
        held += new.tolist()
        tokens += new.tolist()
        drawn += [False] * len(new)
    logps = np.zeros(len(tokens), np.float32)
    mask = np.array(drawn)
    completion = Completion(np.array(tokens, np.int32), logps, logps, FinishReason.STOP, mask=mask)
    return episodes.completion(number, 0, replace(completion, branches=tuple(branches))), seen


def sizes_of(prompt: int, completion: Completion) -> tuple[int, int]:
    """Number of tokens as a tree, and of all branches as sequences of their own."""
    length, branches = len(completion.tokens), [Branch(0, prompt), *(completion.branches or ())]
    ends = [*(branch.start for branch in branches[1:]), length]
    return prompt + length, sum(b.kept + end - b.start for b, end in zip(branches, ends, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("history", ["sampled", "template"])
@pytest.mark.parametrize("name", sorted(STOPS))
def test_tokens_are_trained_after_exactly_what_they_were_sampled_after(name: str, history: Any) -> None:
    rng, tokenizer = np.random.default_rng(len(name)), tokenizer_for(name)
    rows = [conversation(rng) for _ in range(COUNT)]
    config = EnvsConfig(environment="guess", history=history, timeout=0)
    with EnvironmentRunner(Talks, config) as runner:
        episodes = Episodes(runner, rows, 1, tokenizer)
        prompts = [tokenizer.encode_prompt(prompt) for prompt in episodes.begin()]
        played = [play(episodes, tokenizer, i, prompt, rng) for i, prompt in enumerate(prompts)]
    groups = [Group("", prompt, (completion,)) for prompt, (completion, _) in zip(prompts, played, strict=True)]
    packed = pack(groups, 1024)
    visible = np.asarray(span_mask(attention_spans(packed)))

    trained: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for row, column in zip(*np.nonzero(packed.scored), strict=True):
        number, index = packed.scatter_index[row, column].tolist()
        source = packed.gather_index[row, column]
        before = packed.tokens[row, visible[row, source]].tolist()
        trained[number, index] = int(packed.target[row, column]), before
    for number, (completion, seen) in enumerate(played):
        at = np.flatnonzero(completion.mask)
        assert [trained[number, i][0] for i in at] == completion.tokens[at].tolist()
        assert [trained[number, i][1] for i in at] == seen
    branched = sum(bool(completion.branches) for completion, _ in played)
    assert (branched > 0) == (history == "template" and name in BRANCHING) or COUNT < 4
    sizes = [sizes_of(len(prompt), completion) for prompt, (completion, _) in zip(prompts, played, strict=True)]
    packed_tokens, dense_tokens = map(sum, zip(*sizes, strict=True))
    print(f"{name}, {history}: {branched} of {COUNT} branch; {dense_tokens / packed_tokens:.2f} times the tokens dense")
