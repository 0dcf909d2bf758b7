"""Small files: read with a limit, and written as a whole; without torch."""

import errno
import os
import stat
from pathlib import Path
from uuid import uuid4

__all__ = ["read_regular", "replace_file"]


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: It cannot be read, or is a pipe or a device, whose reading may never end.
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


def replace_file(path: Path, content: bytes) -> None:
    """Write a new file aside and put it in its place: readers see the old one or the new one.

    Raises:
        OSError: It cannot be written; what was there before is as it was.
    """
    aside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with aside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
