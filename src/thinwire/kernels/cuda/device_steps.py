"""Steps of LAMB, LARS and the outer SGD for lists of tensors on the device.

Their counterpart on the CPU is `cpu.numba_steps`.

A step is one launch for the whole list. If it needs norms it is three: the squares, block by block;
the ratio of each tensor; the move. There is no host synchronization. Moments, momentum without a
ratio and the outer step have the same bits as on the CPU. A ratio may differ by a rounding, since
its squares are added in another order.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.cuda import launching, triton_steps
from thinwire.kernels.cuda.launching import blocks_of, launch
from thinwire.kernels.rules import LambRule, LarsRule, OuterRule, TrustRule, bump_versions

_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    rule: LambRule,
) -> Tensor:
    """Update by LAMB, see `thinwire.core.lamb.lamb_list_`; return the ratios in one tensor."""
    betas = rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2
    constants = (rule.lr, *betas, *rule.corrections, rule.eps, rule.weight_decay)
    table = _table((params, grads, exp_avgs, exp_avg_sqs), constants, rule.trust)
    sums = table.empty_sums()
    table.launch(triton_steps.lamb_moments_, table.constants, sums)
    ratios = table.ratios(sums)
    table.launch(triton_steps.lamb_move_, table.constants, ratios)
    bump_versions(params, exp_avgs, exp_avg_sqs)
    return ratios


def lars_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    velocities: Sequence[Tensor] | None,
    rule: LarsRule,
) -> Tensor:
    """Update by LARS, see `thinwire.core.lars.lars_list_`; return the ratios in one tensor."""
    buffers = params if velocities is None else velocities
    constants = (rule.lr, rule.momentum, rule.trust.weight_decay)
    table = _table((params, grads, buffers), constants, rule.trust)
    if rule.trust.weight_decay:
        sums = table.empty_sums()
        table.launch(triton_steps.lars_squares, sums)
        ratios = table.ratios(sums)
    else:
        ratios = params[0].new_ones(len(params))
    table.launch(
        triton_steps.lars_move_, table.constants, ratios, KIND=_kind(velocities, rule.nesterov)
    )
    bump_versions(params, velocities or ())
    return ratios


def outer_(
    anchors: Sequence[Tensor],
    changes: Sequence[Tensor],
    buffers: Sequence[Tensor] | None,
    rule: OuterRule,
) -> None:
    columns = (anchors, changes, anchors if buffers is None else buffers)
    table = _table(columns, (rule.lr, rule.momentum), TrustRule())
    table.launch(triton_steps.outer_, table.constants, KIND=_kind(buffers, rule.nesterov))
    bump_versions(anchors, buffers or ())


class _Layout(NamedTuple):
    """Assignment of blocks to tensors, on the device."""

    owners: Tensor
    """Tensor of each block, int32."""
    tensors: Tensor
    """First block and number of entries of each tensor, int64."""


class _Table(NamedTuple):
    """The tensors as the kernels take them."""

    addresses: Tensor
    layout: _Layout
    constants: Tensor
    trust: Tensor
    like: Tensor

    def launch(self, kernel: Any, *arguments: Tensor, **constants: Any) -> None:
        owners, tensors = self.layout
        constants |= {"BLOCK": launching.BLOCK, "TYPE": _TYPES[self.like.dtype]}
        given = (self.addresses, owners, tensors, *arguments)
        launch(kernel, (len(owners),), self.like, *given, **constants)

    def empty_sums(self) -> Tensor:
        return torch.empty(
            (len(self.layout.owners), 2), dtype=torch.float64, device=self.like.device
        )

    def ratios(self, sums: Tensor) -> Tensor:
        tensors, block = self.layout.tensors, launching.BLOCK
        ratios = self.like.new_empty(len(tensors))
        given = (tensors, self.trust, sums, ratios)
        launch(triton_steps.trust_ratios, (len(tensors),), sums, *given, BLOCK=block)
        return ratios


def _table(
    columns: Sequence[Sequence[Tensor]], constants: Sequence[float], trust: TrustRule
) -> _Table:
    like = columns[0][0].detach()
    limits = (trust.coefficient, trust.weight_decay, trust.eps, trust.low, trust.high)
    floats = np.array([*constants, *limits])
    addresses = np.array(
        [[tensor.data_ptr() for tensor in column] for column in columns], np.int64
    ).T
    sent = _sent(np.concatenate((addresses.ravel(), floats.view(np.int64))), like.device)
    there = sent[addresses.size :].view(torch.float64)
    layout = _layout(tuple(tensor.numel() for tensor in columns[0]), launching.BLOCK, like.device)
    return _Table(sent, layout, there, there[len(constants) :], like)


def _sent(words: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy to the device without host synchronization."""
    here = torch.from_numpy(words)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


@functools.lru_cache(maxsize=32)
def _layout(sizes: tuple[int, ...], block: int, device: torch.device) -> _Layout:
    """Return the layout; the host waits for the one copy, so that every stream may read it."""
    blocks = np.array([blocks_of(size, block) for size in sizes])
    tensors = np.stack((blocks.cumsum() - blocks, sizes), axis=1)
    owners = np.repeat(np.arange(len(sizes), dtype=np.int32), blocks)
    return _Layout(torch.from_numpy(owners).to(device), torch.from_numpy(tensors).to(device))


def _kind(buffers: Sequence[Tensor] | None, nesterov: bool) -> Any:
    if buffers is None:
        return triton_steps.NO_MOMENTUM
    return triton_steps.NESTEROV if nesterov else triton_steps.PLAIN
