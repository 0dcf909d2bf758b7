"""Euclidean norms of whole tensors, and the trust ratio that LARS and LAMB use.

Norms are computed on the device, in float32 or wider. A parameter sharded over ranks (a DTensor)
counts with its whole norm: the shards are combined by one reduction per placement. Such tensors are
recognised by their methods, so that this module does not depend on ranks.
"""

import functools
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire._devices import has_float64, moved, uploaded
from thinwire.core.sharded import is_sharded, shard_of
from thinwire.core.tensors import TensorList, coalesced, values_of
from thinwire.kernels.reference import mixed
from thinwire.kernels.rules import TrustRule
from thinwire.layout.message import SKETCH_NUMEL

_HALVES = (torch.float16, torch.bfloat16)


def norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm over all entries; a sparse tensor must be coalesced.

    Returns:
        Shape (), finite if the entries are, on the tensor's device; no host synchronization.
        float64 for double precision, for larger squares, and on other devices than CPUs; else
        float32.

    >>> norm(torch.tensor([3.0, 4.0]))
    tensor(5.)
    """
    return norms([tensor])[0]


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `norm` of each; one reduction for sharded tensors of equal mesh and placement."""
    values = [values_of(tensor) for tensor in tensors]
    found = _rough(values)
    doubted = [i for i, n in enumerate(found) if not n.is_cpu or not bool(n.isfinite())]
    factors = [into_range(found[i]) for i in doubted]
    fine = _rough(values[i] * factor for i, factor in zip(doubted, factors, strict=True))
    for i, size, factor in zip(doubted, fine, factors, strict=True):
        found[i] = (size.double() if has_float64(size.device) else size) / factor
    return found


def into_range(size: Tensor) -> Tensor:
    """Return 1 for a finite norm, else a scale that keeps squares in range."""
    small = 2.0**-532 if size.dtype == torch.float64 else 2.0**-84
    return torch.where(size == math.inf, small, torch.ones_like(size))


def _rough(tensors: Iterable[Tensor]) -> list[Tensor]:
    found: list[Tensor] = [
        torch.linalg.vector_norm(x, dtype=torch.float32 if x.dtype in _HALVES else None)
        for x in tensors
    ]
    shards: dict[object, list[int]] = {}
    for i, value in enumerate(found):
        if is_sharded(value):
            key = (getattr(value, "device_mesh"), tuple(getattr(value, "placements")), value.dtype)  # noqa: B009
            shards.setdefault(key, []).append(i)
    for indices in shards.values():
        # a DTensor
        whole = torch.stack([found[i] for i in indices]).full_tensor()  # type: ignore[attr-defined]
        for i, value in zip(indices, whole.unbind(), strict=True):
            found[i] = value
    return found


def whole_norms(tensors: TensorList) -> Tensor:
    """Return `norms` of dense tensors of one type and device, stacked."""
    one_by_one = is_sharded(tensors[0]) or tensors[0].is_cpu
    found = norms(tensors) if one_by_one else torch._foreach_norm(tensors)
    return torch.stack(found).to(tensors[0].dtype)


def norms_over_shards(
    tensors: Mapping[str, Tensor], gather: Callable[[bytes, str], list[bytes]]
) -> dict[str, float]:
    """Return the norm, in float64, of each tensor, of which every rank has a part, maybe empty.

    `gather` takes bytes, 8 for each tensor, and an occasion, and returns every rank's bytes.

    >>> one_rank = {"weight": torch.tensor([3.0, 4.0])}
    >>> norms_over_shards(one_rank, lambda content, occasion: 2 * [content])
    {'weight': 7.0710678118654755}
    """
    if not tensors:
        return {}
    found = norms(list(tensors.values()))
    squares = torch.stack([value.cpu().double().square() for value in found]).tolist()
    form = struct.Struct(f"<{len(squares)}d")
    answers = [form.unpack(answer) for answer in gather(form.pack(*squares), "norms over shards")]
    totals = (sum(parts) ** 0.5 for parts in zip(*answers, strict=True))
    return dict(zip(tensors, totals, strict=True))


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm over all entries of all tensors together.

    Args:
        tensors: At least one; any shapes, dtypes and devices.

    Returns:
        Shape (), float32 or wider, on the first tensor's device; no host synchronization.

    >>> global_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5.)
    """
    parts = norms(tensors)
    return norm(torch.stack([part.to(parts[0].device) for part in parts]))


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the global norm, or 0 of no tensor. Synchronizes with the host."""
    found = list(map(coalesced, tensors))
    return float(global_norm(found)) if found else 0.0


