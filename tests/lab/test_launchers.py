"""Commands on ranks of launchers other than torchrun, which say it by four variables only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api import launched_rank
from tests.launched import free_port
from tests.processes import ran_thinwire, running

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PLACE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x"}


def without(*names: str, **more: str) -> dict[str, str]:
    return {key: value for key, value in (PLACE | more).items() if key not in names}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (PLACE, (1, 4)),
        (PLACE | TORCHRUN, (1, 4)),
        (PLACE | {"RANK": "0", "WORLD_SIZE": "1"}, None),
        (PLACE | {"RANK": "0", "WORLD_SIZE": "1"} | TORCHRUN, (0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (without("RANK", "WORLD_SIZE"), None),
    ],
)
def test_process_is_one_of_several_ranks(
    environment: dict[str, str], place: tuple[int, int] | None
) -> None:
    assert launched_rank(environment) == place


def clean(**more: str) -> dict[str, str]:
    names = {*NAMES, *TORCHRUN}
    return {key: value for key, value in os.environ.items() if key not in names} | more


@pytest.mark.parametrize(
    ("words", "environment", "told"),
    [
        ("compare --workers 3", PLACE, "workers=3, but the launcher (such as torchrun) started 4"),
        ("compare --link 20mbit", PLACE, "omit --link, --up"),
        ("compare --loss 1%", PLACE, "--loss and --congestion"),
        ("compare --up 1mbit --down 2mbit", PLACE, "omit --link, --up, --down, --latency"),
        ("compare", TORCHRUN, "TORCHELASTIC_RUN_ID in the environment, and no RANK"),
        ("compare", without("RANK"), "WORLD_SIZE in the environment, and no RANK"),
        ("compare", without("WORLD_SIZE"), "RANK in the environment, and no WORLD_SIZE"),
        ("compare", without("MASTER_ADDR", "MASTER_PORT"), "and no MASTER_ADDR, MASTER_PORT"),
        ("compare", without("RANK", WORLD_SIZE="1") | TORCHRUN, "and no RANK"),
        ("compare", PLACE | {"WORLD_SIZE": "many"}, "WORLD_SIZE='many' do not name a rank"),
        ("run train.py", TORCHRUN, "TORCHELASTIC_RUN_ID in the environment, and no RANK"),
        ("probe --out p.json", TORCHRUN, "TORCHELASTIC_RUN_ID in the environment, and no RANK"),
        ("probe --out p.json --loss 2", PLACE, "write a percentage, as 0.2%"),
        ("probe --out p.json --batch 0", PLACE, "batch=0 is out of range; 1 to 4,096"),
        ("probe --out p.json", PLACE | {"RANK": "0", "WORLD_SIZE": "1"} | TORCHRUN, "only one"),
        ("probe --out p.json", {}, "torchrun"),
        ("doctor", PLACE | {"RANK": "4"}, "RANK='4' and WORLD_SIZE='4' do not name a rank"),
        ("run -- train.py", PLACE, "run it without torchrun"),
        ("run -- train.py", PLACE | TORCHRUN, "run it without torchrun"),
    ],
)
def test_bad_input_is_one_line(
    words: str, environment: dict[str, str], told: str, tmp_path: Path
) -> None:
    done = ran_thinwire(*words.split(), cwd=tmp_path, env=clean(**environment))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert told in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ranks_of_another_launcher_train_together(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "thinwire", "compare", "--strategies", "dense", "--steps", "4"]
    words += ["--size", "tiny", "--out", "out", "--quiet"]
    place = {**PLACE, "WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": tmp_path}
    first, second = (clean(**place | {"RANK": str(rank)}) for rank in range(2))
    with running(words, env=first, **told) as one, running(words, env=second, **told) as other:
        said, errors = one.communicate(timeout=150)
        assert (one.returncode, other.wait(timeout=30)) == (0, 0), errors
    assert b"report: out/report.html" in said
    told_there = (tmp_path / "out" / "results.json").read_text(encoding="utf-8")
    assert "2 workers, started by a launcher, over the network between them" in told_there


STAND_INS = {
    "python": 'echo "$RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT runs $1"',
    "scontrol": "echo 10.0.0.1; echo 10.0.0.2",
    "srun": 'for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done',
}


def test_lines_for_slurm_give_every_task_the_variables_of_a_rank(tmp_path: Path) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "machines.md").read_text(encoding="utf-8")
    lines = page.partition("```bash\n#SBATCH ")[2].partition("```")[0].partition("\n")[2]
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    place = {"SLURM_NTASKS": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.check_output(["bash", "-c", lines], env=clean(**place), text=True)
    ranks = [f"{rank} of 2 at 10.0.0.1:29500 runs train.py" for rank in range(2)]
    assert said.splitlines() == ranks
