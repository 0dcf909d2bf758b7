"""A stand-in for an accelerator: a device of torch whose memory is the host's.

It is compiled once into a folder of the temporary directory. `Counting` counts, by line of
thinwire, where a GPU's host would wait, and the kernels that it would launch.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.allocations import tensors_in

NAME = "stand_in"
FIRST, SECOND = "stand_in:0", "stand_in:1"
"""With float64 and, as Apple's GPUs are, without."""
MISSING = "" if shutil.which("g++") else "needs g++, to compile the stand-in for an accelerator"
_SOURCE = Path(__file__).with_name("backend.cpp")


def built() -> Path:
    """The compiled backend; a second process waits for the first."""
    from torch.utils.cpp_extension import include_paths

    key = hashlib.blake2b(_SOURCE.read_bytes() + torch.__version__.encode(), digest_size=8)
    folder = Path(tempfile.gettempdir()) / f"thinwire-stand-in-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found, new = folder / f"{key.hexdigest()}.so", folder / f"{os.getpid()}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            libraries = Path(torch.__file__).parent / "lib"
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
            subprocess.run(
                ["g++", "-std=c++20", "-O0", "-w", "-fPIC", "-shared", abi]
                + [f"-I{path}" for path in include_paths()]
                + [str(_SOURCE), "-o", str(new), f"-L{libraries}", "-lc10", "-ltorch_cpu"],
                check=True,
            )
            new.replace(found)
    return found


class _Module:
    """`torch.stand_in`"""

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 2

    def device(self, device: Any) -> Any:
        return torch.accelerator.device_index(torch.device(device).index)

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are the CPU's, which torch seeds."""

    def get_rng_state(self, *device: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *device: Any) -> None:
        torch.set_rng_state(state)

    def synchronize(self, *device: Any) -> None:
        torch.accelerator.synchronize()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@functools.cache
def library() -> ctypes.CDLL:
    """The backend; from here on this process has the device."""
    loaded = ctypes.CDLL(str(built()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module())
    torch.utils.generate_methods_for_privateuse1_backend()
    loaded.on_wait(_waits)
    loaded.held_bytes.restype = loaded.most_held_bytes.restype = ctypes.c_int64
    return loaded


def first() -> str:
    library()
    return FIRST


def held_bytes(*, forget: bool = False) -> tuple[int, int]:
    """Of all tensors on both devices: now, and at most since it was forgotten."""
    if forget:
        library().forget_most_held_bytes()
    return library().held_bytes(), library().most_held_bytes()


_READS = ("_local_scalar_dense", "equal", "is_nonzero")
_LENGTHS = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
_BY_MASK = ("index", "index_put_", "_index_put_impl_")
_NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_")
_NO_KERNEL += ("resize_", "_unsafe_view", "lift_fresh", "is_same_size", "result_type")
_STAGED_BYTES = 1 << 16
"""CUDA copies so many bytes of pageable memory before it returns, without a wait."""
_active: "dict[int, Counting]" = {}


class Counting(TorchDispatchMode):
    """Waits and launches by line, bytes over the bus by direction, of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.launches = Counter[str](), Counter[str]()
        self.bytes = Counter[str]()

    def __enter__(self) -> "Counting":
        _active[threading.get_ident()] = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        del _active[threading.get_ident()]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        there = any(tensor.device.type == NAME for tensor in given)
        result = function(*args, **kwargs)
        there = there or any(tensor.device.type == NAME for tensor in tensors_in(result))
        name = function._schema.name.removeprefix("aten::")
        if name == "copy_" and given[0].device != given[1].device:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._moved(given[1], given[0], non_blocking)
        elif name == "_to_copy" and given[0].device != result.device:
            self._moved(given[0], result, kwargs.get("non_blocking", False))
        elif there and name in _READS:
            self.waits[f"{name} at {_line()}"] += 1
        elif there and (name in _LENGTHS or (name in _BY_MASK and _has_mask(args[1]))):
            self.waits[f"length at {_line()}"] += 1
        elif there and name not in _NO_KERNEL and not function.is_view:
            self.launches[_line()] += 1
        return result

    def _moved(self, source: torch.Tensor, to: torch.Tensor, non_blocking: bool) -> None:
        if not source.numel():
            return
        down = to.device.type == "cpu"
        self.bytes["down" if down else "up"] += source.nbytes
        free = (to if down else source).is_pinned() or (not down and source.nbytes <= _STAGED_BYTES)
        if not (non_blocking and free):
            self.waits[f"copy {'down' if down else 'up'} at {_line()}"] += 1


def _has_mask(indices: Any) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(indices))


def _line() -> str:
    """The innermost one of thinwire."""
    frame: Any = sys._getframe(2)
    while frame is not None and "/src/thinwire/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    name = frame.f_code.co_filename.rpartition("/src/thinwire/")[2]
    return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"


@ctypes.CFUNCTYPE(None)
def _waits() -> None:
    """Called where the host waits for a stream, an event or the device."""
    if counting := _active.get(threading.get_ident()):
        counting.waits[f"synchronize at {_line()}"] += 1
