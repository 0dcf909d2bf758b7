"""A host that is killed and started again: with the file of its runs, and without."""

import contextlib
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests.api import HostedStore, Journal, KeyValueView, connect, new_token, read_token
from tests.members.places import TIMEOUT, TOKEN, host_command, hosted, meeting_place, token_in
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
@pytest.mark.parametrize(("kept", "times"), [(True, 4), (False, 2)])
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


@contextlib.contextmanager
def anew(**options: Any) -> Iterator[tuple[KeyValueView, list[str]]]:
    """A view of run "test" at a host that does not know it, and what the host says."""
    lines: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with hosted(listener, TOKEN, say=lines.append, **options):
        yield KeyValueView(connect(address, "test", TOKEN, TIMEOUT)), lines


@pytest.mark.parametrize("call", ["put", "swap", "get", "entries"])
def test_call_after_a_lost_connection_uses_the_next_one(call: str) -> None:
    reach = partial(connect, run="test", token=TOKEN, timeout=TIMEOUT)
    with meeting_place() as address:
        first = reach(address)
        kv = KeyValueView(first, TIMEOUT.total_seconds(), lambda **limit: reach(address, **limit))
        first.connection.close()
        words = {"put": ["a", 1], "swap": ["a", None, 1], "get": ["a"], "entries": ["a"]}
        assert getattr(kv, call)(*words[call]) in (None, 1, {})
        assert kv.store is not first


def present(kv: KeyValueView, number: int, ids: str, back: str, **more: bool) -> None:
    for one in back:
        facts = {"number": number, "ids": [*ids], "vote": number, "timeout_s": 2.0, **more}
        kv.put(f"recover/{one}", facts)


@pytest.mark.fault("the host restarts")
def test_two_of_five_that_went_on_are_waited_for() -> None:
    """They formed generation 7 without three that were cut off, and the host lost its file."""
    with anew() as (kv, lines):
        present(kv, 6, "abcde", "cde")
        present(kv, 7, "ab", "a")
        until(lambda: lines and "more than half are needed" in lines[-1], "the host's word")
        assert "b are not back" in lines[-1]
        assert kv.get("gen") is None
        present(kv, 7, "ab", "b")
        until(lambda: kv.get("gen") is not None, "the decision")
        assert (kv.get("gen"), kv.get("members/7")["ids"]) == (7, ["a", "b"])


@pytest.mark.fault("the host restarts")
def test_whoever_comes_after_the_decision_makes_no_second_side() -> None:
    with anew() as (kv, lines):
        present(kv, 6, "abcde", "cde")
        until(lambda: kv.get("gen") is not None, "the decision")
        present(kv, 7, "ab", "ab")
        until(lambda: lines[-1].startswith("run test: generation 6, members: a, b"), "its word")
        time.sleep(1.5)  # it looks once a second
        assert (kv.get("gen"), kv.get("members/7")) == (6, None)


@pytest.mark.fault("the host restarts")
def test_one_that_enters_again_counts_beside_one_that_trained_on() -> None:
    with anew() as (kv, lines):
        present(kv, 6, "abcde", "cd", away=True)
        time.sleep(3.2)  # it waits for two seconds, and looks once a second
        assert (kv.get("gen"), lines) == (None, [])
        present(kv, 6, "abcde", "a")
        until(lambda: kv.get("gen") is not None, "the decision")
        assert kv.get("members/6")["ids"] == [*"abcde"]


def test_a_person_decides_where_half_are_gone() -> None:
    with anew(recover=True) as (kv, _):
        present(kv, 7, "ab", "a")
        until(lambda: kv.get("gen") is not None, "the decision")
        assert kv.get("members/7")["ids"] == ["a", "b"]


@pytest.mark.parametrize("value", [None, 3, {}, {"number": "7", "ids": []}, {"ids": [3]}, []])
def test_nothing_that_is_presented_ends_the_host(value: Any) -> None:
    with anew() as (kv, _):
        kv.put("recover/x", value)
        time.sleep(1.2)  # it looks once a second
        kv.put("gen", 3)
        assert kv.get("gen") == 3


def test_a_file_is_not_for_another_token_nor_for_two_hosts(tmp_path: Path) -> None:
    path, other = tmp_path / "journal", tmp_path / "other"
    new_token(other)
    first, second = token_in(tmp_path), read_token(other)
    options = ["--bind", "127.0.0.1:0", "--journal", str(path), "--token-file"]
    with host_command(*options, str(first)) as (_, address):
        store = connect(address, "test", TOKEN, TIMEOUT)
        store.set("gen", "3")
        text = ran_with(*options, str(first))
        assert "in use by another `thinwire host`" in text
    assert second != TOKEN
    assert "was written with another token" in ran_with(*options, str(other))
    with host_command(*options, str(first)) as (_, address):
        assert connect(address, "test", TOKEN, TIMEOUT).get("gen") == b"3"


def ran_with(*options: str) -> str:
    command = [sys.executable, "-m", "thinwire", "host", *options]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found
    return found.stderr


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_file_keeps_all_but_a_last_value_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for number in range(3):
        journal.append(b"run/a/gen", b"%d" % number)
    journal.close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert Journal(path).values == {b"run/a/gen": b"1"}


def test_a_full_disk_does_not_stop_the_host(tmp_path: Path) -> None:
    """The file is removed: an old one would take the run back."""
    lines: list[str] = []
    journal = Journal(tmp_path / "journal")
    store = HostedStore(journal, lines.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        store.write(b"run/a/gen", bytes(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert store.values == {b"run/a/gen": bytes(100)}
    assert "not kept in a file any more" in lines[0]
    assert not journal.path.exists()


@pytest.mark.slow
def test_a_run_is_ended_for_all_its_members(ranks: Pool, token_file: str, tmp_path: Path) -> None:
    """After the same averaging; then its name begins another run, at a restarted host too."""
    flag, journal = tmp_path / "flag", tmp_path / "journal"
    port = free_port()
    where = ["--bind", f"127.0.0.1:{port}", "--token-file", token_file]
    options = OPTIONS | {"token_file": token_file, "steps": 10_000, "flag": str(flag)}
    command = [sys.executable, "-m", "thinwire", "host", *where, "--end"]
    ended = []

    def end() -> None:
        until(flag.exists, "the first averagings")
        for name in ("other", "test"):
            ended.append(
                subprocess.run([*command, name], check=False, capture_output=True, text=True)
            )

    thread = threading.Thread(target=end)
    with host_command(*where, "--journal", str(journal)) as (_, address):
        thread.start()
        found = ranks.run(trains, address, options, size=3, group=False)
        thread.join()
    assert all(one["left"] for one in found)
    assert len({max(one["rounds"]) for one in found}) == 1
    same_rounds(found)
    assert "knows no such run" in ended[0].stderr
    assert "these leave after their next averaging" in ended[1].stdout
    assert ended[1].stdout.count(",") == 2
    options = OPTIONS | {"token_file": token_file, "steps": 8}
    with host_command(*where, "--journal", str(journal)) as (_, address):
        again = ranks.run(trains, address, options, size=2, group=False)
    assert [one["step"] for one in again] == [8, 8]
