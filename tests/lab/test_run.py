"""`thinwire run`: a user's script on real ranks; what is printed, counted and left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest

from tests.api import Prefixed, Speaker, run_command
from tests.lab.namespaces import NETNS, namespace_of, needs_netns, processes_in
from tests.processes import alive, descendants, ran, running
from tests.toys import refusal
from tests.waiting import PATIENCE_S, until

PLACE = """
import json, os, sys
keys = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "GLOO_SOCKET_IFNAME"]
print(json.dumps({**{key: os.environ[key] for key in keys}, "arguments": sys.argv[1:]}))
print("to stderr", file=sys.stderr)
"""
SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(250_000)
dist.all_reduce(x)
print("sum", int(x.sum()))
dist.destroy_process_group()
"""
WAITING = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("aside" + os.environ["RANK"], "w") as file:
    file.write(str(child.pid))
os.rename(file.name, "ready" + os.environ["RANK"])
while not (os.path.exists("ready0") and os.path.exists("ready1")):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    END
time.sleep(600)
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "thinwire", "run", *arguments]


def write(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return path


def run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ran(command(*arguments), cwd=cwd)


def test_run_without_root_names_the_requirement(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_command, "why_unavailable", lambda: "needs root (CAP_SYS_ADMIN): no")
    line = refusal(capsys, "run", "--link", "20mbit", "--", str(write(tmp_path, PLACE)))
    assert "link='20mbit' cannot be emulated here: it needs root (CAP_SYS_ADMIN)" in line
    assert "--link loopback" in line


def places(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == ["[0] to stderr", "[1] to stderr"]
    *lines, _ = done.stdout.splitlines()
    found = [json.loads(line[4:]) for line in sorted(lines)]
    assert [line[:4] for line in sorted(lines)] == ["[0] ", "[1] "]
    return found


def test_over_loopback_the_ranks_share_a_machine_as_under_torchrun(tmp_path: Path) -> None:
    script = str(write(tmp_path, PLACE))
    done = run(tmp_path, "--link", "loopback", "--", script, "--lr", "0.1")
    found = places(done)
    for rank, place in enumerate(found):
        assert place["RANK"] == place["LOCAL_RANK"] == str(rank)
        assert place["WORLD_SIZE"] == place["LOCAL_WORLD_SIZE"] == "2"
        assert place["MASTER_ADDR"] == "127.0.0.1"
        assert place["arguments"] == ["--lr", "0.1"]
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"]
    assert "over loopback, where bytes are not counted" in done.stdout


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["--link", "loopback"], ["--workers", "3", "data"]),
        (["--link=loopback", "--workers", "2"], ["--quiet", "--help", "--lr=0.1"]),
        (["--link", "loopback", "--"], ["--link", "20mbit", "--", "--version"]),
        (["--link", "loopback"], ["--", "--workers", "3"]),
    ],
)
def test_all_that_follows_the_script_is_the_script_s(
    tmp_path: Path, before: list[str], after: list[str]
) -> None:
    for place in places(run(tmp_path, *before, str(write(tmp_path, PLACE)), *after)):
        assert (place["WORLD_SIZE"], place["arguments"]) == ("2", after)


def test_a_link_after_the_script_and_none_before_it_gets_a_hint(tmp_path: Path) -> None:
    script = str(write(tmp_path, PLACE))
    done = run(tmp_path, "--workers", "1", "--", script, "--link", "20mbit", "--latency=1ms")
    [hint] = [line for line in done.stderr.splitlines() if line.startswith("thinwire: ")]
    assert "--link" in hint
    assert "--latency=1ms" in hint
    assert "before --" in hint


def test_quiet_before_the_script_is_an_option_of_run(tmp_path: Path) -> None:
    script = str(write(tmp_path, PLACE))
    done = run(tmp_path, "--quiet", "--link", "loopback", "--workers", "1", script, "--quiet")
    assert done.returncode == 0
    [line] = done.stdout.splitlines()
    assert json.loads(line[4:])["arguments"] == ["--quiet"]


@needs_netns
def test_over_a_link_every_rank_is_a_machine(tmp_path: Path) -> None:
    found = places(run(tmp_path, "--link", "none", "--", str(write(tmp_path, PLACE))))
    for rank, place in enumerate(found):
        assert (place["RANK"], place["LOCAL_RANK"], place["LOCAL_WORLD_SIZE"]) == (
            str(rank),
            "0",
            "1",
        )
        assert (place["MASTER_ADDR"], place["GLOO_SOCKET_IFNAME"]) == ("10.77.0.1", "eth0")


@pytest.mark.slow
@needs_netns
@pytest.mark.parametrize("latency", ["0ms", "5ms"])
def test_torch_trains_over_the_link_and_its_bytes_are_counted(tmp_path: Path, latency: str) -> None:
    script = str(write(tmp_path, SUM))
    done = run(tmp_path, "--link", "20mbit", "--latency", latency, "--", script)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, summary = done.stdout.splitlines()
    assert sorted(lines) == ["[0] sum 500000", "[1] sum 500000"]
    sent = [int(text.replace(",", "")) for text in re.findall(r"sent ([\d,]+) bytes", summary)]
    assert len(sent) == 2
    # two ranks send half the vector twice: a million bytes, and headers
    assert all(1_000_000 < count < 1_300_000 for count in sent)
    seconds = float(summary.split(" s over the link 20mbit")[0])
    assert seconds > 8 * 1_000_000 / 20e6


