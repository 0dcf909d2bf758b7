"""A forward pass without consequences, from which the stages learn what will travel between
them.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm import Group
from thinwire.errors import ThinwireError
from thinwire.pipeline.worker import Parcel, StageWorker

__all__ = ["failure", "rehearse"]


def rehearse(worker: StageWorker, inputs: Any, peers: Group, device: torch.device) -> list[Parcel]:
    """Run one micro-batch through all stages but the last, one after another.

    The first stage gets real inputs, the others zeros. Buffers and torch's random numbers are put
    back afterwards; hooks are called, and other state that a module keeps by itself sees one more
    micro-batch.

    Args:
        worker: Of this rank's stage; `begin` is called on it.
        inputs: Of the model, for one micro-batch.
        peers: The stages of this replica.
        device: Of this stage.

    Returns:
        The parcels between stages 1 and 2, 2 and 3, and so on; the same on all ranks.

    Raises:
        Exception: On the rank whose stage failed, its own error.
        TypeError, ValueError, ThinwireError: On the others, with its text.

    Communication: per stage but the last a gather of the parcel's description.
    """
    parcels: list[Parcel] = []
    for stage in range(peers.size - 1):
        error: Exception | None = None
        answer: dict[str, Any] = {}
        if peers.rank == stage:
            try:
                with _undone(worker.stage, device):
                    answer = _parcel(worker, inputs, parcels[-1] if parcels else None, device)
            except Exception as problem:  # raised below, once the others know
                if stage:
                    problem.add_note(
                        f"In the rehearsal of stage {stage + 1}, which runs once on zeros of the "
                        "shapes and types that it will get, to learn what it sends."
                    )
                error, answer = problem, {"error": [type(problem).__name__, str(problem)]}
        answers = peers.gather_bytes(
            json.dumps(answer).encode(), what="describing what stages send"
        )
        if error is not None:
            raise error
        told = json.loads(answers[stage])
        if "error" in told:
            raise failure(stage, peers.size, *told["error"])
        parcels.append(
            Parcel(told["layout"], tuple((d, tuple(s), g) for d, s, g in told["tensors"]))
        )
    return parcels


def failure(stage: int, stages: int, kind: str, text: str) -> Exception:
    """What is raised where another stage (counted from 0) had an error: one of its kind, if it
    speaks of arguments.
    """
    kinds = {"TypeError": TypeError, "ValueError": ValueError}
    return kinds.get(kind, ThinwireError)(
        f"stage {stage + 1} of {stages} failed in this step: {kind}: {text}"
    )


def _parcel(
    worker: StageWorker, inputs: Any, source: Parcel | None, device: torch.device
) -> dict[str, Any]:
    worker.begin([(inputs, None)], source, None, 1.0)
    value = worker.output(inputs, source.blanks(device) if source else ())
    parcel, _ = Parcel.of(value, what="the output of a stage")
    return {"layout": parcel.layout, "tensors": parcel.tensors}


@contextmanager
def _undone(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put buffers and random numbers back."""
    kept: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = [
        (part, name, buffer, None if buffer is None else buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
    ]
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in kept:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                part._buffers[name] = buffer
