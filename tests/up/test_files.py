"""Files of `thinwire up`: what is refused, and what `--print` writes of them."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.processes import ran_thinwire

MEMBERS = "machines: 2\nmembers: python m.py $THINWIRE_ADDRESS\nenv: {A: 1, HOME: null}\n"
TORCHRUN = "machines: 2\ntorchrun: train.py --size 124M\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("machine: [a]\ntorchrun: t.py", "'machine'; did you mean machines?"),
        ("torchrun: t.py", "machines is missing"),
        ("machines: [a]", "one of members"),
        ("machines: [a]\ntorchrun: t.py\nmembers: m", "one of members"),
        ("machines: [{shh: a}]\ntorchrun: t.py", "machines[0] has an unknown key 'shh'; did you"),
        ("machines: [a]\ntorchrun: t.py\nport: x", "port must be int, got 'x'"),
        ("machines: [a]\ntorchrun: t.py\nenv: {A: true}", "'A': True"),
        ("machines: [a]\ntorchrun: t.py\nenv: {NOT_SET_HERE: null}", "NOT_SET_HERE"),
        ("machines: [a]\ntorchrun: t.py\nfolder: gone", "gone is not a folder"),
        ("machines: 2\ntorchrun: t.py", "is a number"),
        ("machines: 2\nmembers: m\ntoken: gone/token", "token: gone/token cannot be made"),
        ("machines: [a", "while parsing"),
    ],
)
def test_bad_file_is_refused_by_a_line_on_the_fault(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "two.yaml").write_text(text)
    options = ["--print", "docker"] if "token" in text or "NOT_SET" in text else []
    done = ran_thinwire("up", "two.yaml", *options, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert named in done.stderr


@pytest.mark.parametrize("text", [MEMBERS, TORCHRUN], ids=["members", "torchrun"])
@pytest.mark.parametrize("system", ["slurm", "skypilot", "kubernetes", "docker"])
def test_printed_file_has_machines_and_no_secret(tmp_path: Path, text: str, system: str) -> None:
    (tmp_path / "two.yaml").write_text(text)
    done = ran_thinwire("up", "two.yaml", "--print", system, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file = tmp_path / done.stdout.split()[0]
    written = file.read_text()
    token = tmp_path / "token"
    assert token.exists() == (text == MEMBERS)
    assert not token.exists() or token.read_text().strip() not in written
    size = {
        "slurm": "#SBATCH --nodes=2\n",
        "skypilot": "num_nodes: 2\n",
        "kubernetes": "parallelism: 2\n" if text == MEMBERS else "numNodes: 2\n",
        "docker": "  machine1:\n",
    }
    assert size[system] in written
    if system == "slurm":
        assert subprocess.run(["bash", "-n", file], check=False).returncode == 0
    else:
        assert all(yaml.safe_load_all(written))
