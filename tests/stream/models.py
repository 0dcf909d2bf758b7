"""Models of every layout that versions must carry, as cases: one list, read by several tests.

State `n` of a model is a function of `n` alone, so that a model can be put back, and a test knows
what another process wrote.
"""

import re
import warnings
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import thinwire as tw
from tests.toys import warned
from thinwire.errors import StreamError

__all__ = ["CASES", "REFUSALS", "Bits", "Case", "Model", "Walk", "contents", "core_cases"]

REFUSALS = StreamError, TypeError, ValueError

Model = nn.Module | dict[str, Tensor]
Bits = dict[str, tuple[str, tuple[int, ...], bytes]]
"""By name the dtype, the shape and the bytes of a tensor."""
ALWAYS = range(1 << 30)


def contents(state: Mapping[str, Tensor], *dtypes: torch.dtype | None) -> Bits:
    """Return what tensors hold, floating-point ones after conversion to each of these dtypes."""
    found = {}
    for name, tensor in state.items():
        value = tensor.detach()
        for dtype in dtypes:
            value = value.to(dtype) if dtype and value.is_floating_point() else value
        shape, raw = tuple(value.shape), b"meta"
        if not value.is_meta:
            plain = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
            raw = plain.view(torch.uint8).numpy().tobytes()
        found[name] = str(value.dtype), shape, raw
    return found


def state_of(model: Model) -> dict[str, Tensor]:
    return model if isinstance(model, dict) else model.state_dict()


def values(like: Tensor, at: int, n: int) -> Tensor:
    """Return the values of tensor `at` in state `n`: the same ones but for slight changes."""
    first, own = (torch.Generator().manual_seed(997 * at + seed) for seed in (0, n + 1))
    value = torch.randn(like.shape, generator=first)
    some = torch.rand(like.shape, generator=own) < (0.3 if like.numel() > 4 else 1)
    value += 1e-2 * torch.randn(like.shape, generator=own) * some
    if like.is_complex():
        value = torch.complex(value, value.flip(0) if value.ndim else -value)
    elif like.dtype == torch.bool:
        value = (1000 * value) % 2
    elif not like.is_floating_point():
        value = (1000 * value).abs() % 120
    return value.to(like.dtype)


def tensors_in(model: Model) -> dict[str, Tensor]:
    """Return each tensor once, by its first name."""
    if isinstance(model, dict):
        return model
    return dict(model.named_parameters()) | dict(model.named_buffers())


@torch.no_grad()
def fill(model: Model, n: int) -> None:
    """Put a model into state `n`; a tensor called "still" stays as it is below state 90."""
    for at, (name, tensor) in enumerate(tensors_in(model).items()):
        tensor.copy_(values(tensor, at, n if n >= 90 or name != "still" else 0))


def nothing(_model: Model, _n: int) -> None: ...


@dataclass(frozen=True)
class Case:
    """A model that is published and followed."""

    name: str
    make: Callable[[], Model]
    change: Callable[[Any, int], None] = fill
    """Puts a model into state `n`."""
    read_into: Callable[[], Model] | None = None
    """Makes the model of the reader; None for `make`."""
    state: Callable[[Any], Mapping[str, Tensor]] = state_of
    """What a model holds, by published name, as plain tensors."""
    adapt: Callable[[Any, int], None] = nothing
    """What happens to the reader's model before it reads state `n`."""
    dtype: torch.dtype | None = None
    """Argument of `publish`."""
    reader_dtype: torch.dtype | None = None
    unpublished: str = ""
    """Pattern that the refusal to publish must match; empty where it must work."""
    unfollowed: str = ""
    """Pattern that the refusal to read states in `misfits` into the reader must match."""
    misfits: Container[int] = ALWAYS
    either: bool = False
    """True if being right is as good as such a refusal."""
    core: bool = field(default=False, kw_only=True)
    """True if it takes part in the matrix."""

    def made(self, n: int) -> Model:
        """Return a model in state `n`."""
        model = self.make()
        if not self.unpublished or self.either:
            self.change(model, n)
        return model

    def reader(self) -> Model:
        """Return a model to follow into, which holds nothing of what is published."""
        if self.read_into is None:
            return self.made(99)
        return self.read_into()

    def wanted(self, model: Model) -> Bits:
        """Return what a version of the model must hold."""
        return contents(self.state(model), self.dtype)

    def expected(self, model: Model) -> Bits:
        """Return what the reader's model must hold once it has that version."""
        return contents(self.state(model), self.dtype, self.reader_dtype)

    def held(self, reader: Model) -> Bits:
        """Return what the reader's model holds."""
        return contents(self.state(reader))

    def refuses(self, n: int) -> str:
        """Return the pattern with which the reader must or may refuse state `n`, or ""."""
        return self.unfollowed if n in self.misfits else ""

    def require_named(self, error: Exception, pattern: str) -> None:
        """Fail unless this is a refusal that may be, and names what does not fit."""
        assert pattern, f"{self.name} was refused: {error!r}"
        assert re.search(pattern, str(error)), f"the text does not match {pattern}: {error!r}"


