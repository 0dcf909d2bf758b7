"""Where the versions of a model lie: one record of the newest, bases and steps, each with a tag.

A base is a whole version, a step the difference to the version before: safetensors files whose
metadata are a record with a tag. Their names hold a part of their version's digest. The newest
record, and each step after them, names that digest too, and what is read must have it. The newest
record is written last, so that a reader sees whole versions only.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import math
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import uuid4

from thinwire._watchdog import Late, within
from thinwire.checkpoint.files import sync_directory
from thinwire.checkpoint.tensor_file import PREFIX, pieces_of
from thinwire.checkpoint.tree import UNREADABLE
from thinwire.comm.waiting import Progress
from thinwire.errors import StreamError
from thinwire.stream.coder import extra
from thinwire.stream.state import Refused

NEWEST = "latest.json"
_FORMAT = 2
_MOST_BYTES = 1 << 20
PART = 16
"""Digits of a version's digest in the names of its files, and in lists."""
_CHUNK_BYTES = 1 << 20
"""Bytes of a write, after which it is known to move."""
_FIRST_BYTES = 1 << 16
_SHORT_S = 1.0
"""Of a first read; one that takes less time is followed by one of twice its size."""
_NAME = re.compile(r"(?:^|/)\.?(\d{9,})-[0-9a-f]{16}\.(safetensors|step)(\.[0-9a-f]{32})?$")
"""A base or a step, or what a killed publisher has left of one."""
_PART_BYTES = 5 << 20
"""Of an upload in parts, the least that S3 takes: so that progress is seen."""
_SECRETS = re.compile(r"(?<=//)[^/\s'\"]*@|\?[^\s'\")>,]*")
"""Passwords and signatures in addresses."""
_T = TypeVar("_T")
Kind = Literal["safetensors", "step"]


class Missing(StreamError):
    """There is no such file."""


@dataclass
class _Part:
    """The beginning of a file, as far as it has arrived."""

    content: bytearray = field(default_factory=bytearray)
    most: int = 0
    whole_only: bool = False
    """True if the server knows no ranges: each attempt begins at the first byte."""


