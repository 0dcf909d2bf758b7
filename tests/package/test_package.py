"""What users get: the wheel, installed, and the sdist, unpacked. `.ci/package` runs this from
there, in a folder outside the repository."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import thinwire

ROOT = Path(__file__).parents[2]
DIST = os.environ.get("THINWIRE_DIST", "")
pytestmark = [
    pytest.mark.package,
    pytest.mark.skipif(not DIST, reason="wheel and sdist were not built (make package)"),
]
NEVER = re.compile(r"(^|/)(\.venv|\.git|__pycache__|runs|build)(/|$)|\.pyc$")


def the(pattern: str) -> Path:
    """The one file of the build with such a name."""
    (file,) = Path(DIST).glob(pattern)
    return file


def in_the_wheel() -> set[str]:
    with zipfile.ZipFile(the("*.whl")) as wheel:
        return set(wheel.namelist())


def in_the_sdist() -> set[str]:
    with tarfile.open(the("*.tar.gz")) as sdist:
        return {name.partition("/")[2] for name in sdist.getnames()}


def run(*command: str, cwd: Path, expect: int = 0, **environment: str) -> str:
    """What a command prints that ends with the status that is expected."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def script(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts")) / name)


def test_it_is_the_installed_one_that_is_tested() -> None:
    assert Path(thinwire.__file__).is_relative_to(sysconfig.get_path("purelib"))
    assert thinwire.__version__ == metadata.version("thinwire")
    assert the("*.whl").name.startswith(f"thinwire-{thinwire.__version__}-")


def test_the_wheel_holds_every_file_of_the_package_and_no_other() -> None:
    sources = {
        name.removeprefix("src/")
        for name in in_the_sdist()
        if name.startswith("src/") and Path(name).suffix
    }
    wheel = {name for name in in_the_wheel() if ".dist-info/" not in name}
    assert {Path(name).suffix for name in sources} >= {".py", ".css", ".js", ".typed"}
    assert wheel == sources


def test_sdist_has_the_sources_and_nothing_generated() -> None:
    names = in_the_sdist()
    assert {"pyproject.toml", "Makefile", "constraints.txt", "LICENSE", ".ci/run"} <= names
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff"} <= names
    assert {"tests/test_docs.py", "docs/site/index.md", "examples/dgc.py"} <= names
    assert [name for name in names if NEVER.search(name)] == []


def test_metadata_has_authors_purpose_and_links() -> None:
    found = metadata.metadata("thinwire")
    assert found["Name"] == "thinwire"
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Author"] and found["Maintainer"] and found["Summary"]
    python = f"Programming Language :: Python :: {sys.version_info[0]}.{sys.version_info[1]}"
    assert python in (found.get_all("Classifier") or [])
    assert f"version: {found['Version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in in_the_wheel())
    assert set(found.get_all("Provides-Extra") or []) == {"fast", "cli", "stream"}


def test_the_page_of_a_package_index_has_no_link_into_the_repository() -> None:
    with zipfile.ZipFile(the("*.whl")) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        page = str(email.message_from_bytes(wheel.read(name)).get_payload())
    assert "# thinwire" in page
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page, flags=re.DOTALL)
    assert [link for link in re.findall(r"\]\(([^)]*)\)", prose) if "://" not in link] == []


def test_the_command_answers(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "strategies" / "dgc_merged.yaml", tmp_path / "run.yaml")
    command = script("thinwire")
    assert run(command, "--version", cwd=tmp_path).strip() == thinwire.__version__
    assert "compare" in run(command, "--help", cwd=tmp_path)
    assert "backward" in run(command, "explain", "run.yaml", cwd=tmp_path)
    plan = ["plan", "--params", "124M", "--step-seconds", "0.35", "--workers", "8"]
    said = run(command, *plan, "--link", "100mbit", "--latency", "20ms", cwd=tmp_path)
    assert "dense" in said


@pytest.mark.fault
def test_command_without_its_extra_names_the_package(tmp_path: Path) -> None:
    blocked = tmp_path / "cyclopts_is_missing"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'cyclopts' else find(name, *rest)\n",
        encoding="utf-8",
    )
    said = run(script("thinwire"), "--help", cwd=tmp_path, expect=2, PYTHONPATH=str(blocked))
    assert "pip install 'thinwire[cli]'" in said


def test_two_ranks_train_and_the_second_start_reads_the_compiled_code(tmp_path: Path) -> None:
    cache, example = tmp_path / "cache", str(ROOT / "examples" / "dgc.py")
    torchrun = [script("torchrun"), "--standalone", "--nproc-per-node", "2", example]
    first = run(*torchrun, cwd=tmp_path, NUMBA_CACHE_DIR=str(cache))
    assert "times fewer bytes than dense" in first
    compiled = {file: file.stat().st_mtime_ns for file in cache.rglob("*.nb[ic]")}
    assert compiled
    again = run(*torchrun, cwd=tmp_path, NUMBA_CACHE_DIR=str(cache))
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*.nb[ic]")} == compiled
    losses = r"loss [\d.]+"
    assert re.findall(losses, again) == re.findall(losses, first) != []


def test_mypy_sees_the_types(tmp_path: Path) -> None:
    right = "import thinwire as tw\n\nstrategy = tw.DistributedStrategy(dgc=tw.DGC(value_bits=2))\n"
    (tmp_path / "right.py").write_text(right, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(right.replace("=2", "='two'"), encoding="utf-8")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n", encoding="utf-8")
    mypy = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")]
    assert "no issues" in run(*mypy, "right.py", cwd=tmp_path)
    said = run(*mypy, "wrong.py", cwd=tmp_path, expect=1)
    assert 'Argument "value_bits" to "DGC"' in said


def test_setup_of_the_page_installs_this_wheel(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "machines.md").read_text("utf-8")
    setups = re.findall(r"^setup: (.*)$", page, re.M)
    own = re.findall(r"install (`.*wheels/.*\[cli\]\"`)", page)
    assert len(setups) == len(own) == 1
    (tmp_path / "wheels").mkdir()
    shutil.copy(the("*.whl"), tmp_path / "wheels")
    here = tmp_path / "here"  # what the page takes from an index, and not this package
    here.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if "thinwire" not in each.name:
            (here / each.name).symlink_to(each)
    (tmp_path / "setup.sh").write_text(setups[0].replace("'.[cli]'", own[0].strip("`")))
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        ["sh", "-e", "setup.sh"], cwd=tmp_path, env={**env, "PYTHONPATH": str(here)}, check=False
    )
    assert done.returncode == 0
    asked = [tmp_path / ".venv" / "bin" / "thinwire", "--version"]
    assert subprocess.check_output(asked, text=True, env=env).strip() == thinwire.__version__
