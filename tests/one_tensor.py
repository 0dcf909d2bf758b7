"""Fold and selection of one tensor, by the functions for lists."""

from typing import NamedTuple

from torch import Tensor

from tests.api import Fold, Proposal, commit_list_, propose_list


class FoldRule(NamedTuple):
    momentum: float
    nesterov: bool = False


def propose(
    grad: Tensor, residual: Tensor, momentum_buffer: Tensor | None, k: int, rule: FoldRule
) -> Proposal:
    return propose_list([Fold(grad, residual, momentum_buffer, *rule)], [k])[0]


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
    commit_list_([Fold(grad, residual, momentum_buffer, *rule)], [(indices, sent)], [seed])
