"""Checks of the keywords of learners and clusters, with the same errors as those of settings (`config.base`)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from covey.config import suggestions
from covey.config.base import classes_in, shortened
from covey.errors import RecipeError, raise_together


class Keywords:
    """Base class whose constructor refuses unknown keywords, with suggestions, and settings of a wrong class."""

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        """Refuse arguments that the constructor does not accept.

        Raises:
            RecipeError: arguments are invalid; the error lists all of them.
        """
        raise_together(list(_mistakes(cls, args, keywords)))
        return super().__new__(cls)

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        suggestions.register(cls)


def _mistakes(cls: type, args: Sequence[Any], keywords: Mapping[str, Any]) -> Iterator[RecipeError]:
    if (known := suggestions.keywords_of(cls)) is None:
        return
    for name in keywords:
        if name not in known:
            yield RecipeError(f"{cls.__name__} has no keyword {name!r}", fix=suggestions.suggest(cls, name))
    for name, value in [*zip(known, args, strict=False), *keywords.items()]:
        wanted = classes_in(known.get(name))
        if wanted and value is not None and not isinstance(value, tuple(wanted)):
            want = " or ".join(f"{one.__name__}(...)" for one in wanted)
            yield RecipeError(f"{name} is {shortened(value)}", want=want, where=cls.__name__)
