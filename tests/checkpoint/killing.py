"""Ranks that are killed at every point of a save, and what is loaded afterwards; run as a process
of its own.

`python -m tests.checkpoint.killing FOLDER` forks two ranks for every point, which costs a fraction
of starting them anew, and prints a JSON list that says for every point what happened. A point is an
operation on the file system inside the directory of checkpoints (an audit event, before it
happens), a force to the disk, a tensor about to be written into an open file, or an exchange with
the other rank.
"""

import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.api import Group, load, save, tensor_file
from tests.checkpoint.states import rank_state, same

SIZE = 2
AT_ONCE = 6
"""They mostly wait for each other."""
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}
STEPS = {"next": 3, "again": 2, "apart": 3}
"""Of the save that is killed; 1 and 2 are there.

The ranks have directories of their own in the last case.
"""
EVERY = {"next": 1, "again": 4, "apart": 4}
"""Which of the points are tried; all of them take three times as long."""


def home(root: Path, mode: str, rank: int) -> Path:
    """Where a rank keeps its checkpoints."""
    return root / (f"of_rank{rank}" if mode == "apart" else "shared")


class Points:
    """Counts what a save does from now on, and kills the process just before one of the things."""

    def __init__(self, root: Path, fatal: int | None) -> None:
        self.names: list[str] = []
        self._fatal, self._root = fatal, str(root)
        sys.addaudithook(self._on_event)
        os.fsync = self._before("fsync", os.fsync)
        tensor_file.bytes_of = self._before("tensor", tensor_file.bytes_of)
        Group.launch_bytes = self._before("exchange", Group.launch_bytes)  # type: ignore[method-assign]

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and isinstance(arguments[0], str | os.PathLike):
            path = os.fspath(arguments[0])
            # - no new events in here
            if path.startswith(self._root) or not os.path.isabs(path):  # noqa: PTH117
                self._reach(event)

    def _before(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._reach(name)
            return call(*args, **kwargs)

        return counted

    def _reach(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) - 1 == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def forked(root: Path, rank: int, body: Callable[[int], Any]) -> int:
    """Start `body(rank)` as a rank; its result is written to `root`."""
    child = os.fork()
    if child:
        return child
    try:
        warnings.simplefilter("ignore")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{root}/store",
            rank=rank,
            world_size=SIZE,
            timeout=timedelta(seconds=60),
        )
        (root / f"answer{rank}").write_text(json.dumps(body(rank)))
    except BaseException as error:
        (root / f"answer{rank}").write_text(
            json.dumps({"error": f"{type(error).__name__}: {error}"})
        )
    os._exit(0)


def answers(root: Path, children: list[int]) -> list[Any]:
    """What the ranks have returned; None of one that was killed."""
    for child in children:
        os.waitpid(child, 0)
    files = [root / f"answer{rank}" for rank in range(SIZE)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def save_old(root: Path, mode: str, rank: int) -> None:
    for step in (1, 2):
        save(home(root, mode, rank), rank_state(rank, step), step=step, group=Group(), facts={})


def save_new(root: Path, mode: str, rank: int, victim: int, fatal: int | None) -> list[str]:
    group = Group()
    points = Points(root, fatal if rank == victim else None)
    save(home(root, mode, rank), rank_state(rank, 7), step=STEPS[mode], group=group, facts={})
    return points.names


def load_all(folders: list[tuple[str, str]], rank: int) -> list[list[Any]]:
    """For every folder: which state it holds, and whether all is in order after one more save."""
    group, found = Group(), []
    for folder, mode in folders:
        directory = home(Path(folder), mode, rank)
        state = load(directory, group=group).state
        kind = [value for value in (2, 7) if same(state, rank_state(rank, value))]
        save(directory, rank_state(rank, 9), step=9, group=group, facts={})
        intact = same(load(directory, group=group).state, rank_state(rank, 9))
        hidden = [path.name for path in directory.iterdir() if path.name.startswith(".")]
        found.append([kind, intact, hidden])
    return found


def started(root: Path, body: Callable[[int], Any]) -> list[int]:
    """`body(rank)` on every rank."""
    return [forked(root, rank, body) for rank in range(SIZE)]


def scenarios_of(base: Path, mode: str) -> list[dict[str, Any]]:
    """The points of a kind of save, in one that nobody is killed in; makes their first folder."""
    template, counted = base / f"{mode}-template", base / f"{mode}-counted"
    template.mkdir()
    answers(template, started(template, lambda rank: save_old(template, mode, rank)))
    (template / "store").unlink()
    shutil.copytree(template, counted)
    names = answers(counted, started(counted, lambda rank: save_new(counted, mode, rank, 0, None)))
    return [
        {
            "mode": mode,
            "victim": victim,
            "point": point,
            "what": what,
            "folder": str(base / f"{mode}{victim}-{point}"),
        }
        for victim in range(SIZE)
        for point, what in enumerate(names[victim])
        if point % EVERY[mode] == 0
    ]


def start(base: Path, scenario: dict[str, Any]) -> list[int]:
    """The ranks of one save in which one of them is killed."""
    root, mode = Path(scenario["folder"]), scenario["mode"]
    shutil.copytree(base / f"{mode}-template", root, ignore=shutil.ignore_patterns("answer*"))
    return started(
        root, lambda rank: save_new(root, mode, rank, scenario["victim"], scenario["point"])
    )


def main(base: Path) -> list[dict[str, Any]]:
    """Kill at every point, then load everything."""
    scenarios = [scenario for mode in STEPS for scenario in scenarios_of(base, mode)]
    for first in range(0, len(scenarios), AT_ONCE):
        running = [
            (scenario, start(base, scenario)) for scenario in scenarios[first : first + AT_ONCE]
        ]
        for scenario, children in running:
            scenario["answers"] = answers(Path(scenario["folder"]), children)
    folders = [(scenario["folder"], scenario["mode"]) for scenario in scenarios]
    loaded = answers(base, started(base, lambda rank: load_all(folders, rank)))
    for i, scenario in enumerate(scenarios):
        scenario["loaded"] = [rank[i] if isinstance(rank, list) else rank for rank in loaded]
    return scenarios


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process that has started threads cannot be forked safely
    print(json.dumps(main(Path(sys.argv[1]))))