def holder(**tensors: Tensor) -> nn.Module:
    """Return a module with these parameters and buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
    return module


def weights(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape, **options))


def plain(dtype: torch.dtype = torch.float32) -> nn.Module:
    still = torch.ones(5)
    return holder(weight=weights(6, 5), bias=weights(6), still=still, big=weights(300)).to(dtype)


def layer() -> nn.Module:
    return holder(weight=weights(6, 5), bias=weights(6))


def convolution(memory_format: torch.memory_format) -> nn.Module:
    return nn.Conv2d(3, 4, 3).to(memory_format=memory_format)


def transposed() -> nn.Module:
    return holder(weight=nn.Parameter(torch.ones(5, 6).t()), cut=torch.ones(6, 8)[:, 1:6])


class Tied(nn.Module):
    """An embedding and a head, of one parameter or of two."""

    def __init__(self, tied: bool = True, rows: int = 7) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, 4), nn.Linear(4, rows, bias=False)
        if tied:
            self.head.weight = self.table.weight


def untie_later(model: Tied, n: int) -> None:
    own = model.table.weight.clone() if 3 <= n < 90 else model.table.weight
    model.head.weight = own if own is model.table.weight else nn.Parameter(own)
    fill(model, n)


def grown(model: Tied, n: int) -> None:
    """More rows from state 3 on."""
    rows = 9 if 3 <= n < 90 else 7
    if model.table.num_embeddings != rows:
        model.table = nn.Embedding(rows, 4)
        model.head.weight = model.table.weight
    fill(model, n)


def grown_reader(model: Tied, n: int) -> None:
    if (n >= 3) != (model.table.num_embeddings == 9):
        grown(model, n)


def turned() -> Model:
    """A weight, and its transpose under another name."""
    weight = torch.ones(6, 5)
    return {"weight": weight, "turned": weight.t()}


def overlapping() -> Model:
    flat = torch.ones(12)
    return {
        "whole": flat,
        "front": flat[:7],
        "middle": flat[3:9].view(2, 3),
        "still": torch.ones(2),
    }


def separate() -> Model:
    return {"front": torch.ones(7), "middle": torch.ones(2, 3)}


def overlapping_pair() -> Model:
    flat = torch.zeros(12)
    return {"front": flat[:7], "middle": flat[3:9].view(2, 3)}


@torch.no_grad()
def fill_first(model: dict[str, Tensor], n: int) -> None:
    """Change one tensor, whose views the others are, and what is still."""
    [first, *_] = model.values()
    first.copy_(values(first, 0, n))
    if n >= 90 and "still" in model:
        model["still"].zero_()


def interleaved() -> nn.Module:
    flat = torch.ones(60)
    return holder(
        even=nn.Parameter(flat[:24:2]), odd=nn.Parameter(flat[1:24:2]), rest=flat[24:].view(6, 6)
    )


def two_types() -> Model:
    """One buffer as two dtypes, and another as complex and real numbers."""
    flat, parts = torch.ones(8), torch.ones(4, 2)
    return {"flat": flat, "raw": flat.view(torch.int32), "parts": parts,
            "complex": torch.view_as_complex(parts)}  # fmt: skip


@torch.no_grad()
def fill_two(model: dict[str, Tensor], n: int) -> None:
    for name in ("flat", "parts"):
        model[name].copy_(values(model[name], len(name), n))


def expanded() -> nn.Module:
    return holder(scale=torch.ones(1).expand(5), bias=weights(5))


@torch.no_grad()
def fill_expanded(model: nn.Module, n: int) -> None:
    model.scale[:1].fill_(1 + n / 7)
    model.bias.copy_(values(model.bias, 0, n))


class Running(nn.Module):
    """A buffer that `forward` assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.layer(x - self.mean)


