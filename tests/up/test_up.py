"""`thinwire up`, `down` and `status` between two machines with an sshd each."""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.namespaces import NETNS, namespace_of, processes_in
from tests.processes import kill_all
from tests.up.sites import KEY, ROOT, SECRET, SSHD, Sites, sites
from tests.waiting import PATIENCE_S

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
    text, end_s = "", time.monotonic() + PATIENCE_S
    while not all(each in text for each in wanted):
        ready, _, _ = select.select([process.stdout], [], [], end_s - time.monotonic())
        line = os.read(process.stdout.fileno(), 1 << 16).decode() if ready else ""
        assert line, text
        text += line
    return text


def rest_of(process: "subprocess.Popen[str]") -> str:
    """Output of a process up to its end."""
    return process.communicate(timeout=PATIENCE_S)[0]


def ranks(two: Sites) -> list[str]:
    """What `ENDLESS` prints on all machines."""
    return [f"[{at}] rank {n} of 2 by {SECRET}" for n, at in enumerate(two.addresses)]


def test_interrupted_up_ends_all_machines_and_keeps_secrets_off_command_lines(two: Sites) -> None:
    file = two.file(TORCHRUN, ENDLESS)
    with two.thinwire("up", file) as up:
        lines_until(up, *ranks(two))
        for process in marked(two):
            assert SECRET.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()
        [kept] = (two.home(1) / "thinwire").glob("two-*/.thinwire")
        assert (kept.stat().st_mode & 0o777, (kept / "env").stat().st_mode & 0o777) == (
            0o700,
            0o600,
        )
        up.send_signal(signal.SIGINT)
        rest = rest_of(up)
    assert up.returncode == 130
    assert f"ending {', '.join(two.addresses)}; Ctrl-C again leaves" in rest
    assert all(f"{at}: ended" in rest for at in two.addresses)
    assert rest.endswith("thinwire: interrupted; every worker has been ended\n")
    assert marked(two) == []


DEAF = "trap : TERM; echo rank $4 of $2 by $SECRET; while :; do sleep 1; done"


def test_second_interruption_names_running_jobs_and_their_end(two: Sites) -> None:
    file = two.file(TORCHRUN, DEAF)
    with two.thinwire("up", file) as up:
        lines_until(up, *ranks(two))
        up.send_signal(signal.SIGINT)
        lines_until(up, "Ctrl-C again")
        up.send_signal(signal.SIGINT)
        last = rest_of(up).splitlines()[-1]
    assert up.returncode == 130
    assert f"{', '.join(two.addresses)} may still run: thinwire down {file}" in last
    assert len(two.answer("down", file)[1].splitlines()) == 2
    assert marked(two) == []


@pytest.mark.parametrize(
    ("phase", "after_s"), [("copy", 0), ("setup", 0), ("setup", 0.3), ("setup", 0.6), ("setup", 1)]
)
def test_interruption_while_machines_start_leaves_no_job(
    two: Sites, phase: str, after_s: float
) -> None:
    file = two.file(TORCHRUN, ENDLESS)
    with two.thinwire("up", file) as up:
        lines_until(up, phase)
        time.sleep(after_s)
        up.send_signal(signal.SIGINT)
        rest = rest_of(up)
    assert up.returncode == 130, rest
    assert rest.endswith("every worker has been ended\n")
    assert marked(two) == []


def test_every_line_of_a_job_is_shown_from_its_first_one(two: Sites) -> None:
    script = "seq 1 3000; head -c 300000 /dev/zero | tr '\\0' x; echo; echo end"
    status, text = two.answer("up", two.file(TORCHRUN, script))
    assert status == 0, text
    text = re.sub("thinwire: .*\n", "", text)  # may stand inside a long line, as they are stderr
    for at in two.addresses:
        own = [line for line in text.splitlines() if line.startswith(f"[{at}] ")]
        wanted = [*map(str, range(1, 3001)), "x" * 300_000, "end"]
        assert [line.removeprefix(f"[{at}] ") for line in own] == wanted


NOISE = "printf 'Welcome\\n0 \\377\\000 1'; seq 1 20000; echo \"You have mail\" >&2"


def test_output_of_login_shells_is_no_answer(two: Sites) -> None:
    (two.home(1) / ".bashrc").write_text(NOISE)
    file = two.file(TORCHRUN, ENDLESS)
    with two.thinwire("up", file) as up:
        lines_until(up, *ranks(two))
        assert two.answer("status", file)[1].count("running") == 2
        assert two.answer("down", file)[0] == 0
        assert "status 143" in rest_of(up)
    assert marked(two) == []


def test_projects_with_files_of_one_name_are_apart(two: Sites) -> None:
    file = two.file(TORCHRUN, ENDLESS)
    other = two.folder / "other"
    shutil.copytree(two.folder / "code", other / "code")
    for name in ("two.yaml", "key"):
        shutil.copy(two.folder / name, other)
    with two.thinwire("up", file) as up:
        lines_until(up, *ranks(two))
        assert "nothing runs" in two.answer("down", str(other / "two.yaml"))[1]
        with two.thinwire("up", str(other / "two.yaml")) as beside:
            assert "follow" not in lines_until(beside, *ranks(two))
            beside.send_signal(signal.SIGINT)
            rest_of(beside)
        assert two.answer("status", file)[1].count("running") == 2
        kept = "to: kept\n"
        for folder in (two.folder, other):  # one place on the machines, by their own wish
            with (folder / "two.yaml").open("a") as text:
                text.write(kept)
        up.send_signal(signal.SIGINT)
        rest_of(up)
    with two.thinwire("up", file) as up:
        lines_until(up, *ranks(two))
        for command in ("up", "down", "status"):
            status, text = two.answer(command, str(other / "two.yaml"))
            assert (status, f":{two.folder}" in text) == (1, True), text
        up.send_signal(signal.SIGINT)
        rest_of(up)
    assert marked(two) == []


