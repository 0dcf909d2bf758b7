"""Follows the versions of a model that another process publishes."""

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import _validate as check
from thinwire._wording import listed, warn_user
from thinwire.checkpoint.tensor_file import by_threads, digest
from thinwire.checkpoint.tree import TensorRef
from thinwire.core.sharded import is_sharded
from thinwire.errors import StreamError
from thinwire.stream.coder import decode
from thinwire.stream.files import NEWEST, PART, Storage, file_name
from thinwire.stream.state import Held, Model, Receiver, Refused, plain_copy, tensors_of

_THREADS = min(4, os.cpu_count() or 1)


def follow(
    where: str | PathLike[str],
    model: nn.Module | Mapping[str, Tensor] | None = None,
    *,
    token: str | bytes | None = None,
    poll: float = 1.0,
    patience: float = 60.0,
) -> "Follower":
    """Follow the versions of a model that `publish` writes, bit for bit.

    A follower that is late takes the shorter of the differences it lacks and the newest base with
    the differences after it. A version is decoded into memory of its own and compared with its
    digest before the model changes.

    Example::

        publisher = tw.publish("versions", model)
        publisher.update(7)
        publisher.wait()
        version = tw.follow("versions").latest()
        print(version.number, version.step, list(version.state_dict()))

    Args:
        where: Folder, or an address that fsspec knows (http, s3, gs, hf, ...).
        model: Model, or `state_dict`, whose tensors each version replaces; None to hold them here.
            A model of another dtype, or whose `state_dict` hands out copies, costs a copy more.
        token: Secret of the publisher.
        poll: Seconds between two looks for a new version.
        patience: Seconds without progress after which a read that fails, is damaged or hangs is an
            error; until then it is tried again.

    Raises:
        ImportError: The extra is missing: `pip install 'thinwire[stream]'`.
        StreamError: The state of the model has what is no tensor.
    """
    if model is not None:
        check.instance("model", model, (nn.Module, Mapping))
        if any(is_sharded(tensor) for tensor in tensors_of(model)[0].values()):
            raise ValueError(
                "model is sharded: follow without it, and load state_dict() by torch's "
                "set_model_state_dict with full_state_dict and broadcast_from_rank0"
            )
    check.real("poll", poll, above=0)
    check.real("patience", patience, above=0)
    return Follower(Storage(where, token, patience), model, poll, patience)


