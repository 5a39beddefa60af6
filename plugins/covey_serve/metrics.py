"""Counters of the server in the text format of Prometheus, with the names of vLLM under the prefix `covey:`."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper ends of the classes of times."""


class Histogram:
    """Number of values in each class, and their sum."""

    def __init__(self, ends: Sequence[float] = SECONDS):
        self.ends, self.counts, self.total = ends, [0] * (len(ends) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.ends, value)] += 1
        self.total += value

    def samples(self) -> dict[str, float]:
        """Return the numbers of this histogram by the rest of their names: each class counts those below it too."""
        ends = [*map(str, self.ends), "+Inf"]
        below = dict(zip(ends, accumulate(self.counts), strict=True))
        buckets = {f'_bucket{{le="{end}"}}': count for end, count in below.items()}
        return buckets | {"_sum": self.total, "_count": below["+Inf"]}


class Metrics:
    """Counters since the server began.

    Attributes:
        tokens: tokens of prompts and of completions.
        finished: completions by the reason of their end.
        refused: requests that ended in an error, by HTTP status.
        first_token, whole: seconds to the first token and to the end of an answer.
    """

    def __init__(self) -> None:
        self.tokens, self.finished, self.refused = Counter[str](), Counter[str](), Counter[int]()
        self.first_token, self.whole = Histogram(), Histogram()

    def text(self, running: int, waiting: int) -> str:
        """Return all numbers, with those of samples that run and wait now."""
        families: dict[str, tuple[str, dict[str, float]]] = {
            "num_requests_running": ("gauge", {"": running}),
            "num_requests_waiting": ("gauge", {"": waiting}),
            "prompt_tokens_total": ("counter", {"": self.tokens["prompt"]}),
            "generation_tokens_total": ("counter", {"": self.tokens["completion"]}),
            "request_success_total": ("counter", _labelled("finished_reason", self.finished)),
            "request_errors_total": ("counter", _labelled("status", self.refused)),
            "time_to_first_token_seconds": ("histogram", self.first_token.samples()),
            "e2e_request_latency_seconds": ("histogram", self.whole.samples()),
        }
        lines = list[str]()
        for name, (kind, samples) in families.items():
            lines.append(f"# TYPE covey:{name} {kind}")
            lines += [f"covey:{name}{rest} {value}" for rest, value in samples.items()]
        return "\n".join(lines) + "\n"


def _labelled(label: str, counts: "Counter[str] | Counter[int]") -> dict[str, float]:
    return {f'{{{label}="{value}"}}': count for value, count in counts.items()}