def test_localhost_has_an_address_that_the_others_reach(two: Sites) -> None:
    file = two.file(TORCHRUN, "echo rank $4 at $8", machines=["localhost", two.addresses[1]])
    status, text = two.answer("up", file)
    assert status == 0, text
    for number, name in enumerate(["localhost", two.addresses[1]]):
        assert f"[{name}] rank {number} at {two.addresses[0]}\n" in text


def test_one_machine_by_two_names_is_refused(two: Sites) -> None:
    at = two.addresses[1]
    status, text = two.answer("up", two.file(TORCHRUN, ENDLESS, machines=[at, f"root@{at}"]))
    assert status == 1, text
    assert "list a machine once" in text.splitlines()[-1]
    assert marked(two) == []


def test_copy_sends_changed_files_and_shows_progress(tmp_path: Path) -> None:
    with sites(tmp_path, "20mbit") as two:
        file = two.file(TORCHRUN, "cat text; cat link; [ ! -x run ] || echo runs")
        code = two.folder / "code"
        (code / "data").write_bytes(os.urandom(12_000_000))
        (code / "text").write_text("old\n")
        (code / "run").touch()
        (code / "link").symlink_to("text")
        status, text = two.answer("up", file)
        assert (status, text.count(" 5 of 5 files ")) == (0, 2), text
        shown = re.findall(rf"^thinwire: {two.addresses[1]}: ([\d.]+) of 12.0 MB", text, re.M)
        assert shown, text  # of the machine behind the line
        assert [float(each) for each in shown] == sorted(float(each) for each in shown)
        assert " 0 of 5 files " in two.answer("up", file)[1]
        (code / "text").write_text("new\n")  # of one size
        (code / "run").chmod(0o755)
        (code / "link").unlink()
        (code / "link").symlink_to("run")
        status, text = two.answer("up", file)
        assert (status, text.count(" 3 of 5 files ")) == (0, 2), text
        for at in two.addresses:
            assert f"[{at}] new\n" in text
            assert f"[{at}] runs\n" in text
        [there] = (two.home(1) / "thinwire").glob("two-*")
        (there / "data").write_bytes(b"other")  # by whatever runs there
        assert " 1 of 5 files " in two.answer("up", file)[1]
        assert (there / "data").read_bytes() == (code / "data").read_bytes()


SETUP = """|
  echo 'ERROR: No matching distribution found for torch==0'
  for each in 1 2 3 4 5; do echo "[notice] line $each"; done
  false
  echo never"""
STRICT = "-i key -o UserKnownHostsFile=known -o GlobalKnownHostsFile=/dev/null"
BARE = "mkdir -p .venv/bin && ln -sfn $(command -v python3) .venv/bin/python"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"setup": SETUP}, r"ERROR: No matching distribution found for torch==0 \(.* status 1\)"),
        ({"setup": "gone"}, r".*gone: .*not found \(.* status 127\)"),
        ({"ssh": STRICT}, "Host key verification failed.* -> .*ssh {at} once"),
        ({"ssh": KEY.replace("key", "locked", 1)}, ".*Permission denied.* -> .*ssh-add"),
        ({"setup": "cd .", "env": "PATH: {folder}/bin"}, ".*python: .*not found -> install Python"),
        (
            {"setup": BARE, "env": "PYTHONPATH: ''"},
            ".*No module named '?thinwire'? -> .*setup",
        ),
    ],
    ids=["setup", "word", "host key", "passphrase", "no Python", "no thinwire"],
)
def test_machine_that_cannot_start_is_one_line_with_its_reason_first(
    two: Sites, options: dict[str, str], wanted: str
) -> None:
    at = two.addresses[0]
    lock = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "word", "-f", str(two.folder / "locked")]
    subprocess.run(lock, check=True)
    with (two.folder / "key.pub").open("a") as keys:
        keys.write((two.folder / "locked.pub").read_text())
    (two.folder / "bin").mkdir()
    (two.folder / "bin" / "sh").symlink_to("/bin/sh")
    env = options.pop("env", "A: b").format(folder=two.folder)
    machine = f"{{ssh: {at}, env: {{{env}}}}}"
    status, text = two.answer("up", two.file(TORCHRUN, ENDLESS, machines=[machine], **options))
    assert status == 1, text
    assert re.fullmatch(f"thinwire: {at}: {wanted.format(at=at)}.*", text.splitlines()[-1]), text


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
        rest = rest_of(up)
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
        rest = rest_of(up)
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
        assert re.search(rf"^\[{at}\] step 2000: .* % of the held-out digits$", text, re.M), text
    assert marked(two) == []


@pytest.mark.slow
def test_member_that_is_lost_is_named_and_started_by_the_next_up(two: Sites) -> None:
    file, lost = two.file("members: echo member $THINWIRE_NAME; sleep 1000"), two.addresses[1]
    with two.thinwire("up", file) as up, contextlib.ExitStack() as ends:
        lines_until(up, *(f"[{at}] member {at}" for at in two.addresses))
        for process in marked(two, f"{two.home(1)}/"):
            os.kill(int(process), signal.SIGKILL)
        lines_until(up, f"{lost} has ended with status 137")
        again = ends.enter_context(two.thinwire("up", file))
        lines_until(again, f"[{lost}] member ")
        again.send_signal(signal.SIGINT)
        rest_of(again)
        rest_of(up)
    assert (again.returncode, up.returncode) == (130, 1)
    assert marked(two) == []
