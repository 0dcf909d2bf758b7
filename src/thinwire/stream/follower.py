"""Follows the versions of a model that another process publishes."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from thinwire import _validate as check
from thinwire._wording import listed, warn_user
from thinwire.checkpoint.tensor_file import digest, restored
from thinwire.checkpoint.tree import UNREADABLE, TensorRef, parsed_table
from thinwire.core.sharded import is_sharded
from thinwire.errors import CheckpointError, StreamError
from thinwire.stream.coder import decode
from thinwire.stream.files import (
    Held,
    Missing,
    Storage,
    Unreachable,
    base_name,
    digest_of,
    step_name,
    table_of,
    tensors_of,
)

_POLL_S, _PATIENCE_S = 1.0, 60.0


def follow(
    where: str | PathLike[str],
    model: nn.Module | Mapping[str, Tensor] | None = None,
    *,
    token: str | bytes | None = None,
    poll: float = _POLL_S,
) -> "Follower":
    """Follow the versions of a model that `publish` writes, bit for bit.

    A follower that is late takes the shorter of the differences it lacks and the newest base with
    the differences after it. Every byte is verified before it is used, and every version by its
    digest.

    Example::

        tw.publish("versions", model).update(7)
        version = tw.follow("versions").latest()
        print(version.number, version.step, list(version.state_dict()))

    Args:
        where: Folder, or an address that fsspec knows (http, s3, gs, hf, ...).
        model: Model, or `state_dict`, whose tensors each version replaces; None to hold them here.
            A model of another dtype costs a copy in the published one.
        token: Secret of the publisher.
        poll: Seconds between two looks for a new version.

    Raises:
        ImportError: The extra is missing: `pip install 'thinwire[stream]'`.
    """
    if model is not None:
        check.instance("model", model, (nn.Module, Mapping))
        if any(is_sharded(tensor) for tensor in tensors_of(model)[0].values()):
            raise ValueError(
                "model is sharded: follow without it, and load state_dict() by torch's "
                "set_model_state_dict with full_state_dict and broadcast_from_rank0"
            )
    check.real("poll", poll, above=0)
    return Follower(Storage(where, token), model, poll)


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
            StreamError: The follower has gone on to another version.
        """
        held = self._follower.held
        if held is None or held.digest != self.digest:
            raise StreamError(
                f"version {self.number} is no longer held: take its state_dict before the follower "
                "goes on"
            )
        found = {name: tensor.cpu().clone() for name, tensor in held.tensors.items()}
        return found | {name: found[first] for name, first in held.tied.items()}


