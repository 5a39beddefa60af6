"""The first-letter task: one short sentence about a topic that starts with a given letter.

Every topic is paired with every letter. A quarter of the topics is held out: training has no (topic, letter) pair of
the test set and none of its topics. The topics of the examples in the prompt are in neither set. Letters that few
English sentences start with are left out. The prompt contains two worked examples: without them a model of 135M
parameters writes about the letter instead of using it, at twice the length.
"""

import random

from covey.data.rows import Row, chat

LETTERS = "ABCDEFGHILMNOPRSTW"
"""Letters a sentence may have to start with: all but J, K, Q, U, V, X, Y and Z."""

SYSTEM = "You write one short sentence."

FEW_SHOT = (
    ("the sky", "B", "Bright stars fill the sky at night."),
    ("tea", "M", "My mother drinks hot tea every morning."),
)
"""Topic, letter and sentence of the examples in every prompt."""

TEST_FRACTION = 0.25
"""Share of the topics that only the test set has."""

TOPICS = (
    "apples", "autumn", "babies", "beaches", "bears", "bees", "bicycles", "birds", "boats", "books", "bread", "bridges",
    "butterflies", "cakes", "candles", "cars", "castles", "cats", "chairs", "cheese", "chess", "chickens", "chocolate",
    "cities", "clocks", "clouds", "coffee", "cows", "dancing", "deserts", "doctors", "dogs", "dolphins", "dragons",
    "dreams", "eggs", "elephants", "farmers", "fire", "fish", "flowers", "football", "forests", "friends", "frogs",
    "gardens", "gold", "grandmothers", "hats", "honey", "horses", "houses", "ice cream", "islands", "kings", "kitchens",
    "lions", "maps", "milk", "mirrors", "money", "monkeys", "mountains", "movies", "music", "nurses", "oranges", "owls",
    "painting", "parks", "pens", "phones", "pirates", "pizza", "planes", "rabbits", "rain", "rivers", "robots", "roses",
    "schools", "ships", "shoes", "snow", "soup", "spring", "storms", "summer", "teachers", "the moon", "the ocean",
    "the sun", "trains", "trees", "whales", "winter",
)  # fmt: skip


def make_rows(seed: int) -> tuple[list[Row], list[Row]]:
    """Make shuffled training and test rows (`prompt`, `topic`, `letter`); the seed picks the held-out topics."""
    rng = random.Random(seed)
    topics = rng.sample(TOPICS, len(TOPICS))
    cut = round(len(topics) * TEST_FRACTION)
    return _rows(topics[cut:], rng), _rows(topics[:cut], rng)


def _rows(topics: list[str], rng: random.Random) -> list[Row]:
    pairs = [(topic, letter) for topic in topics for letter in LETTERS]
    rng.shuffle(pairs)
    return [{"prompt": _prompt(topic, letter), "topic": topic, "letter": letter} for topic, letter in pairs]


def _prompt(topic: str, letter: str) -> list[dict[str, str]]:
    shown = [text for about, first, sentence in FEW_SHOT for text in (_request(about, first), sentence)]
    return chat(*shown, _request(topic, letter))


def _request(topic: str, letter: str) -> str:
    return f"Write one short sentence about {topic} that starts with the letter {letter}."
