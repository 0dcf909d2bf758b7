"""Bad input is one line and status 2; help has an example; nothing is written before the arguments are right."""

import subprocess
import sys
from pathlib import Path

import pytest

from thinwire import cli

BAD = {
    "--workers x": "--workers",
    "--workers 0": "workers=0",
    "--link 0mbit": "link='0mbit'",
    "--link fast": "link='fast'",
    "--link 100": "link='100'",
    "--link 99999gbit": "link='99999gbit'",
    "--latency soon": "latency='soon'",
    "--latency 6s": "latency='6s'",
    "--link loopback --latency 1ms": "loopback",
    "--strategies dence": "did you mean dense?",
    "--strategies Powersdg": "did you mean powersgd?",
    "--strategies plan.yaml": "strategies='plan.yaml' cannot be read",
    "--strategies dense dense": "given twice",
    "--strategies": "strategies is empty",
    "--steps 0": "steps=0",
    "--seconds 0.5": "seconds=0.5",
    "--seconds nan": "seconds=nan",
    "--steps 3 --seconds 3": "exclude each other",
    "--size huge": "size='huge'",
    "--size 1": "size='1'",
    "--text /no/such/folder": "/no/such/folder",
    "--out /dev/null/report": "/dev/null is a file",
    "--seed -1": "seed=-1",
    "--batch 0": "batch=0",
    "--lr inf": "lr=inf",
    "--lr 0": "lr=0",
    "--wrkers 2": "Did you mean --workers?",
    "stray": "stray",
}


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_is_one_line(
    arguments: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = fails(capsys, "compare", *arguments.split())
    assert line.startswith("thinwire: ")
    assert BAD[arguments] in line
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "compare" in fails(capsys, "frobnicate")


def test_a_folder_without_text_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "picture.bin").write_bytes(bytes(100_000))
    out = tmp_path / "out"
    assert "0 bytes of text" in fails(capsys, "compare", "--text", str(tmp_path), "--out", str(out))
    assert not out.exists()


@pytest.mark.parametrize("arguments", [["--link", "fast"], ["--strategies", "dence"], ["--nonsense"]])
def test_the_installed_command_exits_with_2(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "compare", *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"]])
def test_help_has_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 0
    assert "thinwire compare --workers 2 --link 100mbit --strategies dense" in capsys.readouterr().out


def test_missing_packages_are_named_with_the_way_to_get_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_EXTRAS", ("rich", "no_such_package"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare"])
    assert stop.value.code == 1
    assert capsys.readouterr().err == "thinwire: the command line needs no_such_package: pip install 'thinwire[cli]'\n"
