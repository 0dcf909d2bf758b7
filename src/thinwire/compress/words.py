"""Numbers in sentences, for what `explain` prints."""

__all__ = ["bits_text", "plural", "share_text"]


def share_text(sparsity: float) -> str:
    """What is sent, such as "0.1 %"."""
    return f"{100 * (1 - sparsity):.6g} %"


def bits_text(bits: int) -> str:
    """Such as "1 bit"."""
    return f"{bits} {plural('bit', bits)}"


def plural(word: str, count: int) -> str:
    """The word, with an s unless there is one of them."""
    return word if count == 1 else f"{word}s"
