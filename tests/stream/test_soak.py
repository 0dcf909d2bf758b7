"""A thousand versions: the writer is killed, rolled back and replaced, and a storage hangs."""

import hashlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from torch import Tensor, nn

import thinwire as tw
from tests.ranks import Pool
from tests.stream.models import contents, fill
from tests.stream.storages import Faults
from tests.toys import warned
from tests.waiting import PATIENCE_S, until
from thinwire.errors import StreamError

KILLS, VERSIONS = 50, 1000
ROLLED_BACK, OVERTAKEN, HANGING = 20, 30, 40
"""The lives of a writer in which something else happens."""


def digest_of(state: dict[str, Tensor]) -> str:
    return hashlib.sha256(repr(contents(state)).encode()).hexdigest()


class Log:
    """What writers were about to publish, by step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, digest: str) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(f"{step} {digest}\n".encode())

    def read(self) -> dict[int, str]:
        text = self.path.read_text() if self.path.exists() else ""
        return {int(step): digest for step, digest in map(str.split, text.splitlines())}

    def last(self) -> int:
        return max(self.read(), default=0)


class Writer:
    """A fork that publishes versions until it is killed, or another one takes over."""

    def __init__(self, where: str, log: Log, life: int) -> None:
        self.first = log.last()
        with warned():  # later releases of Python warn of forks beside threads
            pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.alarm(2 * int(PATIENCE_S))
                self._live(where, log, life)
            except StreamError:
                status = OVERTAKEN
            finally:
                os._exit(status)
        self.pid = pid

    def _live(self, where: str, log: Log, life: int) -> None:
        model, back = model_of(), 200 if life == ROLLED_BACK else 0
        fill(model, self.first - back)
        with warned():
            publisher = tw.publish(where, model, every=40)
            for step in range(self.first + 1, 1 << 30):
                fill(model, step - back)
                log.append(step, digest_of(model.state_dict()))
                publisher.update(step)
                if life == HANGING:
                    time.sleep(0.01)
                elif step % 3:
                    publisher.wait()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def model_of() -> nn.Module:
    return nn.Linear(90, 90).bfloat16()


def soak(_rank: int, _size: int, folder: str) -> tuple[int, int]:
    where, log, chance = Path(folder, "versions"), Log(Path(folder, "log")), random.Random(1)
    faults, reader = Faults(where), model_of()
    follower, numbers = tw.follow(where, reader, poll=0.01), set[int]()

    def read() -> int:
        version = follower.latest(wait=PATIENCE_S)
        written = log.read()[version.step]
        assert digest_of(version.state_dict()) == written
        assert digest_of(reader.state_dict()) == written
        assert version.number >= max(numbers, default=0)
        numbers.add(version.number)
        return version.number

    def read_more(count: int) -> None:
        end = max(numbers, default=0) + count
        while read() < end:
            pass

    life = 0
    while life < KILLS or max(numbers) < VERSIONS:
        life += 1
        writer = Writer(faults.address if life == HANGING else str(where), log, life)
        read_more(VERSIONS // KILLS)
        if life == HANGING:
            with faults.hang():
                wait_for_steps(log, faults)
            read_more(1)
        if life == OVERTAKEN:
            overtaken, writer = writer, Writer(str(where), log, life)
            assert os.waitstatus_to_exitcode(os.waitpid(overtaken.pid, 0)[1]) == OVERTAKEN
            read_more(1)
        time.sleep(chance.uniform(0, 0.02))
        writer.kill()
    return len(numbers), life


def wait_for_steps(log: Log, faults: Faults) -> None:
    """Wait until the writer has gone on, though nothing is written."""
    until(lambda: faults.calls("hang") > 0)
    step = log.last()
    until(lambda: log.last() > step + 50)


@pytest.mark.slow
@pytest.mark.fault("the writer of versions is killed")
def test_versions_of_many_lives_equal_the_log(ranks: Pool, tmp_path: Path) -> None:
    read, kills = ranks.run(soak, str(tmp_path), size=0, group=False, timeout_s=500)[0]
    assert kills >= KILLS
    assert read > VERSIONS // 4