def run_forward(model: Running, n: int) -> None:
    fill(model, n)
    model(values(torch.ones(3, 5), 7, n))


@torch.no_grad()
def replace_data(model: nn.Module, n: int) -> None:
    for at, param in enumerate(model.parameters()):
        param.data = values(param, at, n)


def replace_objects(model: nn.Module, n: int) -> None:
    for at, (name, param) in enumerate(list(model.named_parameters())):
        setattr(model, name, nn.Parameter(values(param, at, n)))


def replace_alike(model: nn.Module, n: int) -> None:
    """Replace the reader's tensors by others of the same values."""
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    model.bias.data, model.still = model.bias.data.clone(), model.still.clone()


class Split(nn.Module):
    """A fused weight that `state_dict` hands out in two copies, and takes back."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.bias = weights(8, 5), weights(8)

    def parts(self) -> dict[str, Tensor]:
        return {"query": self.fused[:3], "key": self.fused[3:], "bias": self.bias}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "fused"]
        for name in ("query", "key"):
            destination[prefix + name] = self.parts()[name].detach().clone()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        halves = [state.pop(prefix + name) for name in ("query", "key") if prefix + name in state]
        super()._load_from_state_dict({prefix + "fused": torch.cat(halves)} | state, prefix, *rest)


class SplitOnly(Split):
    """It does not take them back."""

    _load_from_state_dict = nn.Module._load_from_state_dict


class Copies(nn.Module):
    """`state_dict` hands out copies, under the names of the parameters and times `scale`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = weights(6, 5), weights(6), scale

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "bias"] = self.bias.detach()
        destination[prefix + "weight"] = self.weight.detach() * self.scale


class Extra(nn.Module):
    """Extra state, that is a tensor or is not."""

    def __init__(self, tensor: bool) -> None:
        super().__init__()
        self.weight, self.count, self.tensor = weights(3), 0, tensor

    def get_extra_state(self) -> Any:
        return torch.tensor([self.count]) if self.tensor else {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state[0])


def fill_extra(model: Extra, n: int) -> None:
    fill(model, n)
    model.count = n


def int8_layer() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.nn.quantized import Linear

        return nn.Sequential(nn.Linear(4, 4), Linear(4, 3))


class Boxed(torch.Tensor):
    """A tensor without storage of its own: its values stand in another one."""

    box: Tensor

    @staticmethod
    def __new__(cls, box: Tensor) -> "Boxed":
        return torch.Tensor._make_wrapper_subclass(cls, box.shape, dtype=box.dtype)

    def __init__(self, box: Tensor) -> None:
        self.box = box

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = tree_map_only(cls, lambda each: each.box, (args, kwargs or {}))
        found = func(*plain_args, **plain_kwargs)
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.zero_.default):
            return args[0]
        aliases = torch.ops.aten.detach.default, torch.ops.aten.alias.default
        return cls(found) if func in aliases else found


def boxed() -> Model:
    return {"one": Boxed(torch.ones(4, 3)), "two": Boxed(torch.ones(4, 3)), "three": torch.ones(2)}


def unboxed(model: Model) -> dict[str, Tensor]:
    return {name: getattr(tensor, "box", tensor) for name, tensor in state_of(model).items()}


@torch.no_grad()
def fill_boxed(model: Model, n: int) -> None:
    fill(unboxed(model), n)


