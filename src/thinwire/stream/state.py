"""The tensors of a model: what is published of it, and where a version is written."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
        if not (isinstance(value, Tensor) and isinstance(name, str))
        or is_lazy(value)
        or name == "__metadata__"
    ]
    if others:
        names = listed([*map(str, others)])
        raise Refused(
            f"{names} of the model's state is no tensor with values, or has a name that no file "
            "can hold: give a mapping of the tensors that are to be published"
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
    memory = address, local.storage_offset(), local.shape, local.stride()
    return *memory, local.dtype, local.is_conj(), local.is_neg(), tensor.shape


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
        return torch.empty(whole.shape, dtype=_dtype_of(whole, dtype), device="cpu").copy_(whole)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise Refused(
            f"the values of {name} cannot be read: it is a {type(tensor).__name__} of {whole.dtype}"
            f" on {whole.device} ({error})"
        ) from None


class Receiver:
    """A model whose tensors take a version, looked up by name each time."""

    def __init__(self, model: Model, table: Mapping[str, TensorRef], tied: Mapping[str, str]):
        self._own, own_tied = tensors_of(model)
        self._first = {name: name for name in table} | dict(tied)
        """The name under which each tensor was published."""
        problems = [f"it has no {name}" for name in {*self._first} - {*self._own, *own_tied}]
        for name, first in own_tied.items():
            if self._first.get(name) != self._first.get(first):
                problems.append(f"{name} is tied to {first}, and was not")
        for name, tensor in self._own.items():
            ref = table.get(self._first.get(name, ""))
            if ref is None:
                problems.append(f"{name} was not published")
            elif tuple(tensor.shape) != ref.shape:
                problems.append(f"{name} has shape {tuple(tensor.shape)}, published is {ref.shape}")
            elif tensor.is_meta or (ref.dtype.is_complex and not tensor.is_complex()):
                kind = "a meta tensor" if tensor.is_meta else "real"
                problems.append(f"{name} is {kind}, and {ref.dtype} was published")
        if problems:
            raise Refused(f"the model does not fit: {listed(sorted(problems))}")
        self.targets: dict[str, list[Tensor]] = {name: [] for name in table}
        """The tensors that take each published one."""
        for name, tensor in self._own.items():
            self.targets[self._first[name]].append(tensor)
        self._model = model
        self._memory = list(self._own.values())
        if isinstance(model, nn.Module):
            self._memory = [one.detach() for one in (*model.parameters(), *model.buffers())]
        own = set(map(_address, self._memory))
        self._live = all(_address(one) in own for one in self._own.values() if one.numel())
        """True if these are the model's own tensors, False if `state_dict` hands out copies."""
        self.holds = {
            name
            for name, ref in table.items()
            if self._live and all(target.dtype == ref.dtype for target in self.targets[name])
        }
        """The published tensors that the model has in their dtype."""

    def write_(self, values: Mapping[str, Tensor]) -> None:
        """Write these values into the model, or raise and leave it as it is."""
        if self._live and _are_apart(self._memory):
            self._copy_(values)
            return
        before = [tensor.clone() for tensor in self._memory]
        problem: object = None
        try:
            if self._live:
                self._copy_(values)
            else:
                model: Any = self._model
                state = model.state_dict()
                names = zip(plain_names(state), state, strict=True)
                first_names = self._first
                model.load_state_dict({name: values[first_names[plain]] for plain, name in names})
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            problem = error
        found, _ = tensors_of(self._model)
        wrong = [
            name
            for name, tensor in found.items()
            if (first := self._first[name]) in values and not _equal(tensor, values[first])
        ]
        if problem is None and not wrong:
            return
        for tensor, old in zip(self._memory, before, strict=True):
            _copy_(tensor, old)
        raise Refused(
            f"the model does not take the values of {listed(wrong)}: {problem or ''} tensors that "
            "share memory need equal values, and copies that state_dict hands out a way back"
        )

    def _copy_(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            for target in self.targets[name]:
                _copy_(target, value)


def _are_apart(tensors: Iterable[Tensor]) -> bool:
    """Return True if each tensor has a storage of its own, and fills it."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    addresses = set(map(_address, filled)) - {0}
    return len(addresses) == len(filled) and all(
        tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in filled
    )


def _equal(tensor: Tensor, value: Tensor) -> bool:
    """Return True if a tensor has the bits of a value, in its own dtype."""
    return torch.equal(bytes_of(tensor), bytes_of(value.to(tensor.dtype)))


def _copy_(target: Tensor, value: Tensor) -> None:
    """Write a value into a tensor, into one of the elements that share their memory."""
    if 0 in target.stride():
        one = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
        target = target[one]
        value = value[one]
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        target.copy_(value)
