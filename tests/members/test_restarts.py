"""A host that is killed and started again: with the file of its runs, and without."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests.members.places import host_command
from tests.members.relays import listening, listens
from tests.members.training import member, wait_for
from tests.ranks import Lost, Pool
from tests.waiting import until

CONFIG = tw.LocalSGD(k_steps=4, begin_step=0, compression=tw.Sparse(0.9))


def free_port() -> int:
    with listening() as free:
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def restarted(token_file: str, flag: Path, back: Path, *, kept: bool, times: int) -> Iterator[str]:
    """The address of a host that is killed so often once there is the flag, and is back."""
    port, over = free_port(), threading.Event()
    options = ["--bind", f"127.0.0.1:{port}", "--token-file", token_file]

    def run() -> None:
        for number in range(times + 1):
            name = back.with_name("journal" if kept else f"journal{number}")
            with host_command(*options, "--journal", str(name)) as (host, _):
                until(lambda: flag.exists() or over.is_set(), "the flag")
                if number == times:
                    back.touch()
                    over.wait()
                    return
                time.sleep(0.3)
                host.send_signal(signal.SIGKILL)
                host.wait()
            time.sleep(0.3)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: listens("127.0.0.1", port), "the host")
        yield f"tcp://127.0.0.1:{port}"
    finally:
        over.set()
        thread.join()


def same_rounds(found: list[Any]) -> None:
    """All that averaged together hold the same bits."""
    for step in set.intersection(*(set(one["rounds"]) for one in found)):
        assert len({one["rounds"][step] for one in found}) == 1, step


OPTIONS: dict[str, Any] = {"timeout_s": 6.0, "step_s": 0.05, "flag_at": 4}


def joins_late(
    rank: int, size: int, address: str, back: str, options: dict[str, Any]
) -> dict[str, Any]:
    wait_for(back if rank == 2 else "")
    return member(rank, size, address, CONFIG, founders=2, until_size=3, **options)


@pytest.mark.slow
@pytest.mark.fault("the host restarts")
@pytest.mark.parametrize(("kept", "times"), [(True, 1), (True, 4), (False, 1), (False, 2)])
def test_a_joiner_is_admitted_after_the_host_is_back(
    ranks: Pool, token_file: str, tmp_path: Path, kept: bool, times: int
) -> None:
    flag, back = tmp_path / "flag", tmp_path / "back"
    options = OPTIONS | {"token_file": token_file, "flag": str(flag)}
    with restarted(token_file, flag, back, kept=kept, times=times) as address:
        found = ranks.run(joins_late, address, str(back), options, size=3, group=False)
    assert sorted(one["rank"] for one in found) == [-1, 0, 1]
    same_rounds(found)
    assert all({size for _, size, _ in one["rounds"].values()} >= {3} for one in found)


@pytest.mark.slow
@pytest.mark.fault("the host restarts")
@pytest.mark.parametrize("kept", [True, False])
def test_a_lost_member_is_noticed_after_the_host_is_back(
    ranks: Pool, token_file: str, tmp_path: Path, kept: bool
) -> None:
    flag, back = tmp_path / "flag", tmp_path / "back"
    options = OPTIONS | {"token_file": token_file, "flag": str(flag), "steps": 400}
    options["fault"] = {"rank": 1, "phase": "step", "at": 300, "how": "kill"}
    with restarted(token_file, flag, back, kept=kept, times=1) as address:
        found = ranks.run(trains, address, options, size=3, group=False, expect_errors=True)
    assert isinstance(found.pop(1), Lost)
    same_rounds(found)
    assert [one["step"] for one in found] == [400, 400]


def trains(rank: int, size: int, address: str, options: dict[str, Any]) -> dict[str, Any]:
    return member(rank, size, address, CONFIG, **options)