class Lora(nn.Module):
    """A layer with an adapter of low rank, which is merged in states 3 and 4."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 6)
        self.set_merged(merged=False)

    def set_merged(self, *, merged: bool) -> None:
        if not merged and not hasattr(self, "lora_A"):
            self.lora_A, self.lora_B = weights(2, 5), weights(6, 2)
        elif merged and hasattr(self, "lora_A"):
            with torch.no_grad():
                self.base.weight += self.lora_B @ self.lora_A
            del self.lora_A, self.lora_B

    def to_state(self, n: int) -> None:
        self.set_merged(merged=n in (3, 4))
        fill(self, n)


def merge_reader(model: Lora, n: int) -> None:
    model.set_merged(merged=n in (3, 4))


PATTERNS = {
    torch.float32: [0x7FC00001, 0xFFC12345, 0x7F800001, 0xFF800002, 0x80000000, 0x7F800000, 0],
    torch.float16: [0x7E01, 0xFE45, 0x7C01, 0xFC02, 0x8000, 0x7C00, 0],
    torch.bfloat16: [0x7FC1, 0xFFC5, 0x7F81, 0xFF82, 0x8000, 0x7F80, 0],
}
"""Quiet and signalling NaN with payloads, -0.0, an infinity and 0.0."""


def special() -> Model:
    return {str(dtype): torch.ones(40, dtype=dtype) for dtype in PATTERNS}


def fill_special(model: dict[str, Tensor], n: int) -> None:
    for dtype, pattern in PATTERNS.items():
        whole = torch.int32 if dtype == torch.float32 else torch.int16
        turned = pattern[n % 7 :] + pattern[: n % 7] if n < 90 else [1] * 7
        raw = torch.tensor((turned * 6)[:40], dtype=torch.int64)
        model[str(dtype)].view(whole).copy_(raw.to(whole))


def subnormal() -> Model:
    return {"single": torch.ones(90), "half": torch.ones(90, dtype=torch.float16),
            "bfloat": torch.ones(90, dtype=torch.bfloat16)}  # fmt: skip


def fill_subnormal(model: dict[str, Tensor], n: int) -> None:
    fill(model, n)
    for name, scale in (("single", 1e-40), ("half", 1e-6), ("bfloat", 1e-39)):
        model[name].mul_(scale)


def of_types(*dtypes: torch.dtype) -> Model:
    return {str(dtype): torch.ones(70).to(dtype) for dtype in dtypes}


def complexes() -> Model:
    """Complex tensors, and views of one as its conjugate and its negative imaginary part."""
    flat = torch.ones(12, dtype=torch.complex64)
    return {"z": torch.ones(5, 3, dtype=torch.complex64), "conj": flat.conj(),
            "negative": torch.ones(6, dtype=torch.complex64).conj().imag}  # fmt: skip


def plain_complexes() -> Model:
    zeros = partial(torch.zeros, dtype=torch.complex64)
    return {"z": zeros(5, 3), "conj": zeros(12), "negative": torch.zeros(6)}


def tiny(count: int) -> Model:
    return {f"layer.{at}": torch.ones(2) for at in range(count)}


def fill_tiny(model: dict[str, Tensor], n: int) -> None:
    whole = values(torch.ones(2 * len(model)), 0, 0)
    whole[:200] = values(whole[:200], 1, n)
    torch._foreach_copy_(list(model.values()), list((whole * (n < 90)).split(2)))


def odd_names() -> Model:
    names = ("", "../up", "a.b", "a/b", "ü\n", 'x"y', "latest.json", "0")
    return {name: torch.ones(5) for name in names}


def half_meta() -> Model:
    model = plain()
    model.bias = nn.Parameter(torch.empty(6, device="meta"))
    return model


def in_inference() -> Model:
    with torch.inference_mode():
        model = plain()
        fill(model, 99)
    return model


def edit_weight(model: nn.Module, _n: int) -> None:
    model.weight.data[0, 0] += 1


def edit_still(model: nn.Module, _n: int) -> None:
    model.still[0] += 1


def later_half(model: nn.Module, n: int) -> None:
    model.to(torch.float16 if 3 <= n < 90 else torch.float32)
    fill(model, n)


def real_parts() -> Model:
    return {"z": torch.zeros(5, 3), "conj": torch.zeros(12), "negative": torch.zeros(6)}


CHANNELS_LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format
FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2
INTEGERS = torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool
UNSIGNED = torch.uint16, torch.uint32, torch.uint64
HOOK = r"fused|query|key"

CASES = [
    Case("contiguous", plain, core=True),
    Case("sequential", lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))),
    Case("channels_last", partial(convolution, CHANNELS_LAST), core=True),
    Case("channels_last-to-contiguous", partial(convolution, CHANNELS_LAST),
         read_into=partial(convolution, CONTIGUOUS)),
    Case("contiguous-to-channels_last", partial(convolution, CONTIGUOUS),
         read_into=partial(convolution, CHANNELS_LAST)),
    Case("transposed", transposed, core=True),
    Case("transposed-to-contiguous", transposed,
         read_into=lambda: holder(weight=weights(6, 5), cut=torch.ones(6, 5))),
    Case("tied", Tied, core=True),
    Case("tied-to-untied", Tied, read_into=partial(Tied, tied=False)),
    Case("untied-to-tied", partial(Tied, tied=False), read_into=Tied, unfollowed=r"head\.weight"),
    Case("untied-later", Tied, untie_later, read_into=partial(Tied, tied=False)),
    Case("turned", turned, fill_first),
    Case("overlapping", overlapping, fill_first, core=True),
    Case("overlapping-only-in-the-reader", separate, read_into=overlapping_pair,
         unfollowed="front|middle"),
    Case("interleaved", interleaved),
    Case("two-types", two_types, fill_two),
    Case("expanded", expanded, fill_expanded, core=True),
    Case("expanded-to-contiguous", expanded, fill_expanded,
         read_into=lambda: holder(scale=torch.zeros(5), bias=weights(5))),
    Case("expanded-only-in-the-reader",
         lambda: holder(bias=weights(5), scale=torch.ones(5)),
         read_into=expanded, unfollowed="scale"),
    Case("assigned-in-forward", Running, run_forward, core=True),
    Case("replaced-data", layer, replace_data),
    Case("replaced-parameters", layer, replace_objects),
    Case("replaced-in-the-reader", plain, adapt=replace_alike),
    Case("split-by-a-hook", Split, state=Split.parts, core=True),
    Case("split-without-a-way-back", SplitOnly, state=Split.parts, unfollowed=HOOK),
    Case("copies", partial(Copies, 1.0), state=lambda m: {"bias": m.bias, "weight": m.weight}),
    Case("scaled-copies", partial(Copies, 2.0),
         state=lambda m: {"bias": m.bias, "weight": m.weight * 2}, unfollowed="weight"),
    Case("boxed", boxed, fill_boxed, state=unboxed, unpublished="one|two",
         unfollowed="one|two", either=True, core=True),
    Case("boxed-to-plain", boxed, fill_boxed, state=unboxed,
         read_into=lambda: unboxed(boxed()), unpublished="one|two", either=True),
    Case("plain-to-boxed", lambda: unboxed(boxed()), fill_boxed, read_into=boxed, state=unboxed,
         unfollowed="one|two", either=True),
    Case("int8-layer", int8_layer, unpublished=r"1\._packed_params", core=True),
    Case("extra-state", partial(Extra, tensor=False), fill_extra, unpublished="_extra_state"),
    Case("extra-tensor", partial(Extra, tensor=True), fill_extra,
         state=lambda m: {"weight": m.weight, "_extra_state": torch.tensor([m.count])}),
    Case("not-only-tensors", lambda: {"weight": torch.ones(3), "epoch": 4}, unpublished="epoch"),
    Case("lazy", lambda: nn.LazyLinear(3), unpublished="weight"),
    Case("sparse", lambda: {"weight": torch.eye(3).to_sparse()}, unpublished="weight"),
    Case("numbers", lambda: holder(scale=weights(()), count=torch.tensor(3)), core=True),
    Case("empty", lambda: holder(none=weights(0, 3), weight=weights(4)), core=True),
    Case("complex", complexes, core=True),
    Case("complex-to-plain", complexes, read_into=plain_complexes),
    Case("complex-to-real", complexes, read_into=real_parts, unfollowed="z|conj"),
    Case("special", special, fill_special, core=True),
    Case("subnormal", subnormal, fill_subnormal, core=True),
    Case("bfloat16", partial(plain, torch.bfloat16), core=True),
    Case("float16", partial(plain, torch.float16)),
    Case("float8", partial(of_types, *FLOAT8), core=True),
    Case("integers", partial(of_types, *INTEGERS), core=True),
    Case("unsigned", partial(of_types, *UNSIGNED), unpublished="uint", unfollowed="uint",
         either=True),
    Case("many-tiny", partial(tiny, 10_000), fill_tiny),
    Case("tiny", partial(tiny, 60), fill_tiny, core=True),
    Case("odd-names", odd_names),
    Case("reserved-name", lambda: {"__metadata__": torch.ones(3), "weight": torch.ones(3)},
         unpublished="__metadata__", either=True),
    Case("lora", Lora, Lora.to_state, adapt=merge_reader, core=True),
    Case("lora-of-a-reader-that-stays", Lora, Lora.to_state, unfollowed="lora_A", misfits=(3, 4)),
    Case("grown", Tied, grown, adapt=grown_reader),
    Case("grown-of-a-reader-that-stays", Tied, grown, unfollowed=r"table\.weight",
         misfits=range(3, 90)),
    Case("half-later", plain, later_half, reader_dtype=torch.float32),
    Case("bfloat16-to-float32", plain, dtype=torch.bfloat16, reader_dtype=torch.float32),
    Case("float32-to-bfloat16", plain, read_into=partial(plain, torch.bfloat16),
         reader_dtype=torch.bfloat16),
    Case("meta", plain, read_into=half_meta, unfollowed="bias"),
    Case("inference", plain, read_into=in_inference, unfollowed="weight|bias", either=True),
    Case("edited", plain, adapt=edit_weight, unfollowed="weight", either=True),
    Case("edited-still", plain, adapt=edit_still, unfollowed="still|weights", either=True),
]  # fmt: skip


class Walk:
    """A stream of versions, what was written by step, and a reader's model that follows it."""

    def __init__(self, case: Case, where: str, **how: Any) -> None:
        self.case, self.where, self.model = case, where, case.make()
        self.how = {"dtype": case.dtype, **how}
        self.written: dict[int, tuple[int, Bits, Bits]] = {}
        """By step the number of a state, and what versions and readers must hold of it."""
        self.step = 0

    def change(self, n: int | None = None) -> int:
        """Put the model into a state, the next one or `n`; return the step to publish it with."""
        self.step += 1
        n = 1 + (self.step - 1) % 5 if n is None else n
        self.case.change(self.model, n)
        wanted, expected = self.case.wanted(self.model), self.case.expected(self.model)
        self.written[self.step] = n, wanted, expected
        return self.step

    def publish(self, **how: Any) -> tw.Publisher:
        return tw.publish(self.where, self.model, **{**self.how, **how})

    def write(self, publisher: tw.Publisher, n: int | None = None) -> int:
        """Publish the next state; return the number of its version."""
        number = publisher.update(self.change(n))
        publisher.wait()
        return number

    def refused(self) -> bool:
        """Return True if the model was refused by name, as it should or may be."""
        try:
            publisher = self.publish()
            publisher.update(0)
            publisher.wait()
        except REFUSALS as error:
            self.case.require_named(error, self.case.unpublished)
            return True
        assert self.case.either or not self.case.unpublished, "it should have been refused"
        return False

    def follow(self, reader: Model | None = None, **how: Any) -> tw.Follower:
        usual = {"poll": 0.01, "patience": 0.05, "token": self.how.get("token")}
        return tw.follow(self.where, reader, **{**usual, **how})

    def read(self, follower: tw.Follower, reader: Model | None = None) -> int | StreamError:
        """Read the newest version; return its step, or the error.

        Fail unless it is what was written, and after an error the reader's model is as before.
        """
        before = None if reader is None else self.case.held(reader)
        with warned():
            try:
                version = follower.latest()
            except StreamError as error:
                assert reader is None or self.case.held(reader) == before, f"touched: {error!r}"
                return error
        return self.require_right(version, reader)

    def require_right(self, version: Any, reader: Model | None = None) -> int:
        """Fail unless a version is what was written; return its step."""
        _, wanted, expected = self.written[version.step]
        found = contents(version.state_dict())
        assert found == wanted, difference(found, wanted)
        if reader is not None:
            held = self.case.held(reader)
            assert held == expected, difference(held, expected)
        return version.step

    def read_all(self, follower: tw.Follower) -> list[int]:
        """Read all versions until the end; return their steps."""
        return [self.require_right(version) for version in follower]

    def read_until(self, step: int, follower: tw.Follower, reader: Model | None = None) -> None:
        """Read until the version of this step comes, in some tries of a short patience."""
        for _ in range(50):
            if (found := self.read(follower, reader)) == step:
                return
        raise AssertionError(f"the version of step {step} did not come: {found!r}")

    def read_newest(self, follower: tw.Follower, reader: Model | None = None) -> None:
        """Read the version of the last state, unless the case refuses it."""
        n, *_ = self.written[self.step]
        refusal = self.case.refuses(n) if reader is not None else ""
        found = self.read(follower, reader)
        if isinstance(found, StreamError):
            self.case.require_named(found, refusal)
        else:
            assert found == self.step
            assert self.case.either or not refusal, "the reader should have been refused"


def difference(found: Bits, wanted: Bits) -> str:
    """Return what is wrong, in few words."""
    if found.keys() != wanted.keys():
        return f"{sorted(found)} and {sorted(wanted)}"
    return f"{[name for name in found if found[name] != wanted[name]]} differ"


def core_cases() -> list[Case]:
    """Return the cases of the matrix."""
    return [case for case in CASES if case.core]
