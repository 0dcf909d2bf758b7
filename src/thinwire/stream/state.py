"""The tensors of a model: what is published of it, and where a version is written."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from thinwire._names import plain_names
from thinwire._wording import listed
from thinwire.checkpoint.tensor_file import bytes_of
from thinwire.checkpoint.tree import TensorRef, parsed_table
from thinwire.core.sharded import shard_of, whole_of
from thinwire.errors import StreamError

Model = nn.Module | Mapping[str, Any]


class Refused(StreamError):
    """A cause that does not pass: another model, token or format."""


@dataclass
class Held:
    """A version that is held, in a model or in memory of its own."""

    number: int
    step: int
    stream: str
    digest: str
    written: int
    """Bytes of all differences up to this version."""
    table: dict[str, Any]
    """Dtypes and shapes by name, as JSON holds them."""
    tied: dict[str, str]
    digests: dict[str, bytes]
    """SHA-256 of each tensor."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Those that no model holds, on the CPU."""

    @property
    def refs(self) -> dict[str, TensorRef]:
        """The table as dtypes and shapes; `ValueError` for one that was not written so."""
        return parsed_table(self.table, 1)

    def is_like(self, table: Mapping[str, Any], tied: Mapping[str, str]) -> bool:
        """Return True for the same names in the same order, dtypes, shapes and ties."""
        return [*self.table.items()] == [*table.items()] and self.tied == tied

    def whole_digest(self) -> str:
        """Return the digest of a version: SHA-256 of its table and of that of each tensor."""
        rows = [[*entry, self.digests[name].hex()] for name, entry in self.table.items()]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def tensors_of(model: Model) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a model's `state_dict` by name, and for each further name of a tied
    tensor its first name.
    """
    # with the parameters themselves, of which tied ones without storage are told by identity
    state = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    others = [
        name
        for name, value in state.items()
        if not isinstance(value, Tensor) or is_lazy(value) or name == "__metadata__"
    ]
    if others:
        raise Refused(
            f"{listed(others)} of the model's state is no tensor with values and a name that a "
            "file can hold, so a version would lack it: give a mapping of the tensors to publish"
        )
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in zip(plain_names(state), state.values(), strict=True):
        key = _identity(tensor)
        if key in first:
            tied[name] = first[key]
        else:
            tensors[name] = tensor.detach()
            first[key] = name
    return tensors, tied


def _identity(tensor: Tensor) -> object:
    """Return what two names have in common if they are tied."""
    local = shard_of(tensor)
    address = _address(local)
    if not address or not local.numel():
        return id(tensor)
    place = address, local.storage_offset(), local.shape, local.stride()
    return *place, local.dtype, local.is_conj(), local.is_neg(), tensor.shape


def _address(tensor: Tensor) -> int:
    """Return where the storage begins; 0 for a tensor without one of its own."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass that wraps other tensors
        return 0


def table_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return dtypes and shapes by name, as JSON holds them, after `plain_copy`."""
    return {
        name: [0, name, str(_dtype_of(tensor, dtype)).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in tensors.items()
    }


def _dtype_of(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype and tensor.is_floating_point() else tensor.dtype


def difference(table: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first difference of what is published and another model; None if alike."""
    for name in dict.fromkeys((*table, *other)):
        there, here = (
            f"{one[name][2]} {one[name][3]}" if name in one else "missing" for one in (table, other)
        )
        if there != here:
            return f"{name} is {there} there, and {here} here"
    return None


