"""The size of the model of the comparison; light, so that a bad size is refused before torch is
imported.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["HEAD_WIDTH", "MODELS", "ConvolutionSize", "ModelSize", "parse_size", "size_of"]

HEAD_WIDTH = 32
_NAMED_SIZES = {"tiny": (64, 2), "small": (128, 4), "medium": (256, 4), "large": (512, 6)}
_NAMED_WIDTHS = {"tiny": 28, "small": 84, "medium": 160, "large": 388}
_SMALLEST, _LARGEST = 20_000, 200_000_000


@dataclass(frozen=True)
class ModelSize:
    """Size of the transformer.

    Attributes:
        width: Features per position, a multiple of 32.
        layers: Blocks of attention and feed-forward.
        context: Positions that the model sees, in bytes.
        kind: Which model it is.
    """

    width: int
    layers: int
    context: int = 128
    kind: Literal["transformer"] = "transformer"

    @property
    def about_parameters(self) -> int:
        """Parameters of the blocks, which are most of them."""
        return 12 * self.layers * self.width**2


@dataclass(frozen=True)
class ConvolutionSize:
    """Size of the convolutional net.

    Attributes:
        width: Channels of its first layer; the others have twice and four times as many.
        kind: Which model it is.
    """

    width: int
    kind: Literal["convolution"] = "convolution"

    @property
    def about_parameters(self) -> int:
        """Parameters of the wide convolutions, which are most of them."""
        return 126 * self.width**2


MODELS: dict[str, type[ModelSize] | type[ConvolutionSize]] = {
    "transformer": ModelSize,
    "convolution": ConvolutionSize,
}


def size_of(model: str, text: str) -> ModelSize | ConvolutionSize:
    """The size of a model of `MODELS` for what `parse_size` takes.

    Raises:
        ValueError: See `parse_size`.
    """
    if model == "transformer":
        return parse_size(text)
    word = text.strip().lower()
    if word in _NAMED_WIDTHS:
        return ConvolutionSize(_NAMED_WIDTHS[word])
    return ConvolutionSize(max(4, round(math.sqrt(_parameters(text) / 126) / 4) * 4))


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
    width = round(math.sqrt(_parameters(text) / (12 * 4)) / HEAD_WIDTH) * HEAD_WIDTH
    return ModelSize(max(width, HEAD_WIDTH), 4)


def _parameters(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.strip().lower())
    if match is None:
        raise ValueError(
            f"size={text!r} is not a size: {', '.join(_NAMED_SIZES)}, or a number of parameters "
            "such as 3M"
        )
    count = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6}[match[2]]
    if not _SMALLEST <= count <= _LARGEST:
        raise ValueError(f"size={text!r} is out of range: 20k to 200M parameters are allowed")
    return count
