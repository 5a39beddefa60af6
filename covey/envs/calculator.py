"""The calculator as a tool: a function that the model calls by name."""

from covey.envs.calling import independent
from covey.sampling.calculator import calculate


@independent
def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers, brackets and the operators + - * / //, for example (12 + 30) / 7
    """
    value = calculate(expression)
    if value is None:
        raise ValueError(f"no value: wanted numbers, brackets and + - * / //, got {expression!r:.80}")
    return value
