"""Counters of the server in the text format of Prometheus, with the names of vLLM under the prefix `covey:`."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

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

    def lines(self, name: str) -> Iterator[str]:
        """Yield the lines of this histogram."""
        yield f"# TYPE {name} histogram"
        below = 0
        for end, count in zip([*map(str, self.ends), "+Inf"], self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{end}"}} {below}'
        yield from (f"{name}_sum {self.total}", f"{name}_count {below}")


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
        gauges = {"num_requests_running": running, "num_requests_waiting": waiting}
        lines = [x for name, value in gauges.items() for x in _lines(name, "gauge", {"": value})]
        lines += _lines("prompt_tokens_total", "counter", {"": self.tokens["prompt"]})
        lines += _lines("generation_tokens_total", "counter", {"": self.tokens["completion"]})
        lines += _lines("request_success_total", "counter", _labelled("finished_reason", self.finished))
        lines += _lines("request_errors_total", "counter", _labelled("status", self.refused))
        lines += self.first_token.lines("covey:time_to_first_token_seconds")
        lines += self.whole.lines("covey:e2e_request_latency_seconds")
        return "\n".join(lines) + "\n"


def _labelled(label: str, counts: "Counter[str] | Counter[int]") -> dict[str, int]:
    return {f'{{{label}="{value}"}}': count for value, count in counts.items()}


def _lines(name: str, kind: str, values: dict[str, int]) -> Iterator[str]:
    yield f"# TYPE covey:{name} {kind}"
    yield from (f"covey:{name}{labels} {value}" for labels, value in values.items())
