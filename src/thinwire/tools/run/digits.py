"""The scanned digits that the comparison trains a convolutional net on, as bytes, with two fixed
parts held out.
"""

import importlib.util

from thinwire.tools.run.text import Corpus

__all__ = ["CLASSES", "PIXELS", "SIDE", "WHITE", "read_digits", "require_digits"]

SIDE, WHITE, CLASSES = 8, 16, 10
PIXELS = SIDE * SIDE
# prime to ten, since the digits come in the order 0 to 9 for a part of the set
_PERIOD = 7


def require_digits() -> None:
    """Look for the package that has them, and import nothing.

    Raises:
        ValueError: It is not installed; says how to get it.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError(
            "model='convolution' trains on the digits of scikit-learn, which is not installed: "
            "pip install scikit-learn"
        )


def read_digits() -> Corpus:
    """The 1,797 digits of scikit-learn, each as its 64 pixels (0 to 16) and its class.

    Of every seven in their order, five are trained on, the sixth is for validation and the seventh
    is held out.

    Source: E. Alpaydin and C. Kaynak, 1998, Optical Recognition of Handwritten Digits (UCI).
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    records = [
        bytes([*map(int, pixels), int(digit)])
        for pixels, digit in zip(found.data, found.target, strict=True)
    ]
    validation, held_out = records[5::_PERIOD], records[6::_PERIOD]
    train = [record for i, record in enumerate(records) if i % _PERIOD < 5]
    source = f"the {len(records):,} scanned digits of scikit-learn"
    return Corpus(b"".join(train), b"".join(validation), b"".join(held_out), None, source)
