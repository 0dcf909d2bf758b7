"""Two machines that `ssh` reaches: an sshd with a home of its own in each network namespace."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.api import Link, enter, network
from tests.processes import running
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
_SSHD = """ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
SetEnv HOME={home}
"""
KEY = "-i key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
_FILE = """machines: [{machines}]
folder: code
ssh: {ssh}
env: {{PYTHONPATH: {source}, OMP_NUM_THREADS: 1, SECRET: null}}
"""
SECRET = "swordfish"


@dataclass
class Sites:
    """Machines with their homes; commands run in the network of the first one."""

    folder: Path
    addresses: Sequence[str]
    fds: Sequence[int]
    servers: list["subprocess.Popen[bytes]"]

    def home(self, number: int) -> Path:
        """The home of a machine."""
        return self.folder / f"home{number}"

    def file(
        self,
        text: str,
        torchrun: str | None = None,
        *,
        machines: Sequence[str] = (),
        setup: str | None = None,
        ssh: str = KEY,
    ) -> str:
        """Write a file of `thinwire up` for both machines, whose torchrun is this shell script."""
        make = f"mkdir -p .venv/bin && ln -sfn {sys.executable} .venv/bin/python"
        if torchrun is not None:
            (self.folder / "code").mkdir(exist_ok=True)
            script = self.folder / "code" / "torchrun"
            script.write_text(f"#!/bin/sh\n{torchrun}\n")
            script.chmod(0o755)
            make += " && ln -sfn ../../torchrun .venv/bin/torchrun"
        else:
            make = f"ln -sfn {sys.prefix} .venv"
        listed = ", ".join(machines or self.addresses)
        head = _FILE.format(machines=listed, source=ROOT / "src", ssh=ssh)
        file = self.folder / "two.yaml"
        file.write_text(f"{head}setup: {make if setup is None else setup}\n{text}\n")
        return str(file)

    def thinwire(self, *words: str) -> contextlib.AbstractContextManager["subprocess.Popen[str]"]:
        """`thinwire` with these words in the network of the first machine."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [*self.there(0), sys.executable, "-m", "thinwire", *words]
        environment = {**os.environ, "SECRET": SECRET, "HOME": str(self.home(0))}
        return running(command, pass_fds=self.fds, env=environment, **pipes)

    def answer(self, *words: str) -> tuple[int, str]:
        """The exit status and the output of such a command."""
        with self.thinwire(*words) as process:
            text, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, text

    def there(self, number: int) -> list[str]:
        """The beginning of a command that runs in the network of a machine."""
        return [sys.executable, enter.__file__, str(self.fds[number]), str(os.getpid())]


@contextlib.contextmanager
def sites(folder: Path, link: str = "none") -> Iterator[Sites]:
    """Two machines with this link, as long as the block runs."""
    key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")]
    subprocess.run(key, check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "code").mkdir()
    with contextlib.ExitStack() as ends:
        net = ends.enter_context(network(2, Link.parse(link)))
        made = Sites(folder, net.addresses, net.namespace_fds, [])
        for number, address in enumerate(net.addresses):
            made.home(number).mkdir()
            config = folder / f"sshd{number}"
            text = _SSHD.format(address=address, folder=folder, home=made.home(number))
            config.write_text(text)
            command = [*made.there(number), str(SSHD), "-D", "-e", "-f", str(config)]
            pipe = {"stderr": subprocess.PIPE, "pass_fds": made.fds}
            made.servers.append(ends.enter_context(running(command, **pipe)))
        for server in made.servers:
            assert server.stderr is not None
            assert b"listening" in server.stderr.readline()
        yield made
