"""Where the versions of a model lie: one record of the newest, bases and steps, each with a tag.

A base is a safetensors file of a whole version, a step the difference to the version before. The
record is written last, so that a reader sees whole versions only.
"""

import contextlib
import hashlib
import hmac
import json
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from os import PathLike, fspath
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, nn

from thinwire._files import read_regular, replacing
from thinwire._names import plain_names
from thinwire.checkpoint.files import make_directory, sync_directory, write_pieces
from thinwire.checkpoint.tree import UNREADABLE, table_entry
from thinwire.core.sharded import shard_of
from thinwire.errors import StreamError
from thinwire.stream.coder import extra

_NEWEST, _FORMAT, _MOST_BYTES = "latest.json", 1, 1 << 20
_MAGIC, _PREFIX = b"tw-step1", struct.Struct("<8sI")
_TAG_BYTES, _CHUNK_BYTES = 16, 1 << 20
_OURS = re.compile(r"^\.?\d{9}\.(safetensors|step)|^\.latest\.json\.")


class Missing(StreamError):
    """There is no such file."""


class Unreachable(StreamError):
    """A file system of fsspec failed, perhaps for a moment."""


@dataclass
class Held:
    """A version in memory: its tensors by name, with what the next difference refers to."""

    tensors: dict[str, Tensor]
    digests: dict[str, bytes]
    tied: dict[str, str]
    number: int = 0
    step: int = 0
    stream: str = ""
    digest: str = ""
    written: int = 0
    """Bytes of all differences up to this version."""