class Storage:
    """A folder, or an address that fsspec knows, and the key of what is written there.

    Attributes:
        where: The address without its secrets, for texts.
        is_folder: True for a folder of this machine.
        news_s: Time at which a byte arrived that had not arrived before.
    """

    def __init__(
        self, where: str | PathLike[str], token: str | bytes | None, limit_s: float
    ) -> None:
        if token is not None and not (isinstance(token, str | bytes) and token):
            raise TypeError(f"token must be text or bytes that are not empty, or None: {token!r}")
        if not fspath(where):
            raise ValueError("where is empty: give a folder or an address")
        address = fspath(where)
        protocol = extra("fsspec.core").split_protocol(fspath(where))[0]
        self._web = protocol in ("http", "https")
        self._query = ""
        if self._web:
            address, _, self._query = address.partition("?")
        elif protocol is None:  # also after a change of the working directory
            address = str(Path(address).absolute())
        kind = extra("fsspec").get_filesystem_class((protocol or "file").partition("::")[0])
        self.is_folder = issubclass(kind, extra("fsspec.implementations.local").LocalFileSystem)
        self._moves = kind.mv is not extra("fsspec").AbstractFileSystem.mv
        self._address = address.rstrip("/")
        self._limit_s = limit_s
        self.where = _SECRETS.sub("", self._address)
        self._files: Any = None
        self._root = ""
        self._parts: dict[str, _Part] = {}
        self._uses = 0
        self._moving: tuple[str, int] | None = None
        """The file on its way and its bytes; None while nothing is asked of the storage."""
        self._moved = 0
        self._moved_s = 0.0
        self.news_s = time.monotonic()
        secret = token.encode() if isinstance(token, str) else token
        self._key = hashlib.sha256(b"thinwire stream" + secret).digest() if secret else b""
        self._key_name = hashlib.sha256(self._key).hexdigest()[:16] if secret else None

    def silent_s(self) -> float:
        """Return for how long no byte has moved; 0 while nothing is asked of the storage."""
        return 0.0 if self._moving is None else time.monotonic() - self._moved_s

    def left_text(self) -> str:
        """Return how much of the file on its way is left, for texts."""
        if self._moving is None:
            return ""
        name, total = self._moving
        return f" ({max(total - self._moved, 0):,} of the {total:,} bytes of {name} are left)"

    def _move(self, count: int) -> None:
        self._moved += count
        self._moved_s = time.monotonic()

    # the record

    def newest(self, limit_s: float | None = None) -> dict[str, Any] | None:
        """Return the record of the newest version, or None if there is none so far."""

        def read(files: Any) -> bytes:
            text = b""
            with self._opened(files, NEWEST, size=1, whole=self._web) as file:
                while data := file.read(_MOST_BYTES + 1 - len(text)):
                    text += data
                    if len(text) > _MOST_BYTES:
                        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
            return text

        try:
            text = self._use(NEWEST, read, limit_s=limit_s)
        except Missing:
            return None
        record = self.unsealed(text, NEWEST)
        with self.reading(NEWEST):
            numbers = record["oldest"], record["number"], *record["term"]
            if (
                not all(type(number) is int for number in numbers)
                or not 0 < numbers[0] <= numbers[1]
            ):
                raise ValueError(f"its numbers are {numbers}")
        return record

    def name_newest(self, record: Mapping[str, Any]) -> None:
        """Write the record of the newest version."""
        self.write(NEWEST, [self.sealed(record).encode()])

    def sealed(self, record: Mapping[str, Any]) -> str:
        """Return a record as JSON with its tag."""
        text = json.dumps({**record, "format": _FORMAT, "token": self._key_name})
        return json.dumps([text, self._tag(text)])

    def unsealed(self, sealed: str | bytes, name: str) -> dict[str, Any]:
        """Return the record that was sealed, or raise `StreamError`."""
        with self.reading(name):
            text, tag = json.loads(sealed)
            record: dict[str, Any] = json.loads(text)
            form = record["format"]
            key_name = record["token"]
            valid = hmac.compare_digest(tag, self._tag(text))
        if form != _FORMAT:
            raise Refused(
                f"{self.where}/{name} has format {form}, and this release reads and writes "
                f"{_FORMAT}: publish anew with replace=True, and follow with the same release"
            )
        if key_name != self._key_name:
            had, pass_ = ("with a token", "pass that") if key_name else ("without one", "pass no")
            had = "with another token" if key_name and self._key else had
            raise Refused(f"{self.where}/{name} was published {had}: {pass_} token")
        if not valid:
            raise StreamError(f"{self.where}/{name} is damaged or forged: its tag differs")
        return record

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Raise `StreamError` where what is read inside the block was not written so.

        What has arrived of the file is then forgotten.
        """
        try:
            yield
        except StreamError:
            self.drop(name)
            raise
        except (*UNREADABLE, struct.error) as error:
            self.drop(name)
            raise StreamError(f"{self.where}/{name} is damaged: {error}") from error.__cause__

    # bases and steps

    def write_version(self, kind: Kind, record: Mapping[str, Any], tensors: Any) -> int:
        """Write a base or a step; return its size in bytes."""
        metadata = {"format": "pt", "thinwire": self.sealed(record)}
        name = file_name(record["number"], record["digest"], kind)
        return self.write(name, pieces_of(tensors, metadata))

    def head(self, name: str, size: int) -> tuple[dict[str, Any], int]:
        """Return the record of a base or a step of `size` bytes, and where its content begins."""
        with self.reading(name):
            [length] = PREFIX.unpack(self._begin(name, size, PREFIX.size))
            end = PREFIX.size + length
            if end > size:
                raise ValueError("its header is longer than the file")
            header = json.loads(self._begin(name, size, end)[PREFIX.size :])
            return self.unsealed(header["__metadata__"]["thinwire"], name), end

    # files

    def _begin(self, name: str, size: int, until: int) -> bytes:
        """Return the beginning of a file of `size` bytes; what has arrived is kept."""
        until = min(until, size)
        part = self._parts.setdefault(name, _Part())
        while len(part.content) < until:
            self._use(name, partial(self._receive, part, name, size, until), total=size)
        return bytes(part.content[:until])

    def fetch(self, name: str, size: int) -> memoryview:
        """Return a file of `size` bytes; what has arrived is kept for the next call."""
        self._begin(name, size, size)
        return memoryview(self._parts[name].content)

    def drop(self, name: str) -> None:
        """Forget the content of a damaged file; news are then bytes behind it."""
        self._parts[name] = _Part(most=self._parts[name].most if name in self._parts else 0)

    def forget(self) -> None:
        """Forget all files that have arrived."""
        self._parts.clear()

    def _receive(self, part: _Part, name: str, size: int, until: int, files: Any) -> None:
        use = self._uses
        if part.whole_only:
            part.content.clear()
        chunk = _FIRST_BYTES
        progress = Progress(f"reading {name}", until - len(part.content), logging.WARNING)
        with self._opened(files, name, size=size, whole=part.whole_only) as file:
            while (at := len(part.content)) < until:
                begun_s = time.monotonic()
                try:
                    file.seek(at)
                    data = file.read(min(chunk, until - at))
                except ValueError:  # a web server that knows no ranges: begin again
                    if part.whole_only:
                        raise
                    part.whole_only = True
                    return
                if self._uses != use:  # given up: another attempt writes here now
                    return
                if not data:
                    raise EOFError(f"it has {at:,} of {size:,} bytes so far")
                part.content += data
                progress.add(len(data))
                self._move(len(data))
                if len(part.content) > part.most:
                    part.most = len(part.content)
                    self.news_s = self._moved_s
                if self._moved_s - begun_s < _SHORT_S and chunk < _MOST_BYTES << 4:
                    chunk *= 2

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> int:
        """Write a file, which is there as a whole in the end; return its size in bytes.

        What fails is tried again. A write is never given up: it might end later, after a newer one.
        """
        every = list(pieces)
        total = sum(map(len, every))
        work = partial(self._write, name, every)
        until_s = time.monotonic() + self._limit_s
        while True:
            try:
                self._use(name, work, limit_s=math.inf, total=total)
                return total
            except StreamError:
                if time.monotonic() > until_s:
                    raise
            time.sleep(min(1.0, self._limit_s / 10))

    def _write(self, name: str, pieces: list[bytes | memoryview], files: Any) -> None:
        aside = self._path(f".{name}.{uuid4().hex}" if self._moves else name)
        if self._moves:
            files.makedirs(self._root, exist_ok=True)
        try:
            with files.open(aside, "wb", block_size=_PART_BYTES) as file:
                for piece in pieces:
                    for at in range(0, len(piece), _CHUNK_BYTES):
                        file.write(chunk := piece[at : at + _CHUNK_BYTES])
                        self._move(len(chunk))
                if self.is_folder:
                    file.flush()
                    os.fsync(file.fileno())
            if self._moves:
                files.mv(aside, self._path(name))
        except BaseException:
            if self._moves:
                with contextlib.suppress(Exception):  # the first error is the cause
                    files.rm_file(aside)
            raise
        if self.is_folder:
            sync_directory(Path(self._root))

    def try_write(self) -> None:
        """Raise `StreamError` unless this process may write here."""
        name = f".try-{uuid4().hex}"
        self._use(name, partial(self._write, name, [b"thinwire"]))
        self.discard([name])

    def discard(self, names: Iterable[str]) -> None:
        """Delete files that nobody needs any more."""

        def delete(files: Any) -> None:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    files.rm_file(self._path(name))
                self._move(0)

        self._use("", delete)

    def numbers(self) -> dict[str, int]:
        """Return the number of each version's file that is here, by its name."""
        try:
            paths = self._use("", lambda files: list(files.ls(self._root, detail=False)))
        except Missing:
            return {}
        return {one[0].lstrip("/"): int(one[1]) for one in map(_NAME.search, paths) if one}

    def _opened(self, files: Any, name: str, *, size: int, whole: bool) -> Any:
        how: dict[str, Any] = {"block_size": 0 if whole else _CHUNK_BYTES, "cache_type": "none"}
        if self._web:  # with the size it is not asked for, and no cache on the way answers
            how |= {"size": size, "headers": {"Cache-Control": "no-cache"}}
        return files.open(self._path(name), "rb", **how)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" + (f"?{self._query}" if self._query else "")

    def _connected(self) -> Any:
        options: dict[str, Any] = {"skip_instance_cache": True}
        if self._web:  # without a limit in total, which long files would exceed
            timeout = extra("aiohttp").ClientTimeout(total=None)
            options["client_kwargs"] = {"timeout": timeout}
        if self._address.startswith(("s3:", "s3a:")):  # one part at a time
            options["max_concurrency"] = 1
        files, self._root = extra("fsspec.core").url_to_fs(self._address, **options)
        return files

    def _use(
        self, name: str, work: Callable[[Any], _T], *, limit_s: float | None = None, total: int = 0
    ) -> _T:
        """Do something on a thread, which is given up where no byte moves for long.

        After a failure the next use connects anew.
        """
        limit_s = self._limit_s if limit_s is None else limit_s
        known = self._files
        self._files = None
        self._uses += 1
        self._moved = 0
        self._moved_s = time.monotonic()
        self._moving = name, total

        def run() -> tuple[Any, _T]:
            files = known or self._connected()
            files.invalidate_cache()  # no listing is older than this use
            return files, work(files)

        where = f"{self.where}/{name}".rstrip("/")
        try:
            self._files, result = within(
                limit_s, run, name="thinwire-storage", moved_s=lambda: self._moved_s
            )
        except Late:
            raise StreamError(f"{where}: no byte moved for {limit_s:.3g} s") from None
        except FileNotFoundError:
            raise Missing(f"{where} is missing") from None
        except Exception as error:  # every file system of fsspec has errors of its own
            text = _SECRETS.sub("", f"{type(error).__name__}: {error}")
            raise StreamError(f"{where} cannot be read or written: {text}") from None
        finally:
            self._uses += 1
            self._moving = None
        return result

    def _tag(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=16, key=self._key).hexdigest()


def file_name(number: int, digest: str, kind: Kind) -> str:
    """Return the name of the file of a whole version, or of its difference to the one before."""
    return f"{number:09d}-{digest[:PART]}.{kind}"
