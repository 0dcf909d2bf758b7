"""Files of `thinwire up`: what is refused, and what `--print` writes of them."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.api import UpRun, write
from tests.processes import ran_thinwire

MEMBERS = "machines: 2\nmembers: python m.py $THINWIRE_ADDRESS\nenv: {A: 1, HOME: null}\n"
TORCHRUN = "machines: 2\ntorchrun: train.py --size 124M\n"


BOMB = "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{f'*a{i},' * 9}]\n" for i in range(30))
NAMES = {
    "two": "slurm skypilot kubernetes docker",
    "my_Run": "slurm skypilot kubernetes docker",
    "7b": "slurm docker",
    "a b": "",
    "größe": "",
    "a.b": "slurm skypilot",
    "x" * 60: "slurm skypilot docker",
    "a_": "slurm docker",
    "../two": "",
}
"""By name, the systems that take it."""
HARD = {
    "A": "a $HOME ${HOME} 'b' \"c\" \\ %",
    "NO": "on",
    "B": "line\nline",
}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("machine: [a]\ntorchrun: t.py", "'machine'; did you mean 'machines'?"),
        ("torchrun: t.py", "machines is missing"),
        ("machines: [a]", "one of members"),
        ("machines: [a]\ntorchrun: t.py\nmembers: m", "one of members"),
        ("machines: [{shh: a}]\ntorchrun: t.py", "machines[0] has an unknown key 'shh'; did you"),
        ("machines: [a]\ntorchrun: t.py\nport: x", "port must be int, got 'x'"),
        ("machines: [a]\ntorchrun: t.py\nenv: {A: true}", "'A': True"),
        ("machines: [a]\ntorchrun: t.py\nenv: {NOT_SET_HERE: null}", "NOT_SET_HERE"),
        ("machines: [a]\ntorchrun: t.py\nfolder: gone", "gone is not a folder"),
        ("machines: 2\ntorchrun: t.py", "machines has no names"),
        ("machines: 2\nmembers: m\ntoken: gone/token", "token: gone/token cannot be made"),
        ("machines: [a", "while parsing"),
        ("machines: [a, b, a]\ntorchrun: t.py", "a is listed twice"),
        ("machines: [{address: a}]\ntorchrun: t.py", "machines has no names"),
        ("machines: [null]\ntorchrun: t.py", "ssh must be str"),
        ("machines: 1000000000\ntorchrun: t.py", "machines must be 1 to"),
        ("machines: [a]\ntorchrun: t.py\nport: 99999", "port must be 1 to"),
        (f"machines: [a]\ntorchrun: t.py\nport: {'9' * 5000}", "5000 digits"),
        (f"machines: [a]\ntorchrun: t.py\nport: 0x{'f' * 9000}", "digits"),
        ('machines: ["a\\nb"]\ntorchrun: t.py', "ssh must be one line"),
        ('machines: [a]\ntorchrun: t.py\nname: "a\\x1b[2J"', "name must be one line"),
        ('"a\\nb": 1\ntorchrun: t.py', "'a\\nb'"),
        (f"? {'k' * 99_999}\n: 1", "unknown key"),
        ("machines: [a]\ntorchrun: t.py\nenv: {é: 1}", "env has 'é'"),
        ("machines: [a]\ntorchrun: t.py\nenv: {A: 2024-01-01}", "env has 'A'"),
        (f"machines: {'[' * 50_000}", "nested too deeply"),
        (f"machines: {'{a: ' * 50_000}", "nested too deeply"),
        (BOMB, "has an alias"),
    ],
    ids=lambda text: text[:30],
)
def test_bad_file_is_refused_by_a_line_on_the_fault(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "two.yaml").write_text(text)
    options = ["--print", "docker"] if "token" in text or "NOT_SET" in text else []
    done = ran_thinwire("up", "two.yaml", *options, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert named in done.stderr


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("system", ["slurm", "skypilot", "kubernetes", "docker"])
def test_name_is_one_of_the_system_s(tmp_path: Path, system: str, name: str) -> None:
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({**yaml.safe_load(TORCHRUN), "name": name}))
    run = UpRun.read(tmp_path / "two.yaml")
    if system in NAMES[name].split():
        written, start = write(run, system)
        assert (written.parent, shlex.split(start)[0]) == (tmp_path, START[system])
    else:
        with pytest.raises(ValueError, match="name"):
            write(run, system)
        assert [file.name for file in tmp_path.iterdir()] == ["two.yaml"]


START = {"slurm": "sbatch", "skypilot": "sky", "kubernetes": "kubectl", "docker": "docker"}


@pytest.mark.parametrize("text", [MEMBERS, TORCHRUN], ids=["members", "torchrun"])
@pytest.mark.parametrize("system", ["slurm", "skypilot", "kubernetes", "docker"])
def test_printed_file_is_read_by_its_system(tmp_path: Path, text: str, system: str) -> None:
    folder = tmp_path / "a b: $c"
    folder.mkdir()
    setup = "  echo first\necho $HOME; . it"
    given = {**yaml.safe_load(text), "setup": setup, "env": {**HARD, "SECRET": None}}
    (folder / "two.yaml").write_text(yaml.safe_dump(given))
    secret = {**os.environ, "SECRET": "swordfish"}
    subprocess.run(["git", "init", "-q", folder], check=True)
    done = ran_thinwire("up", "two.yaml", "--print", system, cwd=folder, env=secret)
    assert done.returncode == 0, done.stderr
    end = {"slurm": "sbatch", "skypilot": "sky.yaml", "kubernetes": "k8s.yaml"}
    file = folder / f"two.{end.get(system, 'compose.yaml')}"
    written, start = file.read_text(), done.stdout.partition("start it by\n")[2]
    assert subprocess.run(["bash", "-n"], input=start, text=True, check=False).returncode == 0
    assert not {"$SECRET", "swordfish"} & {*shlex.split(start)}
    token = folder / ".thinwire" / "token"
    assert token.exists() == (text == MEMBERS)
    assert not token.exists() or token.read_text().strip() not in written + start
    assert "swordfish" not in written + start
    untracked = ["git", "-C", folder, "status", "--porcelain", "-uall"]
    shown = subprocess.check_output(untracked, text=True)
    assert "token" not in shown
    if system == "slurm":
        assert subprocess.run(["bash", "-n", file], check=False).returncode == 0
        assert {"#SBATCH --nodes=2", "#SBATCH --cpus-per-task=4"} <= {*written.splitlines()}
        assert f"set +u\n{setup}\nset -u\n" in written
        assert ("GLOO_SOCKET_IFNAME" in written) == (text == TORCHRUN)
        shell = f"{written.partition('set +u')[0].partition('set -eu')[2]}printf '%s|' "
        values = subprocess.check_output(
            ["bash", "-c", shell + " ".join(f'"${name}"' for name in HARD)], env=secret, text=True
        )
        assert values.split("|")[:-1] == [*HARD.values()]
        return
    documents = [*yaml.safe_load_all(written)]
    if system == "skypilot":
        [one] = documents
        assert (one["num_nodes"], one["workdir"], one["setup"].rstrip()) == (2, str(folder), setup)
        assert (one["envs"], one["secrets"]) == (HARD, {"SECRET": None})
        scripts = [one["run"]]
    elif system == "docker":
        [one] = documents
        assert set(one["services"]) == {"machine0", "machine1"} | HOSTS[text]
        assert json.dumps(setup) in written
        for service in one["services"].values():
            assert service["volumes"][0]["source"] == str(folder).replace("$", "$$")
            plain = {k: v and v.replace("$$", "$") for k, v in service["environment"].items()}
            assert plain == {**HARD, "SECRET": None}
            assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", str(service))  # each one is doubled
        scripts = [each["command"][0].replace("$$", "$") for each in one["services"].values()]
    else:
        assert json.dumps(setup) in written
        pods = [
            each["spec"]["template"]["spec"] for each in documents if "template" in each["spec"]
        ]
        containers = [pod["containers"][0] for pod in pods] or [documents[0]["spec"]["trainer"]]
        for container in containers:
            env = {each["name"]: each.get("value") for each in container["env"]}
            plain = {k: v and v.replace("$$", "$") for k, v in env.items()}
            assert plain == {**HARD, "SECRET": None}
        scripts = [each["args"][0].replace("$$", "$") for each in containers]
    for script in scripts:
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    wanted = given.get("members", given.get("torchrun"))
    assert any(wanted in script for script in scripts)


HOSTS = {MEMBERS: {"host"}, TORCHRUN: set()}


def test_token_that_git_would_track_is_refused(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "two.yaml").write_text(f"{MEMBERS}token: secret\n")
    done = ran_thinwire("up", "two.yaml", "--print", "docker", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "secret" in done.stderr
    (tmp_path / ".gitignore").write_text("secret\n")
    assert ran_thinwire("up", "two.yaml", "--print", "docker", cwd=tmp_path).returncode == 0
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
