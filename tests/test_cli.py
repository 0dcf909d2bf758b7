"""Bad input is one line and status 2; help has an example; wrong arguments write nothing."""

import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import thinwire as tw
from tests.processes import ran, ran_code, ran_thinwire
from tests.toys import answer, refusal
from thinwire import cli

COMPARE = {
    "--workers x": "--workers",
    "--workers 1.5": "--workers: '1.5' is not a whole number",
    "--workers 0": "workers=0",
    "--link 0mbit": "link='0mbit'",
    "--link fast": "link='fast'",
    "--link 99999gbit": "link='99999gbit'",
    "--link 50Mbps": "link='50Mbps' is not a rate; did you mean 50mbit?",
    "--link 1.5G": "did you mean 1.5gbit?",
    "--link 6MB/s": "did you mean 48mbit?",
    "--link 20": "did you mean 20mbit?",
    "--link 9kbit": "link='9kbit' is out of range",
    "--link 1e3mbit": "link='1e3mbit' is not a rate",
    "--up 5Mbps --down 20mbit": "up='5Mbps' is not a rate; did you mean 5mbit?",
    "--latency soon": "latency='soon'",
    "--latency 20": "latency='20' is not a delay; did you mean 20ms?",
    "--latency 0.2sec": "did you mean 0.2s?",
    "--seconds 90s": "'90s' is not a number of seconds; did you mean 90?",
    "--latency 6s": "latency='6s'",
    "--link loopback --latency 1ms": "loopback",
    "--strategies dence": "did you mean 'dense'?",
    "--strategies Powersdg": "did you mean 'powersgd'?",
    "--strategies muon": "did you mean 'fp16-muon' or ",
    "--strategies plan.yaml": "strategies='plan.yaml' cannot be read",
    "--strategies dense dense": "given twice",
    "--strategies": "strategies is empty",
    "--steps 0": "steps=0",
    "--seconds 0.5": "seconds=0.5",
    "--steps 3 --seconds 3": "exclude each other",
    "--size huge": "size='huge'",
    "--size 1": "size='1'",
    "--text /no/such/folder": "/no/such/folder",
    "--model cnn": "model='cnn' is unknown; choose from transformer, convolution",
    "--model convolution --text .": "--text brings other data; omit one of them",
    "--model convolution --task mine.py:task": "--task brings other data; omit one of them",
    "--model convolution --size huge": "size='huge'",
    "--out /dev/null/report": "out='/dev/null/report' cannot be written: Not a directory",
    "--seed -1": "seed=-1",
    "--seeds 0": "seeds=0 is out of range",
    "--optimizer adam": "optimizer='adam' is unknown; choose from adamw, muon, sgd",
    "--device tpu": "device='tpu' is unknown; choose from auto, cpu, cuda",
    "--task nothing.py:task": "nothing.py does not exist",
    "--task my_task": "is not FILE.py:NAME",
    "--batch 0": "batch=0",
    "--lr 0": "lr=0",
    "--wrkers 2": "Did you mean --workers?",
    "stray": "stray",
}
RUN = {
    "-- missing.py": "missing.py does not exist",
    "-- .": ". is a folder",
    "--link fast -- missing.py": "link='fast'",
    "--up 10mbit -- missing.py": "up='10mbit' is given without down",
    "--workers 0 -- missing.py": "workers=0",
    "--link 20mbit": "no script is given; write it after --",
    "": "no script is given; write it after --",
    "--lr 0.1 train.py": "Options of the script go after --: thinwire run",
    "--workers 2 --lr 0.1 train.py --workers 3": "Unknown option: --lr. Options of the script go",
    "missing.py --workers 3": "missing.py does not exist",
}
HOST = {
    "": "--bind is missing",
    "--bind 0.0.0.0:29400": "all addresses of this machine",
    "--bind [::]:29400": "all addresses of this machine",
    "--bind [0:0::0]:29400": "all addresses of this machine",
    "--bind *:29400": "all addresses of this machine",
    "--bind 203.0.113.7:29400": "not an address of this machine",
    "--bind [2001:db8::7]:29400": "not an address of this machine",
    "--bind localhost:29400": "has a name: give an address",
    "--bind 127.0.0.1": "is not an address such as 10.0.0.1:29400",
    "--bind :29400": "is not an address such as 10.0.0.1:29400",
    "--bind ::1:29400": "put IPv6 addresses in brackets",
    "--bind 127.0.0.1:65536": "is not an address such as",
    "--bind 127.0.0.1:http": "is not an address such as",
    "--bind tcp://127.0.0.1:0": "is not an address such as 10.0.0.1:29400",
    "--bind 127.0.0.1:0 --token-file /no/such": "token file /no/such does not exist",
    "--bind 127.0.0.1:0 --tokn-file x": "--token-file",
    "--bind 127.0.0.1:0 --new-token x": "leave the other options out",
    "--relay --new-token x": "leave the other options out",
    "--bind 127.0.0.1:0 --cert c": "for the relay: give --relay too",
    "--bind 127.0.0.1:0 --relay --key k": "--cert is missing",
    "--bind 127.0.0.1:0 --relay --cert c": "--cert c without --key: not a certificate and its",
    "--bind 127.0.0.1:0 --relay --cert c --key k": "--cert c, --key k: not a certificate and its",
}
NUMBERS = "--params 124M --step-seconds 0.35"
PLAN = {
    f"{NUMBERS} --workers 2.5": "'2.5' is not a whole number",
    f"{NUMBERS} --link fast": "link='fast' is not a rate; write a number and a unit",
    f"{NUMBERS} --latency -3ms": "latency='-3ms'",
    "--params 124M --step-seconds 350ms": "did you mean 0.35?",
    "--params 124M --step-seconds soon": "'soon' is not a number of seconds",
    "--params 124M": "step_seconds is missing; give params and step_seconds, or a task",
    "": "params is missing",
    f"{NUMBERS} --out missing/best.yaml": "out='missing/best.yaml' cannot be written",
    f"{NUMBERS} --html .": "html='.' cannot be written: Is a directory",
    f"{NUMBERS} --out a --html ./a": "out and html are the same file, 'a'; give",
    f"{NUMBERS} --out /proc/best.yaml": "out='/proc/best.yaml' cannot be written",
}
DOCTOR = {
    "--timeout 3": "timeout=3 is out of range; 15 to 600",
    "--timeout long": "--timeout",
    "--loud": "--loud",
}
BAD = {"compare": COMPARE, "run": RUN, "host": HOST, "plan": PLAN, "doctor": DOCTOR}


