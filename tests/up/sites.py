"""Two machines that `ssh` reaches: an sshd with a home of its own in each network namespace."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.api import Link, enter, network
from tests.processes import alive, kill_all, running
from tests.waiting import until

ROOT = Path(__file__).parent.parent.parent
SSHD = Path("/usr/sbin/sshd")
CONFIG = """
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
SetEnv HOME={home}
"""


@dataclass
class Sites:
    """Homes and addresses of the machines; commands run on the first one's side of the network."""

    folder: Path
    addresses: Sequence[str]
    fds: Sequence[int]
    servers: Sequence["subprocess.Popen[bytes]"]

    def home(self, number: int) -> Path:
        return self.folder / f"home{number}"

    def file(self, text: str, **env: str) -> Path:
        """A file of `thinwire up` for both machines."""
        code = self.folder / "code"
        code.mkdir(exist_ok=True)
        options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        path = self.folder / "two.yaml"
        path.write_text(
            f"machines: [{', '.join(self.addresses)}]\n"
            f"folder: code\n"
            f"setup: ln -sfn {sys.prefix} .venv\n"
            f"ssh: -i {self.folder}/key {options}\n"
            f"env: {{PYTHONPATH: {ROOT / 'src'}, OMP_NUM_THREADS: 1}}\n" + text
        )
        return path

    def thinwire(self, *words: str, **options: Any) -> Any:
        """`running` of the command line on the first machine."""
        command = [*self._there(0), sys.executable, "-m", "thinwire", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return running(command, pass_fds=self.fds, **pipes, **options)

    def _there(self, number: int) -> list[str]:
        return [sys.executable, enter.__file__, str(self.fds[number]), str(os.getpid())]


@contextlib.contextmanager
def sites(folder: Path) -> Iterator[Sites]:
    """Two machines, as long as the block runs."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    with contextlib.ExitStack() as ends:
        net = ends.enter_context(network(2, Link.parse("none")))
        made = Sites(folder, net.addresses, net.namespace_fds, servers := [])
        for number, address in enumerate(net.addresses):
            made.home(number).mkdir()
            config = folder / f"sshd{number}"
            config.write_text(CONFIG.format(address=address, folder=folder, home=made.home(number)))
            command = [*made._there(number), str(SSHD), "-D", "-e", "-f", str(config)]
            servers.append(ends.enter_context(running(command, pass_fds=made.fds)))
        yield made
