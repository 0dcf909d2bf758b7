"""What is found on one machine, from machines that are made up."""

import json
import socket
from dataclasses import asdict

import pytest

from tests import api
from tests.doctor.machines import LOOPBACK, made_up

DEBUG = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
DOCKER = api.Interface("docker0", 1500, True, ("172.17.0.1",))


def of(check: str, machine: api.Machine, **where: object) -> list[api.Finding]:
    return [one for one in api.machine_findings(machine, **where) if one.check == check]  # type: ignore[arg-type]


def test_nothing_is_wrong_on_a_machine_that_is_right() -> None:
    assert {one.level for one in api.machine_findings(made_up(), others=True)} == {"ok"}


@pytest.mark.parametrize(("others", "level"), [(None, "note"), (True, "wrong"), (False, "ok")])
@pytest.mark.parametrize("address", ["127.0.1.1", "172.17.0.1"])
def test_an_address_that_others_cannot_reach(others: bool | None, level: str, address: str) -> None:
    eth0 = made_up().interfaces[1]
    machine = made_up(gloo=(address,), interfaces=(LOOPBACK, DOCKER, eth0))
    (finding,) = of("gloo", machine, others=others)
    assert finding.level == level
    assert address in finding.found
    if level != "ok":
        assert "set GLOO_SOCKET_IFNAME=eth0 in the environment of torchrun" in finding.advice


def test_an_interface_that_is_not_there_names_the_closest() -> None:
    machine = made_up(
        gloo=(),
        gloo_error="Unable to find address for: eht0",
        environment={"GLOO_SOCKET_IFNAME": "eht0"},
        route="",
    )
    (finding,) = of("gloo", machine)
    assert finding.level == "wrong"
    assert "GLOO_SOCKET_IFNAME=eht0: Unable to find address" in finding.found
    assert "did you mean 'eth0'?" in finding.advice


@pytest.mark.parametrize(
    ("check", "changes", "told", "to_do"),
    [
        ("host", {"names_error": "Name or service not known"}, "does not resolve", "/etc/hosts"),
        ("listeners", {"listeners": ("port 29500: pid 7 (x)",)}, "port 29500", "firewall"),
        ("listeners", {"public": ("8.8.8.8:29400: pid 7 (x)",)}, "8.8.8.8:29400", "tunnel"),
        ("listeners", {"public": ("[2a00::1]:1: pid 7 (x)",)}, "[2a00::1]:1", "tunnel"),
        ("name server", {"naming_s": 1.0}, "takes 1.0 s or more", "RES_OPTIONS"),
        ("ports", {"ports_used": 28000}, "232 free", "ip_local_port_range"),
        ("open files", {"open_files": 256}, "256 files", "ulimit -n 1024"),
        ("threads", {"environment": {"OMP_NUM_THREADS": "4"}}, "more threads", "THREADS=2"),
        ("threads", {"environment": {"OMP_NUM_THREADS": "1"}, "cores": 16}, "idle", "THREADS=16"),
        ("clock", {"clock_kept": False}, "no time service", "chrony"),
        ("gloo", {"environment": {"TP_SOCKET_IFNAME": "eth0"}}, "torch's RPC", "GLOO_SOCKET"),
        ("environment", {"environment": DEBUG}, "DETAIL", "unset it"),
        ("proxy", {"environment": {"https_proxy": "set"}}, "user space", "thinwire join"),
    ],
)
def test_surprising_setup_is_a_note(
    check: str, changes: dict[str, object], told: str, to_do: str
) -> None:
    (finding,) = (one for one in of(check, made_up(**changes)) if one.level != "ok")
    assert finding.level == "note"
    assert told in finding.found
    assert to_do in finding.advice


def test_listening_addresses_are_reported() -> None:
    told = ("10.0.0.1:29400: pid 7 (thinwire host)", "[fd00::1]:29400: pid 8 (x)")
    assert of("listeners", made_up(private=told))[1] == api.ok(
        "listeners", f"on one address: {'; '.join(told)}"
    )


def test_time_outs_in_the_environment_are_reported() -> None:
    machine = made_up(environment={"NCCL_IB_TIMEOUT": "22"})
    assert of("time-outs", machine) == [api.ok("time-outs", "NCCL_IB_TIMEOUT=22")]


def test_a_machine_travels_as_json() -> None:
    machine = api.Machine.look()
    assert api.Machine.of_row(json.loads(json.dumps(asdict(machine)))) == machine
    with pytest.raises(TypeError):
        api.Machine.of_row({"host": "vm"})


def test_torch_is_asked_which_address_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    machine = api.Machine.look()
    assert (machine.gloo, machine.gloo_error) == (["127.0.0.1"], "")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such")
    machine = api.Machine.look()
    assert machine.gloo == []
    assert machine.gloo_error == "Unable to find address for: no-such"


def meeting(host: str, port: object, *, started: bool = False) -> api.Finding:
    environment = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return api.meeting_point(environment, ("127.0.0.1",), 0.3, started=started)


def test_the_meeting_point_is_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert meeting("127.0.0.1", port, started=True) == api.ok(
            "store", f"127.0.0.1:{port} answers"
        )
    free = meeting("127.0.0.1", port)
    assert free.level == "ok"
    assert "the port is free" in free.found
    gone = meeting("127.0.0.1", port, started=True)
    assert gone.level == "wrong"
    assert "refused" in gone.found


@pytest.mark.parametrize(
    ("host", "port", "told"),
    [
        ("", "29500", "MASTER_PORT is set and MASTER_ADDR is not"),
        ("127.0.0.1", "", "MASTER_ADDR is set and MASTER_PORT is not"),
        ("127.0.0.1", "99999", "MASTER_PORT is '99999'"),
        ("127.0.0.1", "http", "MASTER_PORT is 'http'"),
        ("127.0.0.1", "²", "MASTER_PORT is '²'"),
        ("no.such.invalid", "29500", "does not resolve"),
        ("node..local", "29500", "does not resolve: it is no name"),
        (f"{'a' * 64}.local", "29500", "does not resolve: it is no name"),
    ],
)
def test_a_meeting_point_that_cannot_be(host: str, port: str, told: str) -> None:
    finding = meeting(host, port)
    assert finding.level == "wrong"
    assert told in finding.found
    assert finding.advice


def test_one_that_is_on_another_machine_may_not_be_there_yet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port)}
    assert api.meeting_point(environment, (), 0.3, started=False).level == "ok"
    assert api.has_remote_ranks("127.0.0.2", ()) is None
    assert api.has_remote_ranks("10.9.8.7", ("10.9.8.6",)) is True
    assert api.has_remote_ranks("10.9.8.7", ("10.9.8.7",)) is None
    assert api.has_remote_ranks("", ()) is None


def test_text_has_the_errors_and_data_has_everything() -> None:
    found = [
        api.ok("one", "fine"),
        api.note("two", "x " * 80, "do this"),
        api.wrong("three", "bad", "mend"),
    ]
    assert api.as_text(found, quiet=True, width=100).split() == [
        "wrong",
        "three",
        "bad",
        "->",
        "mend",
    ]
    told = api.document("title", found, 1.234)
    assert (told["title"], told["status"], told["seconds"]) == ("title", 1, 1.23)
    assert list(told["findings"][2].values()) == ["wrong", "three", "bad", "mend"]
    assert api.document("title", found[:2], 0)["status"] == 0
