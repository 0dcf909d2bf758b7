"""Small files: size-limited reads and atomic writes; without torch."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: It cannot be read, or is a pipe or a device, where a read may never end.
        ValueError: It has more bytes than `most_bytes`.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "This is a pipe or a device, not a regular file", str(path))
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return content


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path for a new file, which replaces `path` at the end if there is no error."""
    aside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield aside
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Write a file as `replacing` does, and force it to disk."""
    with replacing(path) as aside, aside.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