@pytest.mark.parametrize(("command", "words"), [(c, words) for c in BAD for words in BAD[c]])
def test_bad_input_is_one_line(
    command: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert BAD[command][words] in refusal(capsys, command, *words.split())
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "compare" in refusal(capsys, "frobnicate")


def test_folder_without_text_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "picture.bin").write_bytes(bytes(100_000))
    out = tmp_path / "out"
    words = ("compare", "--text", str(tmp_path), "--out", str(out))
    assert "0 bytes of text" in refusal(capsys, *words)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        ([], "compare --workers 2 --link 100mbit --steps 200"),
        (["compare"], "compare --workers 2 --link 20mbit --strategies dense mine.yaml"),
        (["explain"], "explain examples/strategies/one_bit_local.yaml"),
        (["host"], "host --bind 10.0.0.1:29400 --token-file token"),
    ],
)
def test_help_has_an_example(
    arguments: list[str], example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"thinwire {example}" in answer(capsys, *arguments, "--help")[0]


COMMANDS = ("compare", "doctor", "explain", "export", "host", "join", "plan", "probe", "run", "up")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_is_one_line_and_no_flag_has_a_default(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = answer(capsys, command, "--help")[0]
    examples = re.split(r"\nExamples?: ?", printed)[1].split("\n")
    assert all(re.match(r"( *$|thinwire |torchrun |\()", line) for line in examples), examples
    assert "default: False" not in printed
    assert "default: ]" not in printed


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)])
def test_help_breaks_a_line_only_where_the_next_word_does_not_fit(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = answer(capsys, *arguments, "--help")[0].splitlines()
    for line, following in pairwise(text.removesuffix("│").rstrip() for text in printed):
        boxed = following.startswith("│")
        if boxed and not following.startswith("│     "):
            continue  # the next entry of a box
        words = following.strip("│╭╰─ ").split()
        if line.strip("│╭╰─ ") and words and not set(line + following) & set("╭╰"):
            assert len(f"{line} {words[0]}") > (78 if boxed else 80), (line, following)


def test_missing_packages_are_named_with_the_way_to_get_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_EXTRAS", ("rich", "no_such_package"))
    line = refusal(capsys, "compare")
    assert "needs no_such_package: pip install 'thinwire[cli]'" in line


def test_digits_need_a_package_that_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as where it is not installed
    line = refusal(capsys, "compare", "--model", "convolution")
    assert "run pip install scikit-learn" in line


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ("compare --model convolution --link fast", "link='fast'"),
        ("host --bind 0.0.0.0:1", "all addresses"),
        ("explain plan.yaml", "plan.yaml"),
    ],
)
def test_input_is_checked_before_modules_load(arguments: str, fact: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("dgc:\n", encoding="utf-8")
    code = f"""
import sys
from thinwire import cli
try:
    cli.main({arguments.split()})
except SystemExit as stop:
    sys.exit(99 if {{"torch", "sklearn"}} & sys.modules.keys() else stop.code)
"""
    done = ran_code(code, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert fact in done.stderr


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({names!r}))  # importing any of them fails
from thinwire import cli
cli.main({arguments!r})
"""


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["--version"], ("matplotlib", "rich", "cyclopts", "torch")),
        (["--help"], ("matplotlib", "torch", "numba")),
        (["compare", "--help"], ("matplotlib", "torch", "numba")),
        (["doctor", "--help"], ("matplotlib", "torch", "numba", "pyroute2")),
        (["explain", "examples/strategies/dgc_merged.yaml"], ("matplotlib", "numba", "pyroute2")),
    ],
)
def test_nothing_is_needed_that_is_not_used(arguments: list[str], missing: tuple[str, ...]) -> None:
    code = WITHOUT.format(names=missing, arguments=arguments)
    done = ran_code(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


BAD_FILES = {
    "": "1: the file is empty",
    "dgc: {sparsty: [0.9]}": "did you mean 'sparsity'?",
    "dgc: {}\nlars: 3": "2: strategy.lars must be a mapping, got 3",
    "lars: {}\nlamb: {}": "remove lars or lamb",
    "amp: {dtype: float8}": "'float8'",
}


NO_STRATEGIES = {
    "binary": bytes(range(256)) * 40,
    "python": Path(cli.__file__).read_bytes(),
    "one import": b"import torch\n",
    "prose": b"word " * 40_000,
    "huge": b"# nothing\n" * 1_000_000,
    "zeros": bytes(1_000_000),
    "a long value": b"dgc: " + b"word " * 40_000,
    "a long key": b"k" * 1000 + b": {a: 1}\n",
    "many keys": b"".join(b"service%d: {image: x, ports: [1, 2]}\n" % i for i in range(500)),
    "a long key of another kind": b"? [" + b"a, " * 5000 + b"]\n: {}\n",
    "a long word of a config": b"amp: {dtype: " + b"word " * 2000 + b"}\n",
    "a long list": b"dgc: {sparsity: [" + b"x, " * 5000 + b"]}\n",
}


@pytest.mark.parametrize("name", [*BAD_FILES, *NO_STRATEGIES])
def test_a_file_that_is_no_strategy_is_one_short_line(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(NO_STRATEGIES.get(name, name.encode()))
    for options in ([], ["--quiet"]):
        line = refusal(capsys, "explain", str(path), *options)
        assert line.startswith(f"thinwire: {path}:")
        assert len(line) < 1500, line[:3000]
        assert BAD_FILES.get(name, "") in line


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("exprot a b", "export"),
        ("comapre", "compare"),
        ("expla x", "explain"),
        ("compare --wrkers 2", "--workers"),
        ("compare --strategies dnese", "dense"),
        ("frobnicate", None),
        ("plot", None),
        ("compare --lr1 2 --link 3", "--lr"),
        ("run --lr 2 -- x.py", None),
        ("compare --strategies sparse", "sparse-local"),
        ("compare --strategies adam", None),
    ],
)
def test_only_near_words_are_suggested(
    arguments: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, *arguments.split())
    found = re.search(r"did you mean [\x22\x27]?([\w-]+)", line, re.IGNORECASE)
    assert (found and found[1]) == meant, line


def test_unreadable_strategy_is_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "gone.yaml: No such file" in refusal(capsys, "explain", str(tmp_path / "gone.yaml"))
    assert "directory" in refusal(capsys, "explain", str(tmp_path))
    assert "FILE" in refusal(capsys, "explain")
    assert "--loud" in refusal(capsys, "explain", "--loud", str(tmp_path))


@pytest.mark.parametrize("quiet", [False, True])
def test_explain_prints_the_strategys_text(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parent.parent / "examples" / "strategies" / "dgc_merged.yaml"
    expected = "" if quiet else f"{tw.DistributedStrategy.load(path).explain()}\n"
    capsys.readouterr()
    assert answer(capsys, "explain", str(path), *["--quiet"] * quiet)[0] == expected


@pytest.mark.parametrize("module", ["cyclopts", "torch"])
def test_interruption_while_modules_are_imported_is_one_line(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job\n"
        "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(100)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = ran_thinwire("explain", "examples/strategies/dgc_merged.yaml", env=environment)
    assert done.returncode == 130
    assert done.stderr == "thinwire: interrupted; every worker has been ended\n"


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_command_quietly(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("gradient_merge: {k_steps: 2}\n", encoding="utf-8")
    command = f"{sys.executable} -m thinwire explain {path} | exec sleep 0"
    done = ran(["bash", "-c", command])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "words", "status"),
    [
        (">&-", "run --link none -- there.py", 0),
        ("2>&-", "run --link none -- there.py", 0),
        (">&-", "explain missing.yaml", 2),
        ("2>&-", "explain missing.yaml", 2),
    ],
)
def test_closed_streams_keep_status(tmp_path: Path, closed: str, words: str, status: int) -> None:
    (tmp_path / "there.py").write_text("print('said')")
    line = f"{sys.executable} -m thinwire {words} {closed}"
    done = ran(["sh", "-c", line], cwd=tmp_path)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


def test_under_torchrun_the_interpreter_is_not_shut_down(tmp_path: Path) -> None:
    """Ranks have aborted there, in a thread of torch's."""
    path = Path(__file__).parent.parent / "examples" / "strategies" / "dgc_merged.yaml"
    for words, status in (["explain", str(path), "--quiet"], 0), (["explain", "gone.yaml"], 2):
        code = f"""
import atexit, os
from thinwire import cli
os.environ["TORCHELASTIC_RUN_ID"] = "a run"
atexit.register(print, "shut down")
cli.main({words!r})
"""
        ended = ran_code(code, cwd=tmp_path)
        assert (ended.returncode, ended.stdout) == (status, "")
