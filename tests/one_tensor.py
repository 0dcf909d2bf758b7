"""Fold, selection and codes of one tensor, by the functions for lists."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests import api


class FoldRule(NamedTuple):
    momentum: float
    nesterov: bool = False


def propose(
    grad: Tensor, residual: Tensor, momentum_buffer: Tensor | None, k: int, rule: FoldRule
) -> api.Proposal:
    return api.propose_list([api.Fold(grad, residual, momentum_buffer, *rule)], [k])[0]


def commit_(
    grad: Tensor,
    residual: Tensor,
    momentum_buffer: Tensor | None,
    indices: Tensor,
    sent: Tensor,
    rule: FoldRule,
    *,
    seed: int = 0,
) -> None:
    api.commit_list_([api.Fold(grad, residual, momentum_buffer, *rule)], [(indices, sent)], [seed])


def room(numel: int, k: int, bits: int) -> tuple[api.Layout, np.ndarray, slice, slice]:
    """Return the layout, zeros for its message, and where positions and values stand."""
    layout = api.Layout((api.Slot(numel, k),), bits)
    middle = api.HEADER_BYTES + api.position_bytes(numel, k)
    return (
        layout,
        np.zeros(layout.nbytes, np.uint8),
        slice(api.HEADER_BYTES, middle),
        slice(middle, None),
    )


def encode_positions(indices: Tensor, numel: int, k: int) -> Tensor:
    layout, code, positions, _ = room(numel, k, 1)
    part = indices, torch.ones(indices.numel())
    api.codes.encode_slots(layout.slot_table, [part], 1, np.array([k]), code)
    return torch.from_numpy(code[positions])


def decode_positions(code: Tensor, numel: int, k: int) -> Tensor:
    layout, raw, positions, _ = room(numel, k, 1)
    raw[positions] = code.numpy()
    return api.codes.decode_slots(layout.slot_table, raw, 1)[0][0]


def encode_values(values: Tensor, bits: int, k: int) -> tuple[Tensor, Tensor]:
    layout, code, _, at = room(k, k, bits)
    part = torch.arange(values.numel()), values
    (sent,), _ = api.codes.encode_slots(layout.slot_table, [part], bits, np.array([k]), code)
    return torch.from_numpy(code[at]), sent


def decode_values(code: Tensor, count: int, bits: int, k: int) -> Tensor:
    layout, raw, positions, at = room(k, k, bits)
    raw[positions] = encode_positions(torch.arange(count), k, k).numpy()
    raw[at] = code.numpy()
    return api.codes.decode_slots(layout.slot_table, raw, bits)[0][1]
