"""Responders: where the model halts, a responder returns tokens to append before the completion goes on, or ends it.

    … tokens of the model ─▶ halt ─▶ responder ─▶ tokens to append ─▶ tokens of the model …

A tool is a responder that answers at once; an environment may take seconds. The sampler knows neither: it asks for a
response, and decodes other samples until the response is there.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from covey.sampling.scheduler import Sample
from covey.sampling.sequence import Ending
from covey.text.tokenizer import Tokenizer
from covey.types import Completion, Prompt


class NewBranch(NamedTuple):
    """Response that rewrites the history: the sequence goes on as a new branch.

    Attributes:
        kept: number of tokens that stay of the sequence so far, which begins with the prompt; fewer than it has.
        tokens: tokens to append to the kept ones, int32 [n], at least one.
    """

    kept: int
    tokens: np.ndarray


Response = np.ndarray | NewBranch | None
"""Tokens to append, int32 [n], maybe none; or a new branch; or None when the completion ends here."""


class Turn(NamedTuple):
    """A sample that has halted: at a stop token or string, at the responder's token, or at a limit.

    Attributes:
        sample: the sample, by its request and its number.
        tokens: int32 [n], the completion so far.
        remaining_tokens: number of tokens that the completion may still have, the response included.
        ending: end of the turn.
    """

    sample: Sample
    tokens: np.ndarray
    remaining_tokens: int
    ending: Ending


class Responder(Protocol):
    """Responder to the turns of completions."""

    @property
    def pause_id(self) -> int | None:
        """Token at which a sample halts, besides the stop tokens; None for none."""

    @property
    def turn_limit(self) -> int | None:
        """Maximum number of tokens that the model draws in a turn; None for the limit of the completion alone."""

    @property
    def is_async(self) -> bool:
        """Whether a response may come later. Then no shape, and so no sample, depends on the time when one comes."""

    @property
    def answer_lag(self) -> int | None:
        """Number of chunks of decode steps after which a later response is taken, and waited for, so that no order
        depends on the time either; None to take it as soon as it is there.
        """

    @property
    def max_num_seqs(self) -> int | None:
        """Maximum number of samples begun and not finished; None for the number of slots. While a sample waits, another
        may have its slot.
        """

    def answer(self, turn: Turn) -> "Response | Future[Response]":
        """Return the response to `turn`, now or later. One that exceeds `turn.remaining_tokens` is cut there and ends
        the completion; a `NewBranch` must not. An exception, the future's too, comes out of `Engine.step`, and the
        request is cancelled.
        """


class TextResponder(Responder, Protocol):
    """Responder that also knows the text of a completion, as the tool that `rollout.tool` names."""

    def text(self, tokens: np.ndarray) -> str:
        """Decode a completion, with calls and responses between their markers."""


class SamePrompt(NamedTuple):
    """Samples of a row that begin with the same prompt: a request to the sampler.

    Attributes:
        row: index of the row.
        first: number of the first of them among the samples of the row.
        size: number of them.
    """

    row: int
    first: int
    size: int


class Conversations(Responder, Protocol):
    """Responder that begins and ends the samples of a call too, as the episodes of an environment.

    Attributes:
        requests: samples that begin with the same prompt, in the order of the prompts that `begin` returns.
    """

    requests: list[SamePrompt]

    def begin(self) -> list[Prompt]:
        """Return the prompt of each of `requests`."""

    def encode_prompt(self, prompt: Prompt) -> np.ndarray:
        """Encode a prompt that `begin` returned to int32 [n]."""

    def completion(self, request: int, number: int, completion: Completion) -> Completion:
        """Return a finished completion with its text and how it ended."""

    def warn_of_waiting(self, slots: int, seconds: float, chunk_seconds: float) -> None:
        """Warn if the slots waited much for responses."""


class ResponderFactory(Protocol):
    """Maker of the responders of each call, as `covey_envs.runner.EnvironmentRunner` is: learners and rollouts know no
    more of environments.

    Attributes:
        name: name in metrics and errors.
        scores: whether its episodes have rewards.
        failed: number of failures so far.
    """

    name: str
    scores: bool
    failed: int

    @property
    def rehearses(self) -> bool:
        """Whether a row is to be played before the run."""

    @property
    def groups_prompts(self) -> bool:
        """Whether samples of a row may begin with different prompts; samples with equal prompts are compared."""

    def prepare(self, template: str | None) -> None:
        """Prepare for a model with this chat template."""

    def keep_order(self) -> None:
        """Take responses in an order that does not follow the clock."""

    def prompt_encoder(self, tokenizer: Tokenizer) -> Callable[[Prompt], np.ndarray] | None:
        """Return the function that encodes the prompt of a row; None if the prompt is known only in an episode."""

    def episodes(self, rows: Sequence[Mapping[str, Any]], samples: int, tokenizer: Tokenizer) -> Conversations:
        """Return the responder of the samples of some rows."""

    def metrics(self, table: Any) -> Mapping[str, float]:
        """Compute the metrics of the episodes of a step from the table of its groups (`covey.rl.step_data`)."""

    def rehearse(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Play a row before the run."""

    def count_elsewhere(self, failures: int, total: int) -> None:
        """Count failures of other processes."""
