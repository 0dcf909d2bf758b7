"""The workers of a comparison in processes that are there already, which start in no time."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.api import EventReader, Job, failure_of, release, worker
from tests.launched import as_torchrun_starts, free_port
from tests.ranks import Pool

__all__ = ["run_workers_in"]


def run_workers_in(ranks: Pool) -> Callable[..., Iterator[dict[str, Any]]]:
    """What stands for `run_workers` over the loopback; the events come when all have ended."""

    def run_workers(job: Job, workers: int, network: None, work: Path) -> Iterator[dict[str, Any]]:
        assert network is None
        work.mkdir(parents=True, exist_ok=True)
        path = work / "job.json"
        job.write(path)
        release(work)  # nobody limits a link first
        readers = [EventReader(work, rank) for rank in range(workers)]
        answers = ranks.run(_work, str(path), free_port(), size=workers, expect_errors=True)
        first, *others = [reader.read() for reader in readers]
        errors = [
            {"rank": rank, **event}
            for rank, events in enumerate([first, *others])
            for event in events
            if event["event"] == "error"
        ]
        if errors:
            raise failure_of(errors, [None] * workers, work)
        assert answers == [None] * workers, answers
        yield from first

    return run_workers


def _work(rank: int, size: int, job: str, port: int) -> None:
    with as_torchrun_starts(rank, size, port):
        worker.main(job)
