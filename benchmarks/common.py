"""Shared parts of the benchmarks: interleaved contenders, memory bandwidth, command line, rows."""

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from thinwire.tools.compare.results import describe_machine
from thinwire.tools.run.launch import Events

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Work = Callable[[], object]
AnyCell = TypeVar("AnyCell", bound="DataclassInstance")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; none if it does not exist."""
    texts = path.read_text().splitlines() if path.exists() else []
    return [json.loads(text) for text in texts]


class Results(Generic[AnyCell]):
    """Measurements by cell, as lines of a file to which new ones are appended.

    Args:
        path: Of the file.
        measure: Measures a cell, a dataclass that JSON can hold; says what the line has beside it.
    """

    def __init__(self, path: Path, measure: Callable[[AnyCell], dict[str, Any]]) -> None:
        self.path, self.measure = path, measure
        self.lines = {_key(line["cell"]): line for line in json_lines(path)}

    def of(self, cell: AnyCell) -> dict[str, Any]:
        """Return the measurement of a cell; measure it if it is missing."""
        fields = asdict(cell)
        key = _key(fields)
        if key not in self.lines:
            begin_s = time.monotonic()
            line = {"cell": fields, **self.measure(cell)}
            self.lines[key] = line
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            taken_s = time.monotonic() - begin_s
            print(
                f"{cell}: {line.get('loss') or line.get('step_ms')} ({taken_s:.0f} s)", flush=True
            )
        return self.lines[key]


def _key(cell: Mapping[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)


def seconds(work: Work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def interleaved_ms(works: dict[str, Work], numel: int, repeats: int) -> dict[str, list[float]]:
    """Times of works that take turns, A B C, A B C, ...; copying and adding `numel` float32 are
    among them.
    """
    source, target = torch.ones(numel), torch.zeros(numel)
    works = {**works, "copy": lambda: target.copy_(source), "add": lambda: target.add_(source)}
    for work in works.values():
        work()  # compiles and touches the memory
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(1e3 * seconds(work))
    return times


class Word(NamedTuple):
    """Milliseconds in which the memory moves one word of each entry."""

    copying: float
    """`copy_`: reads one word and writes one, which the processor reads as well."""
    adding: float
    """`add_`: reads two words and writes one of them."""

    def floors(self, words: int) -> dict[str, float]:
        """Milliseconds of that many words, as a row of a result holds them."""
        return {"floor": words * self.copying, "floor by adding": words * self.adding}


def summary(
    times_ms: dict[str, list[float]], statistic: Callable[[list[float]], float] = statistics.median
) -> tuple[dict[str, float], Word]:
    """The statistic of every work, and what the memory can do."""
    times = {name: statistic(values) for name, values in times_ms.items()}
    return times, Word(copying=times.pop("copy") / 2, adding=times.pop("add") / 3)


def student_t(free: int, share: float) -> float:
    """Return the quantile of Student's t at `share`, for so many degrees of freedom."""
    from scipy.stats import t  # comes with scikit-learn

    return float(t.ppf(share, free))


def surroundings(repeats: int) -> dict[str, object]:
    """Return the circumstances of a measurement, for its readers."""
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        "torch": torch.__version__,
        "machine": describe_machine(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def bare_parser(description: str | None) -> argparse.ArgumentParser:
    """A command line without options, whose help shows the description as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """A command line with the options that every benchmark has."""
    parser = bare_parser(description)
    parser.add_argument(
        "--repeats", type=int, default=9, help="rounds; at least 7 for figures that count"
    )
    parser.add_argument(
        "--threads", type=int, default=None, help="threads of all contenders; default: torch's own"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small and short: shows that it runs, measures nothing"
    )
    parser.add_argument("--out", type=Path, default=None, help="file for the figures as JSON")
    return parser


def markdown(titles: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table."""
    return [
        f"| {' | '.join(titles)} |",
        "|" + "---|" * len(titles),
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]


def save(result: dict[str, object], path: Path | None) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def alive(events: Events) -> Iterator[None]:
    """Write an event now and then: a launch gives up workers that are silent for long."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(10):
            events.write("alive")

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def sent_bytes() -> int:
    """Return what all interfaces of this namespace have sent, headers and answers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)
