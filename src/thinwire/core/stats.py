"""What a rank has done so far, under one set of names: flat, numbers only."""

import math

__all__ = ["numbers"]


def numbers(
    *,
    step: int,
    bytes_sent: int,
    bytes_dense: int,
    bytes_received: int = 0,
    bytes_between_nodes: int | None = None,
    bytes_between_stages: int = 0,
    wait_s: float = 0.0,
    sparsity: float = 0.0,
    microsteps: int = 0,
    dropped_steps: int = 0,
    averagings: int = 0,
    k_steps: int = 1,
    loss_scale: float = 1.0,
    applied_share: float = 1.0,
    rate_bit_s: float = 0.0,
    waiting_share: float = 0.0,
) -> dict[str, float]:
    """The statistics of an engine, of local updates, or of an optimizer that exchanges.

    Args:
        step: Updates made by this rank; local steps where it trains locally.
        bytes_sent: Message bytes that this rank gave to exchanges, with headers and agreements.
        bytes_dense: What dense gradients would have been: 4 bytes per trainable element and update.
        bytes_received: What came from other ranks, in this process.
        bytes_between_nodes: Of `bytes_sent` what left the node; all of it where that is None.
        bytes_between_stages: That this rank gave to the other stages of its pipeline, in this
            process; in no other sum.
        wait_s: Seconds in which this rank was blocked until an exchange was over, in this process.
        sparsity: Fraction of a compressed tensor that is not sent in the next exchange; 0 where
            nothing is left out.
        microsteps: Of an unfinished update.
        dropped_steps: Updates that were dropped.
        averagings: Of parameters, under local updates.
        k_steps: Updates between two exchanges that are in force.
        loss_scale: Factor of the next loss; 1 without one.
        applied_share: Estimated part of the ranks' mean change that compressed averagings have
            applied so far, see `LocalUpdates.stats`; 1 where all of it is applied in time.
        rate_bit_s: Payload that this rank's line carries, in bits a second: a moving mean over
            about the last 20 exchanges of 64 KiB and more that this rank was blocked for, late
            ranks included; 0 before the first one. Of this process.
        waiting_share: Part of the time for which this rank was blocked until an exchange was over:
            a moving mean over about the last 20 rounds, each an update or the local steps up to an
            averaging; 0 before the second one. Of this process.

    Returns:
        All of these by name, and `ratio`, bytes_dense / bytes_sent: larger is better, infinite
        where nothing was sent.
    """
    return {
        "step": step,
        "microsteps": microsteps,
        "dropped_steps": dropped_steps,
        "averagings": averagings,
        "k_steps": k_steps,
        "sparsity": sparsity,
        "loss_scale": loss_scale,
        "applied_share": applied_share,
        "bytes_sent": bytes_sent,
        "bytes_received": bytes_received,
        "bytes_between_nodes": bytes_sent if bytes_between_nodes is None else bytes_between_nodes,
        "bytes_between_stages": bytes_between_stages,
        "bytes_dense": bytes_dense,
        "ratio": bytes_dense / bytes_sent if bytes_sent else math.inf,
        "wait_s": wait_s,
        "rate_bit_s": rate_bit_s,
        "waiting_share": waiting_share,
    }
