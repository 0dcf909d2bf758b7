"""The size of the model of the comparison; light, so that a bad size is refused before torch is
imported.
"""

import math
import re
from dataclasses import dataclass

__all__ = ["HEAD_WIDTH", "ModelSize", "parse_size"]

HEAD_WIDTH = 32
_NAMED_SIZES = {"tiny": (64, 2), "small": (128, 4), "medium": (256, 4), "large": (512, 6)}
_SMALLEST, _LARGEST = 20_000, 200_000_000


@dataclass(frozen=True)
class ModelSize:
    """Size of the transformer.

    Attributes:
        width: Features per position, a multiple of 32.
        layers: Blocks of attention and feed-forward.
        context: Positions that the model sees, in bytes.
    """

    width: int
    layers: int
    context: int = 128


def parse_size(text: str) -> ModelSize:
    """The shape for a name ("tiny", "small", "medium", "large") or a number of parameters ("3M",
    "500k", "1000000").

    A number is met as closely as four layers and a width that is a multiple of 32 allow.

    Raises:
        ValueError: Neither a name nor a number, or outside 20k to 200M.
    """
    word = text.strip().lower()
    if word in _NAMED_SIZES:
        return ModelSize(*_NAMED_SIZES[word])
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", word)
    if match is None:
        raise ValueError(
            f"size={text!r} is not a size: {', '.join(_NAMED_SIZES)}, or a number of parameters "
            "such as 3M"
        )
    count = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6}[match[2]]
    if not _SMALLEST <= count <= _LARGEST:
        raise ValueError(f"size={text!r} is out of range: 20k to 200M parameters are allowed")
    width = round(math.sqrt(count / (12 * 4)) / HEAD_WIDTH) * HEAD_WIDTH
    return ModelSize(max(width, HEAD_WIDTH), 4)