def grad_norm(params: Iterable[Tensor]) -> float:
    """Return the global norm of this rank's part of the gradients in `p.grad`."""
    return norm_of(shard_of(p.grad) for p in params if p.grad is not None)


def trust_ratio(param_norm: Tensor, update_norm: Tensor, rule: TrustRule) -> Tensor:
    """Return the ratio that gives the update a norm proportional to the parameter's.

    r = coefficient * ||p|| / (||u|| + weight_decay * ||p|| + eps), limited to [low, high]. If one
    of the norms is zero, r = 1 whatever the limits, so that a tensor of zeros can move.

    Args:
        param_norm: ||p||, any shape: one entry for each tensor.
        update_norm: ||u||, same shape, dtype and device.
        rule: The constants.

    Returns:
        Shape and dtype of the norms, on their device; no host synchronization.

    >>> trust_ratio(torch.tensor(6.0), torch.tensor(2.0), TrustRule(coefficient=0.5))
    tensor(1.5000)

    Source: You et al., arXiv 1708.03888, equation 6 (LARS: u is the gradient, with weight decay in
    the denominator); arXiv 1904.00962, algorithm 2 (LAMB: u contains the decay). Differs: LAMB's
    limit is a function phi of ||p|| alone in the paper, here it limits the quotient.
    """
    denominator = update_norm + rule.eps if rule.eps else update_norm
    if rule.weight_decay:
        denominator = torch.add(denominator, param_norm, alpha=rule.weight_decay)
    ratio = param_norm / denominator
    if rule.coefficient != 1:
        ratio = ratio * rule.coefficient
    if rule.low > 0 or rule.high < math.inf:
        ratio = ratio.clamp(rule.low, rule.high)
    return torch.where(torch.minimum(param_norm, update_norm) > 0, ratio, 1.0)


_MOST = 1 << 12
_DRAWS, _SIGNS = 1, 2


def sketch(values: Tensor, key: int) -> Tensor:
    """Return 64 sums, float64, that stand for one real tensor and preserve inner products.

    Every entry, or 4,096 drawn ones, scaled up, are added with a random sign to one of the sums.
    The mean error of an inner product is about an eighth of the product of the norms.

    Source: count sketch, Charikar, Chen and Farach-Colton, 2002, section 3. Differs: one row, whose
    places follow from the position; only a sample of a large tensor.
    """
    return sketch_of([(values, key)])


def sketch_of(tensors: Iterable[tuple[Tensor, int]]) -> Tensor:
    """Return the sum of the sketches of tensors with their keys, on the CPU; one transfer."""
    entries = []
    signs = []
    for values, key in tensors:
        flat = values.reshape(-1)
        draws, its_signs = _plan(flat.numel(), key, flat.device)
        entries.append(flat if draws is None else flat[draws])
        signs.append(its_signs)
    found = []
    # one order of additions, wherever the tensors are
    for some, its_signs in zip(moved(entries, torch.device("cpu")), signs, strict=True):
        signed = some.double() * its_signs
        whole = torch.nn.functional.pad(signed, (0, -signed.numel() % SKETCH_NUMEL))
        found.append(whole.view(-1, SKETCH_NUMEL).sum(0))
    return torch.stack(found).sum(0)


@functools.lru_cache(maxsize=512)
def _plan(numel: int, key: int, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """Return the drawn entries (None for all) and their signs times the scale; at most 64 KiB."""
    count = min(numel, _MOST)
    positions = torch.arange(count, device="cpu")
    draws, odd = (
        mixed(mixed(positions + (purpose << 20)) + mixed(key)) for purpose in (_DRAWS, _SIGNS)
    )
    signs = (1.0 - 2.0 * (odd & 1)).double() * math.sqrt(max(1, numel) / max(1, count))
    return None if count == numel else uploaded(draws % numel, device), signs