@needs_netns
@pytest.mark.parametrize(
    ("end", "status", "told"),
    [
        ("sys.exit(3)", 3, "rank 1 ended with status 3; the others were ended"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by signal 9"),
    ],
)
def test_first_rank_that_fails_ends_all(tmp_path: Path, end: str, status: int, told: str) -> None:
    script = str(write(tmp_path, WAITING.replace("END", end)))
    done = run(tmp_path, "--link", "20mbit", "--", script)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1)
    assert told in done.stderr
    assert "rank 1 sent" in done.stdout
    children = [int(path.read_text()) for path in tmp_path.glob("ready*")]
    assert len(children) == 2
    until(lambda: not any(map(alive, children)))


@pytest.mark.slow
@needs_netns
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_all_of_it(tmp_path: Path, number: signal.Signals, status: int) -> None:
    script = str(write(tmp_path, WAITING.replace("END", "pass")))
    with running(
        command("--link", "20mbit", "--", script),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # where these tests run in the background of a shell, it is ignored by all below
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
        below = descendants(process.pid)
        namespaces = {namespace_of(pid) for pid in below} - {namespace_of(process.pid)}
        assert len(below) >= 4
        assert len(namespaces) == 2
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status
    until(lambda: not any(alive(pid) for pid in below))
    assert [processes_in(str(namespace)) for namespace in namespaces] == [[], []]


WITH_A_CHILD = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), child.pid, flush=True)
if os.waitpid(-1, os.WNOHANG) == (0, 0):  # there is no other child
    time.sleep(600)
"""


@pytest.mark.parametrize("link", ["loopback", pytest.param("20mbit", marks=NETNS)])
def test_ranks_and_children_end_with_a_command_that_is_killed(tmp_path: Path, link: str) -> None:
    script = str(write(tmp_path, WITH_A_CHILD))
    with running(
        command("--link", link, "--", script), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split()[1:] for _ in range(2)]
        pids = [int(pid) for line in lines for pid in line]
        assert all(alive(pid) for pid in pids)
        process.kill()
        process.wait()
        until(lambda: not any(alive(pid) for pid in pids))


def test_a_reader_that_leaves_ends_the_run(tmp_path: Path) -> None:
    script = str(
        write(
            tmp_path, "import time\nwhile True:\n    print('on', flush=True)\n    time.sleep(0.01)"
        )
    )
    with running(
        command("--link", "loopback", "--", script),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() in {b"[0] on\n", b"[1] on\n"}
        process.stdout.close()
        assert process.wait(timeout=PATIENCE_S) == 0


def test_lines_stay_whole_and_name_their_rank() -> None:
    read_end, write_end = os.pipe()
    out = BytesIO()
    with Prefixed() as prefixed:  # it ends while the other end is still open
        prefixed.add(7, os.fdopen(read_end, "rb"), out)
        for chunk in (
            b"one\ntw",
            b"o\r\n\r 10%\r",
            b" 20%\r",
            b"\n\n\xff bytes",
            b" without an end",
        ):
            os.write(write_end, chunk)
            assert prefixed.pass_on(1.0)
        assert out.getvalue() == b"[7] one\n[7] two\n[7]  10%\n[7]  20%\n[7] \n"
    os.close(write_end)
    assert out.getvalue().endswith(b"[7] \n[7] \xff bytes without an end\n")


@pytest.mark.parametrize("size", [1, 65_536], ids=["bytes", "chunks"])
def test_one_long_line_takes_time_in_proportion_and_memory_of_a_megabyte(size: int) -> None:
    out, text = BytesIO(), b"x" * 3_000_000 + b"\n\n"
    speaker, begin_s = Speaker("0", out), time.process_time()
    for start in range(0, len(text), size):
        speaker.hear(text[start : start + size])
    assert time.process_time() - begin_s < 30  # 16 s took 40 kB when each start was tried
    *lines, last = out.getvalue().splitlines()
    assert b"".join(line.removeprefix(b"[0] ") for line in lines) == text.strip()
    assert (last, max(map(len, lines)) <= 4 + (1 << 20) + size) == (b"[0] ", True)


@pytest.mark.parametrize("size", range(1, 8))
def test_lines_are_the_same_however_their_bytes_arrive(size: int) -> None:
    out, text = BytesIO(), b"one\r\ntwo\n\r\r 10%\r 20%\r\nthree\r\r\n\nend\r"
    speaker = Speaker("0", out)
    for start in range(0, len(text), size):
        speaker.hear(text[start : start + size])
    speaker.hear(b"")
    wanted = [b"one", b"two", b" 10%", b" 20%", b"three", b"", b"", b"end"]
    assert out.getvalue() == b"".join(b"[0] " + line + b"\n" for line in wanted)


def test_output_of_a_rank_that_prints_on_is_bounded() -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:  # prints for ever
        while True:
            os.write(write_end, b"on\n" * 100)
    try:
        with Prefixed() as prefixed:
            prefixed.add(0, os.fdopen(read_end, "rb"), BytesIO())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(write_end)
