"""The random-number generators of a process as a tree for a checkpoint."""

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.tree import mapped

_KIND = "thinwire.random_state"


def random_state() -> dict[str, Any]:
    """Return the states of all global generators: `random`, NumPy's, torch's on the CPU and on
    every CUDA device in use.

    Example:
        >>> state = random_state()
        >>> first = random.random()
        >>> set_random_state(state)
        >>> random.random() == first
        True

    Returns:
        A tree of plain values and tensors, for `set_random_state`.
    """
    return {
        "kind": _KIND,
        "python": random.getstate(),
        "numpy": _from_numpy(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in range(torch.cuda.device_count())]
        if torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's omission
        else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore all global generators from `random_state`. States of absent CUDA devices are left
    out.
    """
    if not is_random_state(state):
        raise TypeError(f"state must come from random_state(), got {type(state).__name__}")
    random.setstate(state["python"])
    words = mapped(lambda t: t.cpu().numpy().view(f"u{t.itemsize}"), state["numpy"])
    np.random.set_state(words)
    torch.set_rng_state(state["torch"].cpu())
    here = torch.cuda.device_count() if state["cuda"] else 0
    for device, entry in enumerate(state["cuda"][:here]):
        torch.cuda.set_rng_state(entry.cpu(), device)


def is_random_state(value: object) -> bool:
    """Return True for a result of `random_state`."""
    return isinstance(value, Mapping) and value.get("kind") == _KIND


def derived(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return states of new streams for a rank that had none, derived from those of another rank."""
    hasher = hashlib.sha256(f"{_KIND} {rank} ".encode())
    hasher.update(repr(state["python"]).encode())
    hasher.update(bytes(state["torch"].tolist()))
    words = [int.from_bytes(hasher.digest()[i : i + 4]) for i in range(0, 32, 4)]
    seed = int.from_bytes(hasher.digest()[:8]) >> 1
    return {
        "kind": _KIND,
        "python": random.Random(seed).getstate(),
        "numpy": _from_numpy(np.random.RandomState(words).get_state(legacy=False)),
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "cuda": [
            _cuda_state(seed + 1 + device, entry) for device, entry in enumerate(state["cuda"])
        ],
    }


def _cuda_state(seed: int, like: Tensor) -> Tensor:
    """Return the state of Philox on CUDA: 8 bytes of seed and 8 of offset."""
    if like.numel() != 16:
        return like
    return torch.frombuffer(bytearray(seed.to_bytes(8, "little") + bytes(8)), dtype=torch.uint8)


def _from_numpy(state: Any) -> Any:
    # torch 2.13 pickles tensors of unsigned 32-bit words but cannot read them back
    return mapped(lambda a: torch.from_numpy(a.view(f"i{a.itemsize}").copy()), state, np.ndarray)