def plain_copy(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor whole, contiguous, on the CPU, in memory of its own. Collective if sharded.

    Floating-point tensors are converted to `dtype` if it is given.
    """
    whole = whole_of(tensor.detach())
    try:
        return torch.empty(whole.shape, dtype=_dtype_of(whole, dtype)).copy_(whole)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise Refused(
            f"the values of {name} cannot be read: it is a {type(tensor).__name__} of {whole.dtype}"
            f" on {whole.device} ({error})"
        ) from None


class Receiver:
    """A model whose tensors take a version, looked up by name each time."""

    def __init__(self, model: Model, table: Mapping[str, TensorRef], tied: Mapping[str, str]):
        own, own_tied = tensors_of(model)
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
        problems += [f"{name} is a meta tensor" for name, tensor in own.items() if tensor.is_meta]
        problems += [
            f"{name} is real, published is {ref.dtype}"
            for name, ref in table.items()
            if name in every and ref.dtype.is_complex and not every[name].is_complex()
        ]
        if problems:
            raise Refused(f"the model does not fit: {listed(sorted(problems))}")
        further = {name: [other for other in tied if tied[other] == name] for name in table}
        self.targets: dict[str, list[Tensor]] = {
            name: [every[name], *(every[other] for other in others if other in own)]
            for name, others in further.items()
        }
        """The tensors that take each published one."""
        self._model, self._tied = model, tied
        self._live = isinstance(model, Mapping) or _is_live(model, own.values())
        """True if these are the model's own tensors, False if `state_dict` hands out copies."""
        self.holds = {
            name
            for name, ref in table.items()
            if self._live and all(target.dtype == ref.dtype for target in self.targets[name])
        }
        """The published tensors that the model has in their dtype."""

    def write_(self, values: Mapping[str, Tensor]) -> None:
        """Write these values into the model, after checking that it can take them."""
        if not self._live:
            self._load_(values)
            return
        pairs = [(name, target) for name in values for target in self.targets[name]]
        by_storage = defaultdict(list)
        for name, target in pairs:
            by_storage[_address(target)].append((name, target))
        for address, several in by_storage.items():
            if address and _overlap([target for _, target in several]):
                _rehearse(several, values)
        for name, target in pairs:
            _copy_(target, values[name])

    def _load_(self, values: Mapping[str, Tensor]) -> None:
        """Load a version, and undo that if the model then has another state."""
        model = self._model
        assert isinstance(model, nn.Module), "a mapping holds its tensors"
        own = [*model.parameters(), *model.buffers()]
        before = [tensor.detach().clone() for tensor in own]
        whole = {**values, **{name: values[first] for name, first in self._tied.items()}}
        names = dict(zip(plain_names(state := model.state_dict()), state, strict=True))
        problem: object = None
        try:
            model.load_state_dict({names[name]: value for name, value in whole.items()})
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            problem = error
        after, _ = tensors_of(model)
        changed = [name for name, tensor in after.items() if not _equal(tensor, whole[name])]
        if problem is not None or changed:
            for tensor, old in zip(own, before, strict=True):
                _copy_(tensor, old)
            raise Refused(
                f"the model's state_dict hands out copies, and load_state_dict does not take them "
                f"back: {problem or listed(changed)}"
            )


def _is_live(model: nn.Module, tensors: Iterable[Tensor]) -> bool:
    """Return True if all tensors lie in the memory of the model's parameters and buffers."""
    own = {_address(tensor) for tensor in (*model.parameters(), *model.buffers())} - {0}
    return all(_address(tensor) in own for tensor in tensors if tensor.numel())


def _overlap(tensors: list[Tensor]) -> bool:
    """Return True if these tensors of one storage, or elements of one, may share memory."""
    spans = sorted(filter(None, map(_span, tensors)))
    packed = all(end - begin == size for begin, end, size in spans)
    return not packed or any(after[0] < before[1] for before, after in pairwise(spans))


def _span(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return the first byte in the storage, the end, and the bytes of the elements."""
    if not tensor.numel():
        return None
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    return begin * size, (begin + int(last) + 1) * size, tensor.numel() * size


def _rehearse(several: list[tuple[str, Tensor]], values: Mapping[str, Tensor]) -> None:
    """Write into a copy of the storage, and raise where another tensor's values come out."""
    scratch: Any = several[0][1].untyped_storage()
    scratch = scratch.clone()
    views = [
        (name, torch.empty(0, dtype=target.dtype, device=target.device).set_(
            scratch, target.storage_offset(), target.shape, target.stride()
        ))
        for name, target in several
    ]  # fmt: skip
    for name, view in views:
        _copy_(view, values[name])
    for name, view in views:
        if not _equal(view, values[name]):
            raise Refused(
                f"{name} cannot hold its values: in this model it shares memory with another "
                "tensor, or with itself, which has other values"
            )


def _equal(tensor: Tensor, value: Tensor) -> bool:
    """Return True if a tensor has the bits of a value, in its own dtype."""
    return torch.equal(bytes_of(tensor), bytes_of(value.to(tensor.dtype)))


def _copy_(target: Tensor, value: Tensor) -> None:
    """Write a value into a tensor, into one of the elements that share their memory."""
    if 0 in target.stride():
        one = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
        target, value = target[one], value[one]
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        target.copy_(value)
