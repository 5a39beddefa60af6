"""Stop strings: a completion ends at the token that completes a string in its text.

The token stays in the completion, because the policy drew it and the loss needs it. The text that reward functions see
ends before the string, as in OpenAI's API and in vLLM.
"""

from collections.abc import Callable, Sequence

import numpy as np

from covey.sampling.sequence import Ending
from covey.types import FinishReason

MARGIN = 8
"""Number of characters by which the text of the last tokens may differ from the end of the text of all: a token at
either border may hold a part of a character, of up to 4 bytes.
"""


class StopStrings:
    """Stop condition: the text of the tokens contains a string.

    Args:
        strings: the strings, at least one and none empty.
        decode: function from tokens to the text that reward functions see. The text of some tokens must begin the text
            of these and more, but for a character at its end of which only a part is there.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[np.ndarray], str]):
        self._strings, self._decode = strings, decode
        self._longest = max(map(len, strings)) + MARGIN

    def __call__(self, tokens: np.ndarray, new: int) -> Ending | None:
        """Return the end at the first of the `new` tokens that completes a string."""
        known = len(tokens) - new
        start = self._start(tokens[:known])
        if self._hidden(tokens[start:]):  # mostly one text is decoded for all new tokens
            for length in range(known + 1, len(tokens) + 1):
                if hidden := self._hidden(tokens[start:length]):
                    return Ending(length, FinishReason.STOP_STRING, hidden)
        return None

    def _start(self, tokens: np.ndarray) -> int:
        """Return a place so close to the end of `tokens` that the text after it can begin a string."""
        size = self._longest
        while size < len(tokens) and len(self._decode(tokens[-size:])) < self._longest:
            size *= 2
        return max(len(tokens) - size, 0)

    def _hidden(self, tokens: np.ndarray) -> int:
        """Return the number of characters from the first string in the text of `tokens` on; 0 if there is none."""
        text = self._decode(tokens)
        places = [text.find(string) for string in self._strings if string in text]
        return len(text) - min(places) if places else 0
