"""Rewards for the first-letter task: one short sentence about the topic that starts with the letter.

`first_letter` rewards the letter and `sentence` the form. The accuracy of the task is `starts_with_letter`: the
letter is right and every rule holds. Each rule blocks a form of reward hacking that code can detect: a list or a title
instead of a sentence, a bare letter in front ("B is for bread"), an echo of the request, a repeated word, a sentence
about something else. A row without a letter or a topic scores 0 for it, whatever the completion.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from covey.rewards.completions import Completions, texts

MIN_WORDS, MAX_WORDS = 3, 20
MAX_COMMAS = 2
MAX_WORD_LENGTH = 16
MIN_DISTINCT = 0.7
"""Minimum fraction of distinct words."""

_ECHOES = {"letter", "letters", "sentence", "sentences", "topic"}
_ONE_LETTER_WORDS = {"a", "A", "I"}
_DOUBLED_STARTS = {"aa", "ee", "ll", "oo"}
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|\d+")
_ENDINGS = {"s": 3, "es": 3, "'s": 3, "’s": 3, "e": 4, "ed": 4, "er": 4, "ers": 4, "ing": 4, "y": 4}
"""Ending → minimum number of letters that must remain when it is removed."""


def first_letter(
    prompts: Sequence[Any], completions: Completions, letter: Sequence[str], **columns: Any
) -> list[float]:
    """Return 1.0 when the first character is the letter in upper case, else 0.0; a leading quote or star is wrong."""
    pairs = zip(texts(completions), letter, strict=True)
    return [float(_is_given(wanted) and text.lstrip().startswith(wanted.upper())) for text, wanted in pairs]


def sentence(prompts: Sequence[Any], completions: Completions, topic: Sequence[str], **columns: Any) -> list[float]:
    """Return 1.0 for one short sentence about the topic, else half the fraction of `RULES` that hold (at most 5/12).

    The step from one broken rule to none is the largest: the reward is for a whole sentence, not for most of one.
    """
    pairs = zip(texts(completions), topic, strict=True)
    broken = [len(broken_rules(text, about)) for text, about in pairs]
    return [0.5 * (1 - count / len(RULES)) + 0.5 * (count == 0) for count in broken]


def starts_with_letter(
    prompts: Sequence[Any], completions: Completions, letter: Sequence[str], topic: Sequence[str], **columns: Any
) -> list[float]:
    """Return 1.0 when the letter is right and every rule holds, else 0.0: the accuracy of the task."""
    starts = first_letter(prompts, completions, letter)
    shapes = sentence(prompts, completions, topic)
    return [float(start == 1.0 and shape == 1.0) for start, shape in zip(starts, shapes, strict=True)]


def broken_rules(text: str, topic: str) -> list[str]:
    """Return the names of the rules for one short sentence about `topic` that `text` breaks.

    >>> broken_rules("Bees love the rain.", "rain"), broken_rules("B is for bread.", "rain")
    ([], ['about the topic', 'real words'])
    """
    text = text.strip()
    words = _WORD.findall(text)
    return [name for name, holds in RULES.items() if not holds(text, words, topic)]


def _is_one_sentence(text: str, words: list[str], topic: str) -> bool:
    """Tell whether `text` is words, plain punctuation and one final mark: no line break, quote, colon or markdown."""
    return re.fullmatch(r"[^\W_](?:[^\W_]|[ ,'’–—-])*(?<! )[.!?]", text) is not None and text.count(",") <= MAX_COMMAS


def _is_about_topic(text: str, words: list[str], topic: str) -> bool:
    """Tell whether every word of the topic except its article occurs, in singular, plural or with a common ending."""
    stems = {form for word in words for form in _stems(word)}
    wanted = [word for word in topic.lower().split() if word not in {"the", "a", "an"}] if _is_given(topic) else []
    return bool(wanted) and all(_stems(word) & stems for word in wanted)


def _does_not_repeat(text: str, words: list[str], topic: str) -> bool:
    """Tell whether no word occurs twice in a row, no long word three times, and most words are distinct."""
    lower = [word.lower() for word in words]
    often = any(count > 2 and len(word) > 3 for word, count in Counter(lower).items())
    twice_running = any(a == b for a, b in pairwise(lower))
    return not often and not twice_running and len(set(lower)) >= MIN_DISTINCT * len(lower)


def _is_given(column: Any) -> bool:
    """Tell whether a row has a text in this column; it is None when only other rows have the column."""
    return isinstance(column, str) and column.strip() != ""


def _is_word(word: str) -> bool:
    """Tell whether `word` is a number, or letters with a vowel and no initial stutter; single letters: "a", "I"."""
    if word.isdigit() or len(word) == 1:
        return word.isdigit() or word in _ONE_LETTER_WORDS
    lower = word.lower()
    stutters = lower[0] == lower[1] and lower[:2] not in _DOUBLED_STARTS
    return not stutters and len(word) <= MAX_WORD_LENGTH and re.search("[aeiouyà-ÿ]", lower) is not None


def _stems(word: str) -> set[str]:
    """Return the stems under which forms count as one word: "parties" and "party", "dancing" and "dancer"."""
    lower = word.lower()
    cut = {lower.removesuffix(ending) for ending, left in _ENDINGS.items() if len(lower) - len(ending) >= left}
    return {lower, *cut, *([f"{lower[:-3]}y"] if lower.endswith("ies") else [])}


RULES: dict[str, Callable[[str, list[str], str], bool]] = {
    "one sentence": _is_one_sentence,
    "short": lambda text, words, topic: MIN_WORDS <= len(words) <= MAX_WORDS,
    "about the topic": _is_about_topic,
    "real words": lambda text, words, topic: bool(words) and all(map(_is_word, words)),
    "no echo": lambda text, words, topic: not _ECHOES & {word.lower() for word in words},
    "no repetition": _does_not_repeat,
}
