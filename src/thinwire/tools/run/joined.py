"""A comparison under torchrun or another launcher: the ranks that it has started train, over the
network between them.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import timedelta
from typing import Any, final

from thinwire.tools.run.config import Job, imported
from thinwire.tools.run.launch import TaskRefused, WorkerError

__all__ = ["by_first", "joined", "run_here"]


@contextlib.contextmanager
def joined(said: Mapping[str, Any], timeout_s: float) -> Iterator[None]:
    """Belong to the process group of all ranks.

    Args:
        said: What must be the same on all of them.
        timeout_s: How long a rank waits for a message of another one.

    Raises:
        ValueError: It differs; on all ranks.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    try:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, dict(said))
        for rank, other in enumerate(everyone):
            for key, value in everyone[0].items():
                if other[key] != value:
                    raise ValueError(
                        f"ranks were told different things: {key} is {value!r} on rank 0 and "
                        f"{other[key]!r} on rank {rank}; start all of them alike"
                    )
        yield
    finally:
        dist.destroy_process_group()


def by_first(check: Callable[[], None]) -> None:
    """Run a check on rank 0 alone.

    Raises:
        ValueError: What it raised; on all ranks.
    """
    import torch.distributed as dist

    told: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            check()
        except ValueError as error:
            told[0] = str(error)
    dist.broadcast_object_list(told)
    if told[0] is not None:
        raise ValueError(told[0])


@final
class _Told:
    """Events of this rank, for the thread that shows them; see `Events`."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def write(self, event: str, **fields: Any) -> None:
        """Hand the event over at once."""
        self.heard.put({"event": event, "unix_s": time.time(), **fields})

    write_sometimes = write

    def wait_for_release(self) -> None:
        """Go on: there is no link to limit."""


def run_here(job: Job) -> Generator[dict[str, Any], None, None]:
    """Do one job as this rank of the process group, and yield its events as they come; the last one
    is the result.

    Raises:
        TaskRefused: The job's task is the user's, and cannot be trained.
        WorkerError: With this rank's error.
    """
    told = _Told()

    def work() -> None:
        try:
            result = imported(job.task)(job.config, told).train()
            told.write("result", **result)
        except BaseException as error:
            told.write("error", kind=type(error).__name__, message=str(error))

    threading.Thread(target=work, name="thinwire-training", daemon=True).start()
    while True:
        event = told.heard.get()
        if event["event"] == "error":
            if event["kind"] == "TaskError":
                raise TaskRefused(event["message"])
            raise WorkerError(f"this rank failed: {event['kind']}: {event['message']}")
        yield event
        if event["event"] == "result":
            return
