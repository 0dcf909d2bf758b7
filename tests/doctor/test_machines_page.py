"""What docs/machines.md tells people to type, and what the doctor says, between namespaces."""

import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api import Link, inside, network
from tests.api import netns_Network as Network
from tests.doctor.hosts import ROOT, doctors, in_hosts, shell, worst
from tests.lab.namespaces import NETNS

pytestmark = [*NETNS, pytest.mark.slow]

PAGE = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
SLOW_MACHINE = "--timeout 120"
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft")


@pytest.fixture
def net() -> Iterator[Network]:
    with network(2, Link.parse("none")) as made:
        yield made


def block(first_line: str, net: Network) -> str:
    """The bash block of the page that begins so, with the addresses of the namespaces."""
    found = re.findall(rf"^```bash\n# {re.escape(first_line)}\n(.*?)^```", PAGE, re.S | re.M)
    assert len(found) == 1
    return at_home(found[0], net)


def at_home(text: str, net: Network) -> str:
    """Text with the page's addresses changed to those of the namespaces."""
    for number, address in enumerate(net.addresses, start=1):
        text = text.replace(f"10.0.0.{number}", address)
    return text


def in_page(phrase: str) -> str:
    """A phrase that stands on the page."""
    assert phrase in PAGE
    return phrase


def firewall(net: Network, ports: str = "29500, 32768-60999") -> None:
    """Puts the page's firewall on the first machine, with other ports where these are given."""
    rules = block("firewall of 10.0.0.1", net)
    assert "{ 29500, 32768-60999 }" in rules
    inside(
        net.namespace_fds[0],
        lambda: shell(rules.replace("{ 29500, 32768-60999 }", f"{{ {ports} }}")),
    )


@pytest.mark.slow
def test_two_machines_have_nothing_wrong(net: Network) -> None:
    commands = [f"{block(f'on {host}', net).rstrip()} {SLOW_MACHINE}" for host in HOSTS]
    done = in_hosts(net, commands, [{}, {}])
    assert [one.returncode for one in done] == [0, 0], done[0].stdout + done[1].stderr
    assert done[0].stdout.startswith("2 ranks on 2 machines\n")
    assert "wrong" not in done[0].stdout
    for line in ("connections  all pairs connect in both directions", "gloo group   it forms"):
        assert f"\nok     {line}" in done[0].stdout
    assert done[1].stdout.strip() == ""


HOSTS = ("10.0.0.1", "10.0.0.2")


@needs_nft
def test_the_firewall_of_the_page_lets_ranks_through(net: Network) -> None:
    firewall(net)
    found, done = doctors(net, [{}, {}], SLOW_MACHINE)
    assert (worst(found), [one.returncode for one in done]) == ([], [0, 0])


@needs_nft
def test_a_firewall_that_forgets_gloo(net: Network) -> None:
    firewall(net, "29500")
    found, done = doctors(net, [{}, {}], SLOW_MACHINE)
    assert [one.returncode for one in done] == [1, 1]
    assert done[1].stderr.count("wrong") == 0
    connections = [line for line in worst(found) if line.startswith("connections")]
    phrase = at_home(
        in_page("cannot reach rank 0 at 10.0.0.1: time-out (the other direction works)"), net
    )
    assert len(connections) == 1
    assert phrase in connections[0]
    assert "accept TCP on ports 32768 to 60999 from 10.77.0.2" in connections[0]
    assert found["seconds"] <= 120


@needs_nft
def test_alone_the_doctor_tries_the_store(net: Network) -> None:
    command = block("on 10.0.0.2, where torchrun does not start", net)
    alone = ["true", command.replace("thinwire doctor", "python -m thinwire doctor")]
    here = {"GLOO_SOCKET_IFNAME": "eth0"}
    (_, free) = in_hosts(net, alone, [{}, here])
    assert free.returncode == 0, free.stdout
    assert "refuses connections: nothing listens there yet" in joined(free.stdout)
    firewall(net, "22")
    (_, cut) = in_hosts(net, alone, [{}, here])
    assert cut.returncode == 1
    assert "cannot be reached from this machine: time-out" in joined(cut.stdout)


def joined(text: str) -> str:
    """Text without its line breaks."""
    return " ".join(text.split())


@pytest.mark.slow
def test_an_interface_that_is_not_there(net: Network) -> None:
    found, done = doctors(net, [{}, {"GLOO_SOCKET_IFNAME": "eth7"}], SLOW_MACHINE)
    assert [one.returncode for one in done] == [1, 1]
    (only,) = worst(found)
    assert only.startswith("gloo: rank 1")
    assert in_page("Unable to find address for: eth7") in only
    assert "set GLOO_SOCKET_IFNAME=eth0" in only


