"""Makes the golden numbers of the draw: keys, random words and tokens, by NumPy in float64 and without Covey.

    python tests/parity/make_draw_golden.py

Writes `golden/draw.json` beside this file. What changes it changes all samples and breaks runs that are resumed: then
`noise.DRAW_VERSION` is raised too.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 2
FILE = Path(__file__).parent / "golden" / "draw.json"
PLACES = ((0, 0, 0, 0, 0), (7, 3, 2, 1, 0), (7, 3, 2, 1, 1), (-1, 2**32 - 1, 5, 63, 4095), (2**31 - 1, 1, 0, 0, 700))
"""Seed, step, index of the prompt, number of the sample, index of the token."""
COUNTERS = (0, 1, 127, 128, 1186)
SIZES = (5, 300, 5000)
SETTINGS: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
)
MARGIN = 1e-4
"""By how much the winner of each race is ahead, so that float32 has the same one on every processor."""


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Encrypt a counter by Threefry-2x32 with 20 rounds (Salmon et al., 2011, section 4)."""
    mask, schedule = 2**32 - 1, (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + key[0]) & mask, (counter[1] + key[1]) & mask
    for number, rotation in enumerate((13, 15, 26, 6, 17, 29, 16, 24) * 3, 1):
        if number > 20:
            break
        x = (x + y) & mask
        y = (((y << rotation) | (y >> (32 - rotation))) & mask) ^ x
        if number % 4 == 0:
            turn = number // 4
            x, y = (x + schedule[turn % 3]) & mask, (y + schedule[(turn + 1) % 3] + turn) & mask
    return x, y


def key_of(seed: int, *numbers: int) -> tuple[int, int]:
    """Fold each number into the key of the seed, in turn."""
    key = (0, seed & 0xFFFFFFFF)
    for number in numbers:
        key = threefry(key, (0, number))
    return key


def exponential(word: int) -> float:
    return -np.log1p(-min((word + 0.5) / 2**32, 1 - 2**-24))


def logits_of(size: int) -> np.ndarray:
    """Numbers from 0 to 8 that float32 has exactly."""
    return (np.arange(1, size + 1, dtype=np.uint64) * 2654435761 % 2**32 >> 8) / 2**21


def masses(size: int, settings: dict[str, float]) -> np.ndarray:
    """Masses of the tokens at the temperature, 0 where top-k, then top-p, then min-p cut."""
    scaled = logits_of(size) / settings.get("temperature", 1.0)
    order = np.argsort(-scaled, kind="stable")[: int(settings.get("top_k", 0)) or None]
    mass = np.exp(scaled[order] - scaled.max())
    enough = int(np.searchsorted(np.cumsum(mass) / mass.sum(), settings.get("top_p", 1.0))) + 1
    kept = [i for i in range(len(mass)) if i < enough and mass[i] >= settings.get("min_p", 0.0)]
    out = np.zeros(size)
    out[order[kept]] = mass[kept]
    return out


def winner(scores: np.ndarray) -> int:
    best = np.sort(scores)[::-1]
    assert len(best) == 1 or best[0] > best[1] * (1 + MARGIN), "a near tie: choose other places"
    return int(np.argmax(scores))


def token(key: tuple[int, int], size: int, settings: dict[str, float]) -> int:
    """Race the blocks of equal id modulo 128, and then the tokens of the block that won."""
    if settings.get("temperature") == 0:
        return int(np.argmax(logits_of(size)))
    mass, words = masses(size, settings), [threefry(key, (0, i)) for i in range(max(128, -(-size // 128)))]
    blocks = [mass[block::128] for block in range(min(size, 128))]
    block = winner(np.array([part.sum() / exponential(words[i][0]) for i, part in enumerate(blocks)]))
    place = winner(np.array([m / exponential(words[i][1]) for i, m in enumerate(blocks[block])]))
    return 128 * place + block


def main() -> None:
    keys = [key_of(*place) for place in PLACES]
    found: dict[str, Any] = {
        "version": VERSION,
        "keys": [{"place": place, "key": key} for place, key in zip(PLACES, keys, strict=True)],
        "counters": COUNTERS,
        "words": [[threefry(key, (0, counter)) for counter in COUNTERS] for key in keys],
        "tokens": [
            {"size": size, "settings": settings, "tokens": [token(key, size, settings) for key in keys]}
            for size in SIZES
            for settings in SETTINGS
        ],
    }
    rows = [f'"{name}": {json.dumps(value)}' for name, value in found.items()]
    FILE.write_text("{\n" + ",\n".join(rows).replace("}, {", "},\n {") + "\n}\n")


if __name__ == "__main__":
    main()
