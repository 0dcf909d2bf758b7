"""`thinwire up`, `down` and `status` between two machines with an sshd each."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.namespaces import NETNS, namespace_of, processes_in
from tests.processes import kill_all
from tests.up.sites import ROOT, SECRET, SSHD, Sites, sites

pytestmark = [*NETNS, pytest.mark.skipif(SSHD is None, reason="needs sshd: openssh-server")]
ENDLESS = "echo rank $4 of $2 by $SECRET; sleep 1000 & wait"
TORCHRUN = "torchrun: train.py"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Sites]:
    with sites(tmp_path) as made:
        yield made


def marked(two: Sites, home: str = "") -> list[str]:
    """Processes that `up` has started on the machines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"THINWIRE_UP={home or two.folder}".encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found


def lines_until(process: "subprocess.Popen[str]", *wanted: str) -> str:
    """Output of a process up to where all of these have come."""
    assert process.stdout is not None
    text = ""
    while not all(each in text for each in wanted):
        line = process.stdout.readline()
        assert line, text
        text += line
    return text


def test_interrupted_up_ends_all_machines_and_keeps_secrets_off_command_lines(two: Sites) -> None:
    file = two.file(TORCHRUN, ENDLESS)
    with two.thinwire("up", file) as up:
        lines_until(
            up, *(f"[{at}] rank {n} of 2 by {SECRET}" for n, at in enumerate(two.addresses))
        )
        for process in marked(two):
            assert SECRET.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()
        kept = two.home(1) / "thinwire" / "two" / ".thinwire"
        assert (kept.stat().st_mode & 0o777, (kept / "env").stat().st_mode & 0o777) == (
            0o700,
            0o600,
        )
        up.send_signal(signal.SIGINT)
        rest, _ = up.communicate()
    assert up.returncode == 130
    assert all(f"{at}: ended" in rest for at in two.addresses)
    assert marked(two) == []


def test_run_outlives_up_which_follows_it_again_until_down(two: Sites) -> None:
    file = two.file(TORCHRUN, ENDLESS)
    with two.thinwire("up", file) as up:
        lines_until(up, *(f"[{at}] rank" for at in two.addresses))
        kill_all(up)
    with two.thinwire("up", file) as up:
        text = lines_until(up, *(f"[{at}] rank" for at in two.addresses))
        assert "two runs; following it" in text
        status, table = two.answer("status", file)
        assert status == 0
        assert table.count("running") == 2
        assert two.answer("down", file)[0] == 0
        rest, _ = up.communicate()
    assert up.returncode == 1
    assert "has ended with status 143" in rest
    assert two.answer("status", file)[1].count("status 143") == 2
    assert "nothing runs" in two.answer("down", file)[1]
    assert marked(two) == []


def test_rank_that_fails_is_named_and_ends_the_others(two: Sites) -> None:
    status, text = two.answer(
        "up", two.file(TORCHRUN, "[ $4 = 0 ] && exec sleep 1000; echo no disk; exit 3")
    )
    assert status == 1
    assert f"thinwire: {two.addresses[1]} has ended with status 3: no disk\n" in text
    assert f"{two.addresses[0]}: ended" in text
    assert marked(two) == []


def test_machine_that_is_not_reached_is_named_before_anything_starts(two: Sites) -> None:
    kill_all(two.servers[1])
    status, text = two.answer("up", two.file(TORCHRUN, ENDLESS))
    assert status == 1
    assert re.search(rf"thinwire: {two.addresses[1]}: .*refused", text)
    assert not (two.home(0) / "thinwire").exists()


@pytest.mark.slow
def test_machine_that_dies_is_named_and_ends_the_others(two: Sites) -> None:
    with two.thinwire("up", two.file(TORCHRUN, ENDLESS)) as up:
        lines_until(up, *(f"[{at}] rank" for at in two.addresses))
        there = namespace_of(two.servers[1].pid)
        assert there is not None
        for process in processes_in(there):  # some of them are elsewhere, and hold it open
            if namespace_of(process) == there:
                os.kill(process, signal.SIGKILL)
        rest, _ = up.communicate()
    assert up.returncode == 1
    assert f"{two.addresses[1]} cannot be reached" in rest
    assert f"{two.addresses[1]} is lost" in rest
    assert f"{two.addresses[0]}: ended" in rest


MEMBERS = "members: python members.py $THINWIRE_ADDRESS $THINWIRE_TOKEN_FILE"


@pytest.mark.slow
def test_members_on_two_machines_train_to_the_end_by_one_command(two: Sites) -> None:
    shutil.copy(ROOT / "examples" / "members.py", two.folder / "code")
    status, text = two.answer("up", two.file(MEMBERS))
    assert status == 0, text
    for at in two.addresses:
        assert re.search(rf"^\[{at}\] step 400: .* % of the held-out digits$", text, re.M), text
    assert marked(two) == []


@pytest.mark.slow
def test_member_that_is_lost_is_named_and_started_by_the_next_up(two: Sites) -> None:
    file, lost = two.file("members: echo member of $THINWIRE_ADDRESS; sleep 1000"), two.addresses[1]
    with two.thinwire("up", file) as up, contextlib.ExitStack() as ends:
        lines_until(up, *(f"[{at}] member " for at in two.addresses))
        for process in marked(two, f"{two.home(1)}/"):
            os.kill(int(process), signal.SIGKILL)
        lines_until(up, f"{lost} has ended with status 137")
        again = ends.enter_context(two.thinwire("up", file))
        lines_until(again, f"[{lost}] member ")
        again.send_signal(signal.SIGINT)
        again.communicate()
        up.communicate()
    assert (again.returncode, up.returncode) == (130, 1)
    assert marked(two) == []