@pytest.mark.slow
def test_hosts_named_loopback(net: Network, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n", "utf-8")
    unset = {"GLOO_SOCKET_IFNAME": ""}
    found, done = doctors(net, [unset, unset], SLOW_MACHINE, etc_hosts=hosts)
    assert [one.returncode for one in done] == [1, 1]
    (gloo,) = (line for line in worst(found) if line.startswith("gloo:"))
    assert gloo.startswith("gloo: ranks 0, 1 ")
    assert in_page("gloo announces 127.0.1.1, by the name of the host") in gloo
    assert "set GLOO_SOCKET_IFNAME=eth0 in the environment of torchrun" in gloo


@pytest.mark.slow
def test_a_path_that_loses_large_packets(net: Network) -> None:
    for fd in net.namespace_fds:  # else the kernel hands over 64 KiB at once
        inside(fd, lambda: shell("ip link set dev eth0 gso_max_segs 1"))
    inside(net.hub_fd, lambda: shell("ip link set dev port1 mtu 1300"))
    found, done = doctors(net, [{}, {}], SLOW_MACHINE)
    assert [one.returncode for one in done] == [1, 1]
    mtu, gloo = worst(found)
    assert mtu.startswith("MTU: ")
    assert in_page("small messages between ranks 0, 1 arrive, messages of 32 KiB do not") in mtu
    assert gloo.startswith("gloo group: ranks 0, 1: ")
    for fd in net.namespace_fds:  # what it says helps
        inside(fd, lambda: shell("ip link set dev eth0 mtu 1280"))
    found, _ = doctors(net, [{}, {}], SLOW_MACHINE)
    assert worst(found) == []


@pytest.mark.parametrize(("loss", "control"), [("0%", "cubic"), ("2%", "cubic"), ("2%", "bbr")])
def test_latency_rate_and_loss_of_a_line_are_measured(loss: str, control: str) -> None:
    link = Link.parse("10mbit", "20ms", loss=loss, congestion=control)
    with network(2, link) as net:
        found, _ = doctors(net, [{}, {}], SLOW_MACHINE)
    assert worst(found) == []
    told = {one["check"]: one for one in found["findings"]}
    shortest = re.search(r"round trips take ([\d.]+) ms", told["connections"]["found"])
    assert shortest is not None
    assert 40 <= float(shortest[1]) < 120
    assert re.fullmatch(r"all within [\d.]+ ms of rank 0's", told["clocks"]["found"])
    line = re.search(r", ([\d.]+) over 32; ([\d.e-]+) % .*; (\w+)$", told["line"]["found"])
    assert line is not None
    assert 3 < float(line[1]) < 11
    assert float(line[2]) < 2 if loss == "0%" else 0.1 < float(line[2]) < 10
    assert line[3] == control
    if loss == "2%":
        assert (told["line"]["level"] == "note") == (control == "cubic")
        assert told["line"]["advice"] in joined(PAGE)


@pytest.mark.slow
def test_another_version_on_one_side(net: Network, tmp_path: Path) -> None:
    copy = tmp_path / "thinwire"
    shutil.copytree(ROOT / "src" / "thinwire", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "_version.py").write_text('__version__ = "0.0.1"\n', encoding="utf-8")
    message = copy / "wire" / "message.py"
    text = message.read_text(encoding="utf-8")
    assert "\nWIRE_VERSION = 2\n" in text
    message.write_text(text.replace("\nWIRE_VERSION = 2\n", "\nWIRE_VERSION = 7\n"), "utf-8")
    found, _ = doctors(net, [{}, {"PYTHONPATH": str(tmp_path)}], SLOW_MACHINE)
    assert worst(found) == [
        "versions: the wire format is 2 on rank 0 and 7 on rank 1 -> "
        "install the same version on all machines"
    ]
    notes = [one["found"] for one in found["findings"] if one["check"] == "versions"]
    assert any(re.fullmatch(r"thinwire is \S+ on rank 0 and 0.0.1 on rank 1", one) for one in notes)


@pytest.mark.slow
def test_two_of_three_machines_without_a_way_between_them() -> None:
    with network(3, Link.parse("none")) as net:
        away = net.addresses[2]
        inside(net.namespace_fds[1], lambda: shell(f"ip route add unreachable {away}/32"))
        found, done = doctors(net, [{}] * 3, SLOW_MACHINE)
    assert [one.returncode for one in done] == [1, 1, 1]
    connections = sorted(line for line in worst(found) if line.startswith("connections"))
    assert len(connections) == 2
    phrase = in_page("cannot reach rank 2 at 10.0.0.3: no route").replace("10.0.0.3", away)
    assert phrase in connections[0]
    assert f"rank 2 cannot reach rank 1 at {net.addresses[1]}: time-out" in connections[1]
    assert "rank 0" not in "".join(connections)
