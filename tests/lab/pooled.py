"""The workers of a comparison in processes that are there already, which start in no time."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.launched import as_torchrun_starts, free_port
from tests.ranks import Pool
from thinwire.lab import worker
from thinwire.lab.diary import GO

__all__ = ["run_workers_in"]


def run_workers_in(ranks: Pool) -> Callable[..., Iterator[dict[str, Any]]]:
    """What stands for `run_workers` over the loopback; the events come when all have ended."""

    def run_workers(
        config: Mapping[str, Any], workers: int, network: None, work: Path
    ) -> Iterator[dict[str, Any]]:
        assert network is None
        work.mkdir(parents=True, exist_ok=True)
        path = work / "config.json"
        path.write_text(json.dumps({**config, "events": str(work)}), encoding="utf-8")
        (work / GO).touch()  # nobody limits a link first
        ranks.run(_work, str(path), free_port(), size=workers, timeout_s=100)
        for line in (work / "rank0.jsonl").read_text().splitlines():
            yield json.loads(line)

    return run_workers


def _work(rank: int, size: int, config: str, port: int) -> None:
    with as_torchrun_starts(rank, size, port):
        worker.main(config)
