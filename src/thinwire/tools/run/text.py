"""Training text as bytes, with two fixed parts held out."""

import hashlib
import importlib.util
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path

_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__",  # not the standard library
    "test", "tests", "idlelib",  # left out by some distributions of Python
    "encodings", "pydoc_data",  # tables and generated text
}  # fmt: skip
_LARGEST_CORPUS_BYTES = 64_000_000
_SMALLEST_CORPUS_BYTES = 20_000
_HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class Corpus:
    """Text in three fixed parts."""

    train: bytes
    validation: bytes
    held_out: bytes
    files: int | None
    source: str

    @property
    def digest(self) -> str:
        """SHA-256 of all bytes, in hexadecimal; equal digests mean equal text."""
        return hashlib.sha256(self.train + self.validation + self.held_out).hexdigest()


def read_standard_library() -> Corpus:
    """Return the source files of the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    source = f"source files of the Python {sysconfig.get_python_version()} standard library"
    return _corpus(root, "*.py", _SKIPPED_FOLDERS.__contains__, source, "name a folder")


def read_folder(folder: Path) -> Corpus:
    """Return every visible text file below a folder: valid UTF-8 without NUL."""
    if not folder.is_dir():
        raise ValueError(f"text={str(folder)!r} is not a folder; give a folder with text files")
    source = f"text files of {folder.name or folder}"
    hidden = methodcaller("startswith", ".")
    return _corpus(folder, "*", hidden, source, "give a folder with more text")


def _corpus(
    root: Path, pattern: str, skipped: Callable[[str], bool], source: str, advice: str
) -> Corpus:
    # By the hash of the name: the held-out part is a mixture of all subfolders, and the same on
    # every machine.
    names = [path.relative_to(root) for path in root.rglob(pattern) if path.is_file()]
    pieces: list[bytes] = []
    total = 0
    for name in sorted(names, key=lambda name: hashlib.sha256(name.as_posix().encode()).digest()):
        piece = b"" if any(map(skipped, name.parts)) else _text_of(root / name)
        if piece and total < _LARGEST_CORPUS_BYTES:
            pieces.append(piece)
            total += len(piece)
    if total < _SMALLEST_CORPUS_BYTES:
        raise ValueError(
            f"text={str(root)!r} holds {total} bytes of text in {len(pieces)} files; at least "
            f"{_SMALLEST_CORPUS_BYTES} bytes are needed; {advice}"
        )
    whole = b"\n".join(pieces)
    part = int(len(whole) * _HELD_OUT_SHARE)
    return Corpus(whole[: -2 * part], whole[-2 * part : -part], whole[-part:], len(pieces), source)


def _text_of(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError):  # unreadable or not text: not part of the corpus
        return b""
    return b"" if b"\0" in content else content


SIDE, WHITE, CLASSES = 8, 16, 10
PIXELS = SIDE * SIDE
# prime to ten, since the digits come in the order 0 to 9 for a part of the set
_PERIOD = 7


def require_digits() -> None:
    """Refuse if scikit-learn is missing; imports nothing."""
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError(
            "model='convolution' needs the digits of scikit-learn, which is not installed; run "
            "pip install scikit-learn"
        )


def read_digits() -> Corpus:
    """The 1,797 digits of scikit-learn, each as its 64 pixels (0 to 16) and its class."""
    # Source: E. Alpaydin and C. Kaynak, 1998, Optical Recognition of Handwritten Digits (UCI).
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
