"""Findings between the ranks, from the reports of all of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, groupby

from thinwire.tools.doctor.interfaces import is_loopback
from thinwire.tools.doctor.local_checks import Finding, judged, machine_findings, note, ok, wrong
from thinwire.tools.doctor.machine import Machine
from thinwire.tools.doctor.pairs import Line, Reach

_LARGEST_SKEW_S = 1.0
_MUST_AGREE = {"wire", "GLOO_DEVICE_TRANSPORT"}
"""Without it ranks refuse each other; the wire format alone among the versions."""
_MAY_DIFFER = {"GLOO_SOCKET_IFNAME": "correct if the interfaces have other names there"}


@dataclass(frozen=True)
class Seen:
    """Report of one rank."""

    machine: Machine
    reaches: tuple[Reach, ...] | None = None
    no_socket: str = ""
    gloo: str | None = None


@dataclass(frozen=True)
class Reports:
    """Reports of all ranks."""

    size: int
    seen: Mapping[int, Seen]
    strangers: Mapping[int, str]
    tried: bool = False
    lines: tuple[tuple[int, int, Line], ...] = ()

    @property
    def machines(self) -> list[list[int]]:
        """Return the ranks of each machine."""
        stacks: dict[str, list[int]] = {}
        for rank, row in self.seen.items():
            stacks.setdefault(row.machine.namespace, []).append(rank)
        return list(stacks.values())

    def of(self, rank: int) -> list[int]:
        """Return the ranks on the same machine as this rank."""
        return next(ranks for ranks in self.machines if rank in ranks)


def cross_findings(reports: Reports) -> Iterator[Finding]:
    """Yield the findings in display order."""
    parts = (_present, _machines, _addresses, _connections, _lines, _sizes, _clocks)
    for part in parts:
        yield from part(reports)
    different = [*_different(reports, "versions", "install the same version on all machines")]
    yield from different
    if reports.seen and not different:
        same = reports.seen[min(reports.seen)].machine.versions.items()
        texts = ", ".join(f"{name} {value}" for name, value in same)
        yield ok("versions", f"the same everywhere: {texts}")
    same_value = "set the same value in the environment of each torchrun"
    yield from _different(reports, "environment", same_value)
    yield from _group(reports)


def named(ranks: Iterable[int]) -> str:
    """Format ranks as text."""
    several = sorted({*ranks})
    # what lies in a run has the same distance from its place in the list
    runs = [
        [r for _, r in run] for _, run in groupby(enumerate(several), lambda one: one[1] - one[0])
    ]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(several) != 1)} {', '.join(texts)}"


def _present(reports: Reports) -> Iterator[Finding]:
    missing = {*range(reports.size)} - reports.seen.keys() - reports.strangers.keys()
    if missing:
        yield wrong(
            "ranks",
            f"{named(missing)} of {reports.size} did not reach the store in time",
            "read what they printed; raise --timeout if their machines are slow",
        )
    for rank, version in reports.strangers.items():
        yield wrong(
            "versions",
            f"rank {rank} has thinwire {version}, whose doctor sends another report format",
            "install the same version of thinwire on all machines",
        )


def _machines(reports: Reports) -> Iterator[Finding]:
    ranks_with: dict[Finding, list[int]] = {}
    for rank, row in reports.seen.items():
        here = len(reports.of(rank))
        others = len(reports.machines) > 1
        for finding in machine_findings(
            row.machine, ranks=reports.size, ranks_here=here, others=others
        ):
            if finding.level != "ok":
                ranks_with.setdefault(finding, []).append(rank)
    for finding, by in ranks_with.items():
        hosts = ", ".join(dict.fromkeys(reports.seen[rank].machine.host for rank in by))
        yield replace(finding, found=f"{named(by)} ({hosts}): {finding.found}")


def _addresses(reports: Reports) -> Iterator[Finding]:
    announcing: dict[str, dict[str, list[int]]] = {}
    for rank, row in reports.seen.items():
        by_machine = announcing.setdefault(row.machine.address, {})
        by_machine.setdefault(row.machine.namespace, []).append(rank)
        if row.no_socket:
            yield wrong(
                "addresses",
                f"rank {rank} cannot listen on {row.machine.address or 'any address'}: "
                f"{row.no_socket}",
                "set GLOO_SOCKET_IFNAME to an interface that is up and has an address",
            )
    for address, having in announcing.items():
        if len(having) > 1 and address and not is_loopback(address):
            yield wrong(
                "addresses",
                f"{' and '.join(map(named, having.values()))} are on different machines and "
                f"announce the same address, {address}",
                "on each machine, set GLOO_SOCKET_IFNAME to an interface with an address of "
                "its own",
            )
    texts = [
        f"{named(chain(*having.values()))} {address}" for address, having in announcing.items()
    ]
    yield ok("addresses", "; ".join(texts))


def _connections(reports: Reports) -> Iterator[Finding]:
    failed: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    latencies: dict[tuple[int, int], float] = {}
    for rank, row in reports.seen.items():
        if row.reaches is None:
            yield wrong(
                "connections",
                f"rank {rank} did not report its connections in time",
                "raise --timeout if its machine or network is slow",
            )
        for reach in row.reaches or ():
            if reach.error:
                key = reports.of(rank)[0], reports.of(reach.to)[0], reach.error
                failed.setdefault(key, []).append((rank, reach.to))
            elif reach.latency_s is not None:
                latencies[rank, reach.to] = reach.latency_s
    for (_, _, error), pairs in failed.items():
        yield _failed(reports, error, pairs)
    if latencies:
        worst = max(latencies, key=lambda p: latencies[p])
        best = min(latencies.values())
        amount = "all" if not failed else "other"
        yield ok(
            "connections",
            f"{amount} pairs connect in both directions; round trips take {_ms(best)} to "
            f"{_ms(latencies[worst])}, the longest from rank {worst[0]} to rank {worst[1]}",
        )


def _lines(reports: Reports) -> Iterator[Finding]:
    if reports.lines:
        rank, to, line = min(reports.lines, key=lambda one: one[2].bytes_s)
        yield judged(not line.advice, "line", f"rank {rank} to {to}: {line}", line.advice)


def _failed(reports: Reports, error: str, pairs: list[tuple[int, int]]) -> Finding:
    sources, targets = zip(*pairs, strict=True)
    machine = reports.seen[pairs[0][1]].machine
    source = reports.seen[pairs[0][0]].machine.address
    works = [
        any(back.to == there and not back.error for back in reports.seen[here].reaches or ())
        for there, here in pairs
    ]
    one_way = " (the other direction works)" if all(works) else ""
    return wrong(
        "connections",
        f"{named(sources)} cannot reach {named(targets)} at {machine.address}: {error}{one_way}",
        _cure(error, machine, source),
    )


def _cure(error: str, machine: Machine, source: str) -> str:
    first, last = machine.ports
    ports = f"ports {first} to {last}" if last else "its ephemeral ports"
    if is_loopback(machine.address):
        return f"{machine.address} is a loopback address; see the finding on gloo"
    if error == "time-out":
        return (
            f"something between them drops packets: let {machine.host} ({machine.address}) "
            f"accept TCP on {ports} from {source}, and check the route back"
        )
    if error == "refused":
        return (
            "a firewall refuses the connection, or another machine has this address: let "
            f"{machine.host} accept TCP on {ports} from {source}"
        )
    if error == "no route":
        return (
            f"run `ip route get {machine.address}` there; if the machines share another "
            "network, set GLOO_SOCKET_IFNAME on each to its interface"
        )
    if "answers" in error or "closed" in error:
        return f"two machines have the address {machine.address}, or a proxy is between them"
    return f"a firewall rule on the connecting machine forbids it: let it send to {machine.address}"


def _sizes(reports: Reports) -> Iterator[Finding]:
    stuck: dict[tuple[frozenset[int], int], list[tuple[int, int]]] = {}
    reached = 0
    for rank, row in reports.seen.items():
        for reach in row.reaches or ():
            reached += reach.large is True
            if reach.large is False:
                machines = frozenset((reports.of(rank)[0], reports.of(reach.to)[0]))
                stuck.setdefault((machines, reach.fitting_mtu), []).append((rank, reach.to))
    for (_, fitting), pairs in stuck.items():
        yield _too_large(reports.seen[pairs[0][0]].machine, fitting, pairs)
    if reached and not stuck:
        yield ok("MTU", "messages of 32 KiB arrive between all machines that connect")


def _too_large(machine: Machine, fitting: int, pairs: list[tuple[int, int]]) -> Finding:
    sources, targets = zip(*pairs, strict=True)
    both = {(there, here) for here, there in pairs} == set(pairs)
    one = machine.interface_of(machine.address)
    name, size = (one.name, f"{one.mtu} bytes") if one else ("INTERFACE", "the usual size")
    where = f"between {named(sources)}" if both else f"from {named(sources)} to {named(targets)}"
    lost = f"small messages {where} arrive, messages of 32 KiB do not: "
    if not fitting:
        return wrong(
            "MTU",
            f"{lost}neither in packets of {size} nor of 1000 bytes",
            "the link is too slow or loses packets; find the limit with `ping -M do -s SIZE`",
        )
    return wrong(
        "MTU",
        f"{lost}packets of {size} are dropped silently, packets of {fitting} bytes pass",
        f"run `ip link set dev {name} mtu {fitting}` on both machines, or allow ICMP "
        "'fragmentation needed'",
    )


def _clocks(reports: Reports) -> Iterator[Finding]:
    skews = [
        (rank, reach.ahead_s, reach.latency_s / 2)
        for rank, row in reports.seen.items()
        for reach in row.reaches or ()
        if reach.to == 0 and reach.latency_s is not None
    ]
    for rank, ahead_s, unsure_s in skews:
        if abs(ahead_s) - unsure_s > _LARGEST_SKEW_S:
            way = "ahead of" if ahead_s > 0 else "behind"
            yield note(
                "clocks",
                f"the clock of rank {rank} is {abs(ahead_s):.1f} s {way} rank 0's (± {unsure_s:.3f}"
                " s)",
                "training does not use the clock, but logs and certificates do: start chrony "
                "or systemd-timesyncd",
            )
    largest = max((abs(ahead_s) + unsure_s for _, ahead_s, unsure_s in skews), default=None)
    if largest is not None and largest <= _LARGEST_SKEW_S:
        yield ok("clocks", f"all within {_ms(largest)} of rank 0's")


def _different(reports: Reports, part: str, advice: str) -> Iterator[Finding]:
    """Yield entries of a part of the machines whose values differ from those of the first rank."""
    rows: dict[int, dict[str, str]]
    rows = {rank: getattr(row.machine, part) for rank, row in reports.seen.items()}
    lowest = min(rows, default=0)
    first = rows.get(lowest, {})
    others = dict[tuple[str, str], list[int]]()
    for rank, own in rows.items():
        for name in dict.fromkeys([*first, *own]):
            if own.get(name) != first.get(name):
                others.setdefault((name, own.get(name, "not set")), []).append(rank)
    for (name, theirs), ranks in others.items():
        subject = "the wire format" if name == "wire" else name
        ours = first.get(name, "not set")
        yield Finding(
            "wrong" if name in _MUST_AGREE else "note",
            part,
            f"{subject} is {ours} on rank {lowest} and {theirs} on {named(ranks)}",
            _MAY_DIFFER.get(name, advice),
        )


def _group(reports: Reports) -> Iterator[Finding]:
    if not reports.tried:
        yield note(
            "gloo group",
            "not tried, because some ranks are missing or have no address",
            "fix the problems above and run this again",
        )
        return
    errors: dict[str, list[int]] = {}
    for rank, row in reports.seen.items():
        error = "no report in time" if row.gloo is None else row.gloo
        if error:
            errors.setdefault(error, []).append(rank)
    for error, ranks in errors.items():
        yield wrong(
            "gloo group",
            f"{named(ranks)}: {error}",
            "fix the problems above; if there are none, set GLOO_LOG_LEVEL=DEBUG for details",
        )
    if not errors:
        yield ok("gloo group", "it forms, and a sum over all ranks is correct")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
