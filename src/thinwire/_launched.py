"""The system, and what a launcher such as torchrun sets in the environment; without torch."""

import sys
from collections.abc import Mapping

_PLACES = {
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    # of a step: in a batch script SLURM_NTASKS counts tasks that srun has not started
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}
"""Variables of launchers: the number of ranks, and the rank. The first one that is set counts, as
mpirun may start processes through srun.
"""
_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = "TORCHELASTIC_RUN_ID"


def require_linux(task: str, *, or_macos: bool = False) -> None:
    """Raise NotImplementedError on a system where a task cannot run."""
    if sys.platform not in ("linux", "darwin" if or_macos else "linux"):
        raise NotImplementedError(
            f"{task} needs Linux{' or macOS' if or_macos else ''}, and this is {sys.platform}: "
            "docs/questions.md lists what runs here"
        )


def environment_rank(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return rank and number of ranks, or None unless all four variables are set."""
    texts = [environment.get(name, "") for name in _NAMES]
    if not all(texts):
        return None
    rank, size = texts[:2]
    if not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
        raise ValueError(f"RANK={rank!r} and WORLD_SIZE={size!r} do not name a rank of a world")
    return int(rank), int(size)


def one_of_several(environment: Mapping[str, str]) -> str | None:
    """Return which of several processes this is by the variables of its launcher; None if alone."""
    for size_name, rank_name in _PLACES.items():
        if size := environment.get(size_name):
            rank = environment.get(rank_name)
            several = rank and size.isdigit() and int(size) > 1
            return f"rank {rank} of {size} by {rank_name} and {size_name}" if several else None
    rank = environment.get("PMIX_RANK", "0")  # PMIx has no variable for the number
    return f"rank {rank} of several by PMIX_RANK" if rank.isdigit() and int(rank) else None


def launched_rank(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return rank and number of ranks if torchrun, or another launcher of several ranks, started
    this process. MASTER_ADDR and MASTER_PORT alone do not count. ValueError if some are missing.
    """
    by_torchrun = _TORCHRUN in environment
    rank_and_size = environment_rank(environment)
    if rank_and_size is not None:
        return rank_and_size if by_torchrun or rank_and_size[1] > 1 else None
    started = [name for name in (_TORCHRUN, *_NAMES[:2]) if environment.get(name)]
    if not by_torchrun and (not started or environment.get("WORLD_SIZE") == "1"):
        return None
    missing = [name for name in _NAMES if not environment.get(name)]
    raise ValueError(
        f"{', '.join(started) or _TORCHRUN} in the environment, and no {', '.join(missing)}: a "
        f"launcher such as torchrun sets {', '.join(_NAMES)} for each rank; set all of them, or "
        "none to run without a launcher"
    )
