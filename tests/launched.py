"""Lets a rank of the pool run a script that torchrun starts, without the seconds of a start."""

import contextlib
import io
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from tests.api import free_port
from tests.ranks import Pool

__all__ = ["as_torchrun_starts", "free_port", "run_script"]


@contextlib.contextmanager
def as_torchrun_starts(rank: int, size: int, port: int) -> Iterator[io.StringIO]:
    """No process group, and torchrun's environment; yields what is printed meanwhile."""
    dist.barrier()  # else the other may still be connecting
    dist.destroy_process_group()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    texts = {key: str(value) for key, value in place.items()}
    texts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    texts["TORCHELASTIC_RUN_ID"] = "tests"
    os.environ.update(texts)
    said, held, destroy = io.StringIO(), [], dist.destroy_process_group

    def destroy_later() -> None:
        # DDP, which the script still has, would end the group's threads while it holds the
        # interpreter's lock, and one of them may wait for that lock to let go of a gradient
        held.append(dist.group.WORLD)
        destroy()

    dist.destroy_process_group = destroy_later
    try:
        with contextlib.redirect_stdout(said):
            yield said
    finally:
        dist.destroy_process_group = destroy
        for key in texts:
            del os.environ[key]


def run_script(ranks: Pool, script: Path, cwd: Path) -> str:
    """What both ranks of the script print; fails with the traceback of the one that fails."""
    return "".join(ranks.run(_main, str(script), str(cwd), free_port()))


def _main(rank: int, size: int, script: str, cwd: str, port: int) -> str:
    words, sys.argv = sys.argv, [script]
    sys.path.insert(0, str(Path(script).parent))  # as Python does for a script
    try:
        with as_torchrun_starts(rank, size, port) as said, contextlib.chdir(cwd):
            warnings.simplefilter("default")  # as in a process of its own
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.path.pop(0)
        sys.argv = words
    return said.getvalue()