class Follower:
    """Result of `follow`: gives the newest version, or each new one in a loop.

    A loop takes all versions that are kept in turn, from the oldest, or after `latest` those that
    are newer. It waits for new ones, and ends when the publisher is closed.
    """

    def __init__(
        self, storage: Storage, model: nn.Module | Mapping[str, Any] | None, poll: float = _POLL_S
    ) -> None:
        self._storage, self._model, self._poll = storage, model, poll
        self.held: Held | None = None
        self._copies: dict[str, list[Tensor]] = {}

    def versions(self) -> list[int]:
        """Return the numbers of the versions that can be read now, oldest first."""
        newest = self._storage.newest()
        return list(range(newest["oldest"], newest["number"] + 1)) if newest else []

    def latest(self, wait: float | None = None) -> Version:
        """Read the newest version.

        Args:
            wait: Seconds to wait for a version that is newer than the last one; None not to wait.
                The last one is returned again if none came.

        Raises:
            StreamError: There is no version so far; a file is damaged, missing or forged, the token
                is another, or the model does not fit.
        """
        newest = self._newest(0.0 if wait is None else check.real("wait", wait, at_least=0))
        if newest is None:
            raise StreamError(
                f"{self._storage.where} has no version so far: give a time to wait for it"
            )
        return self._at(newest, newest["number"])

    def __iter__(self) -> Iterator[Version]:
        while (newest := self._newest(math.inf)) is not None:
            number = newest["oldest"]
            if self.held and self.held.stream == newest["stream"]:
                if self.held.number == newest["number"]:
                    return  # the publisher is closed
                number = max(number, self.held.number + 1)
            yield self._at(newest, number)

    def _newest(self, wait_s: float) -> dict[str, Any] | None:
        """Return the record of the newest version, after waiting for one that is not held."""
        begin_s = answered_s = time.monotonic()
        while True:
            left_s = begin_s + wait_s - time.monotonic()
            try:
                newest = self._storage.newest()
                answered_s = time.monotonic()
            except Unreachable:
                if min(left_s, answered_s + _PATIENCE_S - time.monotonic()) <= 0:
                    raise
            else:
                held = self.held
                if left_s <= 0 or (newest and not (held and held.stream == newest["stream"])):
                    return newest
                if held and newest and (newest["number"] > held.number or newest["closed"]):
                    return newest
            time.sleep(max(0.0, min(self._poll, left_s)))

    def _at(self, newest: Mapping[str, Any], number: int) -> Version:
        """Read a version by the shortest way that is whole."""
        held = self.held
        if held and held.stream != newest["stream"]:
            held = self.held = None
        if held is None or held.number < number:
            try:
                self._read(newest, number)
            except Missing:  # the publisher may have deleted it meanwhile
                later = self._storage.newest()
                if later is None or later["number"] == newest["number"]:
                    raise
                self._read(later, max(number, later["oldest"]))
        assert self.held is not None
        return Version(self.held.number, self.held.step, self.held.digest, self)

    def _read(self, newest: Mapping[str, Any], number: int) -> None:
        at, written = (self.held.number, self.held.written) if self.held else (0, 0)
        ways = {base: size + newest["written"] - until for base, size, until in newest["bases"]}
        if at >= newest["oldest"]:
            ways[0] = newest["written"] - written
        problem: StreamError | None = None
        for base in sorted(ways, key=ways.__getitem__):
            if base > number or (base and self.held and base <= self.held.number):
                continue
            try:
                if base:
                    self._read_base(base)
                while self.held is not None and self.held.number < number:
                    self._read_step(self.held, self.held.number + 1)
                if problem is not None:
                    warn_user(f"took a base of {self._storage.where} instead: {problem}")
                return
            except StreamError as error:
                problem = problem or error
        raise problem or StreamError(f"{self._storage.where} has no base for version {number}")

    def _read_base(self, number: int) -> None:
        name = base_name(number)
        try:
            with (
                self._storage.fetched(name) as path,
                safe_open(path, framework="pt", device="cpu") as file,
            ):
                record = self._storage.unsealed(file.metadata()["thinwire"], name)
                table = parsed_table(record["table"], 1)

                def value(key: str) -> Tensor:
                    return restored(file.get_tensor(key), table[key], f"{path}, {key},")

                # read twice, so that nothing of a damaged file reaches the model
                digests = {key: digest(value(key)) for key in table}
                found = record["number"], digest_of(record["table"], digests)
                if found != (number, record["digest"]):
                    raise StreamError(f"{name} is damaged: its number or digest differs")
                targets = self._targets(table, record["tied"])
                self.held, self._copies = None, {}
                tensors = {key: self._put(key, value(key), targets[key]) for key in table}
        except (OSError, SafetensorError, CheckpointError, *UNREADABLE) as error:
            raise StreamError(f"{self._storage.where}/{name} is damaged: {error}") from error
        version = {key: record[key] for key in ("number", "step", "stream", "digest", "written")}
        self.held = Held(tensors, digests, record["tied"], **version)

    def _targets(
        self, table: Mapping[str, TensorRef], tied: Mapping[str, str]
    ) -> dict[str, list[Tensor]]:
        """Return the model's tensors for each published one, after checking that they fit."""
        if self._model is None:
            return {name: [] for name in table}
        own, own_tied = tensors_of(self._model)
        every = own | {name: own[first] for name, first in own_tied.items()}
        problems = [f"it has no {name}" for name in {*table, *tied} - {*every}]
        problems += [f"{name} was not published" for name in {*every} - {*table, *tied}]
        problems += [
            f"{name} is tied, and was not" for name in {*own_tied} & {*table} - {*tied.values()}
        ]
        problems += [
            f"{name} has shape {tuple(every[name].shape)}, published is {ref.shape}"
            for name, ref in table.items()
            if name in every and tuple(every[name].shape) != ref.shape
        ]
        if problems:
            raise StreamError(
                f"the model does not fit {self._storage.where}: {listed(sorted(problems))}"
            )
        further = {name: [other for other in tied if tied[other] == name] for name in table}
        return {
            name: [every[name], *(every[other] for other in others if other in own)]
            for name, others in further.items()
        }

    def _put(self, name: str, value: Tensor, targets: list[Tensor]) -> Tensor:
        """Copy a value into the model; return the tensor that the next difference changes."""
        for target in targets:
            target.copy_(value)
        first = next((target for target in targets if target.dtype == value.dtype), value)
        self._copies[name] = [target for target in targets if target is not first]
        return first

    def _read_step(self, held: Held, number: int) -> None:
        name = f"{self._storage.where}/{step_name(number)}"
        with self._storage.read_step(number) as (record, payload):
            came = record["number"], record["stream"], record["previous"]
            if came != (number, held.stream, held.digest):
                raise StreamError(f"{name} does not follow version {held.number}, which is held")
            self.held = None  # until every tensor is changed
            for (key, tensor), length in zip(held.tensors.items(), record["lengths"], strict=True):
                if not length:
                    continue
                value = tensor.cpu().clone()
                try:
                    decode(value, payload.read(length))
                except ValueError as error:
                    raise self._changed(name, key) from error
                held.digests[key] = digest(value)
                tensor.copy_(value)
                for copy in self._copies[key]:
                    copy.copy_(value)
        if digest_of(table_of(held.tensors), held.digests) != record["digest"]:
            raise self._changed(name, "its digest")
        held.number, held.step = number, record["step"]
        held.digest, held.written = record["digest"], record["written"]
        self.held = held

    def _changed(self, name: str, cause: str) -> StreamError:
        return StreamError(
            f"{name} does not fit the tensors that it changes ({cause}): the model's weights were "
            "changed since the last version"
        )