@dataclass(frozen=True)
class Version:
    """A version of the model.

    Attributes:
        number: From 1.
        step: What the publisher passed to `update`.
        digest: SHA-256 of names, dtypes, shapes and values, in hex.
    """

    number: int
    step: int
    digest: str
    _follower: "Follower"

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of its tensors by name, on the CPU, in the published dtypes.

        Raises:
            StreamError: The follower has gone on to another version, or the model was changed.
        """
        return self._follower._state_of(self)


class Follower:
    """Result of `follow`: gives the newest version, or each new one in a loop.

    A loop takes all versions that are kept in turn, from the oldest, or after `latest` those that
    are newer. It waits for new ones, and ends when the publisher is closed.
    """

    def __init__(self, storage: Storage, model: Model | None, poll: float, patience: float) -> None:
        self._storage = storage
        self._model = model
        self._poll = poll
        self._patience_s = patience
        self.held: Held | None = None
        self.newest: dict[str, Any] | None = None
        """The record by which the version that is held was found."""
        self._links: dict[int, tuple[str, int]] = {}
        """Part of the digest and size of the file of each difference, by its number."""

    def versions(self) -> list[int]:
        """Return the numbers of the versions that can be read now, oldest first.

        Raises:
            StreamError: As in `latest`.
        """
        newest = self.look(None)
        return list(range(newest["oldest"], newest["number"] + 1)) if newest else []

    def latest(self, wait: float | None = None) -> Version:
        """Read the newest version.

        Args:
            wait: Seconds to wait until a version is named that is newer than the last one; None not
                to wait. The last one is returned again if none came. A storage that does not answer
                is an error after this time or `patience`, whichever is shorter.

        Raises:
            StreamError: There is no version so far; a file is damaged, missing or forged, or the
                storage fails, for longer than `patience`; the token is another; or the model does
                not fit. The model has not changed.
        """
        newest = self.look(None if wait is None else check.real("wait", wait, at_least=0))
        if newest is None:
            raise StreamError(
                f"{self._storage.where} has no version so far: give a time to wait for it"
            )
        return self._at(newest, None)

    def __iter__(self) -> Iterator[Version]:
        while (newest := self.look(math.inf)) is not None:
            number = newest["oldest"]
            if not self._is_news(newest):
                return  # the publisher is closed
            held = self.held
            if held and held.stream == newest["stream"] and held.number < newest["number"]:
                number = max(number, held.number + 1)
            yield self._at(newest, number)

    def look(self, wait_s: float | None) -> dict[str, Any] | None:
        """Return the record of the newest version, after waiting for one that is not held."""
        begin_s = answered_s = time.monotonic()
        limit_s = self._patience_s if wait_s is None else min(wait_s, self._patience_s)
        while True:
            left_s = answered_s + limit_s - time.monotonic()
            try:
                newest = self._storage.newest(max(left_s, 0.1))
                answered_s = time.monotonic()
            except Refused:
                raise
            except StreamError:
                if time.monotonic() >= answered_s + limit_s:
                    raise
            else:
                # a cache, or a write that comes late, may have an older record than is held
                if self.newest and (newest is None or _order(newest) < _order(self.newest)):
                    newest = self.newest
                if wait_s is None or answered_s >= begin_s + wait_s:
                    return newest
                ends = wait_s == math.inf and newest and newest["closed"]
                if newest and (ends or self._is_news(newest)):
                    return newest
            left_s = math.inf if wait_s is None else begin_s + wait_s - time.monotonic()
            time.sleep(max(0.0, min(self._poll, left_s)))

    def _is_news(self, newest: Mapping[str, Any]) -> bool:
        """Return True if a record names another version after the one that is held."""
        held = self.held
        if held is None or self.newest is None or held.stream != newest["stream"]:
            return True
        if newest["number"] > held.number:
            return True
        # of a publisher that has begun later, and did not know the version that is held
        return newest["digest"] != held.digest and _order(newest) > _order(self.newest)

    def _at(self, newest: Mapping[str, Any], number: int | None) -> Version:
        """Read a version, the newest for None, trying again as long as there is progress."""
        since_s = time.monotonic()
        patient = True
        while True:
            try:
                with self._storage.reading(NEWEST):
                    wanted = newest["number"] if number is None else number
                    self._read(newest, wanted, patient=patient)
                break
            except Refused:
                raise
            except StreamError:
                if not patient:
                    raise
                since_s = max(since_s, self._storage.news_s)
                patient = time.monotonic() < since_s + self._patience_s
            if patient:
                time.sleep(min(self._poll, self._patience_s / 4))
                newest = self.look(None) or newest
                number = None if number is None else max(number, newest["oldest"])
        self.newest = dict(newest)
        self._storage.forget()
        assert self.held is not None, "read"
        return Version(self.held.number, self.held.step, self.held.digest, self)

    def _read(self, newest: Mapping[str, Any], number: int, *, patient: bool) -> None:
        """Read a version by the shortest way, or without patience by any that is whole."""
        held = self.held
        self._links = links_of(newest)
        ways = {
            base: size + newest["written"] - until
            for base, size, until, _ in newest["bases"]
            if base <= number
        }
        problem: object = None
        if held is not None and held.stream == newest["stream"]:
            if held.number >= number and not self._is_news(newest):
                return
            if newest["oldest"] <= held.number < number:
                problem = self._obstacle(held, patient=patient)
                if problem is None:
                    ways[0] = newest["written"] - held.written
        failure = StreamError(f"{self._storage.where} has no base for version {number}")
        for base in sorted(ways, key=ways.__getitem__)[: 1 if patient else None]:
            try:
                self._read_from(newest, base, number)
            except Refused:
                raise
            except StreamError as error:
                problem = failure = error
                continue
            if problem is not None:
                warn_user(f"took a base of {self._storage.where} instead: {problem}")
            return
        raise failure

    def _obstacle(self, held: Held, *, patient: bool) -> object:
        """Return why the next difference does not fit what is held; None if it fits."""
        try:
            if self._link(held.number)[0] != held.digest[:PART]:
                return f"version {held.number} is held, and is not one of this chain"
        except StreamError as error:
            if patient:
                raise
            return error
        return self._changed(held)

    def _changed(self, held: Held) -> str | None:
        """Return which tensors of the version the model has no longer, as text; None if all."""
        if (receiver := self._receiver(held)) is None:
            return None
        changed = [
            name
            for name, targets in receiver.targets.items()
            if name not in held.tensors
            and {digest(plain_copy(name, target)) for target in targets} != {held.digests[name]}
        ]
        if not changed:
            return None
        return f"the weights were changed since version {held.number} ({listed(changed)})"

    def _read_from(self, newest: Mapping[str, Any], base: int, number: int) -> None:
        """Read a version from a base, or from what is held for 0; the model changes at the end."""
        values: dict[str, Tensor] = {}
        if base:
            held, name, begin, size = self.base_head(newest, base)
            self._receiver(held)  # refuses before the content is fetched
            content = self._storage.fetch(name, size)
            with self._storage.reading(name):
                for key, ref in held.refs.items():
                    end = begin + _nbytes(ref)
                    values[key] = _tensor_of(content[begin:end], ref)
                    held.digests[key] = digest(values[key])
                    begin = end
                if held.whole_digest() != held.digest:
                    raise ValueError("its digest differs")
        else:
            assert self.held is not None, "else there is no such way"
            held = replace(self.held, digests=dict(self.held.digests))
        receiver = self._receiver(held)
        for at in range(held.number + 1, number + 1):
            self._step(held, at, values, receiver)
        if receiver is None:
            held.tensors = held.tensors | values
        else:
            own = {name: value for name, value in values.items() if name not in receiver.holds}
            # a view would keep the whole base in memory
            held.tensors = held.tensors | {name: value.clone() for name, value in own.items()}
            self.held = None  # until every tensor is written
            # what the model holds otherwise is written at each version: nothing verifies it
            receiver.write_(held.tensors | values)
        self.held = held

    def _receiver(self, held: Held) -> Receiver | None:
        if self._model is None:
            return None
        return Receiver(self._model, held.refs, held.tied)

    def _value(self, held: Held, name: str, receiver: Receiver | None) -> Tensor:
        """Return a copy of a tensor of the version."""
        if receiver is None or name in held.tensors:
            return held.tensors[name].clone()
        return plain_copy(name, receiver.targets[name][0])

    def _state_of(self, version: Version) -> dict[str, Tensor]:
        held = self.held
        if held is None or held.digest != version.digest:
            raise StreamError(
                f"version {version.number} is no longer held: take its state_dict before the "
                "follower goes on"
            )
        if (obstacle := self._changed(held)) is not None:
            raise StreamError(obstacle)
        receiver = self._receiver(held)
        found = {name: self._value(held, name, receiver) for name in held.table}
        return found | {name: found[first] for name, first in held.tied.items()}

    def base_head(self, newest: Mapping[str, Any], number: int) -> tuple[Held, str, int, int]:
        """Return a whole version without tensors, its file, and where they begin and end there."""
        [(size, until, whole)] = [entry[1:] for entry in newest["bases"] if entry[0] == number]
        name = file_name(number, whole, "safetensors")
        storage = self._storage
        with storage.reading(name):
            record, begin = storage.head(name, size)
            if (record["number"], record["stream"]) != (number, newest["stream"]):
                raise ValueError("it is of another run than latest.json names")
            if record["digest"] != whole:
                raise ValueError("its digest is another than latest.json names")
            kept = ("number", "step", "stream", "digest", "table", "tied")
            held = Held(written=until, digests={}, **{key: record[key] for key in kept})
            if begin + sum(map(_nbytes, held.refs.values())) != size:
                raise ValueError("its tensors have another size than the file")
        return held, name, begin, size

    def _step(
        self, held: Held, number: int, values: dict[str, Tensor], receiver: Receiver | None
    ) -> None:
        """Make `held` and `values` those of the next version."""
        part, size = self._link(number)
        name = file_name(number, part, "step")
        storage = self._storage
        content = storage.fetch(name, size)
        with storage.reading(name):
            record, begin = storage.head(name, size)
            came = record["number"], record["stream"], record["previous"], record["digest"][:PART]
            if came != (number, held.stream, held.digest, part):
                raise ValueError(f"it does not follow version {held.number}")
            pieces = []
            for key, length in zip(held.table, record["lengths"], strict=True):
                if length:
                    pieces.append((key, content[begin : begin + length]))
                begin += length

            def decoded(piece: tuple[str, memoryview]) -> tuple[str, Tensor, bytes]:
                key, message = piece
                # a base's tensors lie in the file as it is kept for another attempt
                known = values.get(key)
                value = self._value(held, key, receiver) if known is None else known.clone()
                decode(value, message)
                return key, value, digest(value)

            for key, value, sha256 in by_threads(decoded, pieces, _THREADS):
                values[key] = value
                held.digests[key] = sha256
            if held.whole_digest() != record["digest"]:
                raise ValueError("the digest of its version differs")
        storage.drop(name)  # a long chain would fill the memory
        held.number = number
        held.step = record["step"]
        held.digest = record["digest"]
        held.written = record["written"]

    def _link(self, number: int) -> tuple[str, int]:
        """Return a part of a version's digest, and the bytes of its difference."""
        while number not in self._links:
            first = min(self._links)
            part, size = self._links[first]
            if not size:
                raise StreamError(f"{self._storage.where} has no difference of version {first}")
            record, _ = self._storage.head(file_name(first, part, "step"), size)
            if (record["number"], record["digest"][:PART]) != (first, part):
                raise StreamError(f"{self._storage.where}: the difference {first} is another one")
            self._links |= links_of({"number": first - 1, "recent": record["recent"]})
        return self._links[number]


def links_of(record: Mapping[str, Any]) -> dict[int, tuple[str, int]]:
    """Return a part of the digest, and the bytes of the difference, of the latest versions."""
    first = record["number"] - len(record["recent"]) + 1
    return {first + at: (part, size) for at, (part, size) in enumerate(record["recent"])}


def _order(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what only grows from one record to the next."""
    return (*record["term"], record["number"])


def _nbytes(ref: TensorRef) -> int:
    return math.prod(ref.shape) * ref.dtype.itemsize


def _tensor_of(content: memoryview, ref: TensorRef) -> Tensor:
    """Return a tensor in the memory of the content, or in its own if it is not aligned there."""
    if not len(content):
        return torch.empty(ref.shape, dtype=ref.dtype, device="cpu")
    flat = torch.frombuffer(content, dtype=torch.uint8)
    if flat.data_ptr() % ref.dtype.itemsize:
        flat = flat.clone()
    return flat.view(ref.dtype).reshape(ref.shape)