class Storage:
    """A folder, or an address that fsspec knows, and the key of what is written there."""

    def __init__(self, where: str | PathLike[str], token: str | bytes | None) -> None:
        if token is not None and not (isinstance(token, str | bytes) and token):
            raise TypeError(f"token must be text, bytes or None, got {token!r}")
        extra("constriction")
        self.where = fspath(where)
        self._files, self._root = extra("fsspec.core").url_to_fs(self.where)
        local = extra("fsspec.implementations.local").LocalFileSystem
        self._folder = Path(self._root) if isinstance(self._files, local) else None
        secret = token.encode() if isinstance(token, str) else token
        self._key = hashlib.sha256(b"thinwire stream" + secret).digest() if secret else b""
        self._key_name = hashlib.sha256(self._key).hexdigest()[:16] if secret else None

    def newest(self) -> dict[str, Any] | None:
        """Return the record of the newest version, or None if there is none so far."""
        try:
            with self.fetched(_NEWEST) as path, self._errors(_NEWEST):
                text = read_regular(path, _MOST_BYTES)
        except Missing:
            return None
        return self.unsealed(text, _NEWEST)

    def name_newest(self, record: Mapping[str, Any]) -> None:
        """Write the record of the newest version."""
        with self.written(_NEWEST) as path:
            write_pieces(path, [self.sealed(record).encode()])

    def sealed(self, record: Mapping[str, Any]) -> str:
        """Return a record as JSON with its tag."""
        text = json.dumps({**record, "format": _FORMAT, "token": self._key_name})
        return json.dumps([text, self._hasher(text.encode()).hexdigest()])

    def unsealed(self, sealed: str | bytes, name: str) -> dict[str, Any]:
        """Return the record that was sealed, or raise `StreamError`."""
        try:
            text, tag = json.loads(sealed)
            record: dict[str, Any] = json.loads(text)
            form, key_name = record["format"], record["token"]
            valid = hmac.compare_digest(tag, self._hasher(text.encode()).hexdigest())
        except UNREADABLE as error:
            raise StreamError(f"{self.where}/{name} is damaged: {error}") from error
        if form != _FORMAT:
            raise StreamError(
                f"{self.where}/{name} has format {form}, and this release reads {_FORMAT}: follow "
                "it with the release that published it"
            )
        if key_name != self._key_name:
            had, pass_ = ("with a token", "pass that") if key_name else ("without one", "pass no")
            had = "with another token" if key_name and self._key else had
            raise StreamError(f"{self.where}/{name} was published {had}: {pass_} token")
        if not valid:
            raise StreamError(f"{self.where}/{name} is damaged or forged: its tag differs")
        return record

    @contextlib.contextmanager
    def written(self, name: str) -> Iterator[Path]:
        """Yield a path for a new file, which then lies here under this name."""
        if self._folder:
            make_directory(self._folder)
            with replacing(self._folder / name) as aside:
                yield aside
            sync_directory(self._folder)
            return
        with tempfile.TemporaryDirectory() as folder:
            aside = Path(folder, name)
            yield aside
            with self._errors(name):
                self._files.put_file(str(aside), f"{self._root}/{name}")

    @contextlib.contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        """Yield the path of a file on a disk of this machine."""
        if self._folder:
            if not (self._folder / name).is_file():
                raise Missing(f"{self.where}/{name} is missing")
            yield self._folder / name
            return
        with tempfile.TemporaryDirectory() as folder:
            with self._errors(name):
                self._files.get_file(f"{self._root}/{name}", str(Path(folder, name)))
            yield Path(folder, name)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        with self._errors(name):
            return int(self._files.info(f"{self._root}/{name}")["size"])

    def write_step(self, record: Mapping[str, Any], payload: Any) -> None:
        """Write the difference to the version before, behind a tag of all that follows."""
        header = self.sealed(record).encode()
        start = _PREFIX.pack(_MAGIC, len(header)) + header
        payload.seek(0)
        tag = hashlib.file_digest(payload, partial(self._hasher, start)).digest()
        payload.seek(0)
        with self.written(step_name(record["number"])) as path:
            write_pieces(path, chain([tag, start], iter(partial(payload.read, _CHUNK_BYTES), b"")))

    @contextlib.contextmanager
    def read_step(self, number: int) -> Iterator[tuple[dict[str, Any], BinaryIO]]:
        """Yield the record and the payload of a difference, every byte of which was verified."""
        name = step_name(number)
        with self.fetched(name) as path, path.open("rb") as file:
            tag = file.read(_TAG_BYTES)
            if not hmac.compare_digest(tag, hashlib.file_digest(file, self._hasher).digest()):
                raise StreamError(f"{self.where}/{name} is damaged or forged: its tag differs")
            file.seek(_TAG_BYTES)
            magic, length = _PREFIX.unpack(file.read(_PREFIX.size))
            if magic != _MAGIC:
                raise StreamError(f"{self.where}/{name} is no difference of this format")
            yield self.unsealed(file.read(length), name), file

    def clean(self, record: Mapping[str, Any]) -> None:
        """Delete what killed publishers left, and versions that are no longer kept."""
        needed = {_NEWEST, *(base_name(number) for number, *_ in record["bases"])}
        needed |= {step_name(number) for number in range(record["oldest"], record["number"] + 1)}
        with self._errors(""):
            found = [path.rpartition("/")[2] for path in self._files.ls(self._root, detail=False)]
        self.discard(name for name in found if name not in needed and _OURS.search(name))

    def discard(self, names: Iterable[str]) -> None:
        """Delete files that nobody needs any more."""
        for name in names:
            with contextlib.suppress(Missing), self._errors(name):
                self._files.rm_file(f"{self._root}/{name}")

    def _hasher(self, content: bytes = b"") -> "hashlib.blake2b":
        return hashlib.blake2b(content, digest_size=_TAG_BYTES, key=self._key)

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise Missing(f"{self.where}/{name} is missing") from error
        except Exception as error:  # every file system of fsspec has errors of its own
            raise Unreachable(f"{self.where}/{name} cannot be reached: {error!r}") from error


def base_name(number: int) -> str:
    """Return the name of the file of a whole version."""
    return f"{number:09d}.safetensors"


def step_name(number: int) -> str:
    """Return the name of the file of a difference."""
    return f"{number:09d}.step"


def tensors_of(model: nn.Module | Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a model's `state_dict` by name, and for each further name of a tied
    tensor its first name.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    found = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in zip(plain_names(found), found.values(), strict=True):
        local = shard_of(tensor)
        key = local.data_ptr(), local.dtype, tuple(tensor.shape), local.stride()
        if local.numel() and key in first:
            tied[name] = first[key]
        else:
            tensors[name] = tensor.detach()
            first[key] = name
    return tensors, tied


def table_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return dtypes and shapes by name, as JSON holds them."""
    return {name: table_entry(tensor, 0, name) for name, tensor in tensors.items()}


def digest_of(table: Mapping[str, Any], digests: Mapping[str, bytes]) -> str:
    """Return the digest of a version: SHA-256 of its table and of the SHA-256 of each tensor."""
    whole = [[*entry, digests[name].hex()] for name, entry in table.items()]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()
