"""Findings between the ranks, from the reports of all of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from thinwire.tools.doctor.interfaces import is_loopback
from thinwire.tools.doctor.local_checks import Finding, Level, machine_findings, note, ok, wrong
from thinwire.tools.doctor.machine import Machine
from thinwire.tools.doctor.pairs import Line, Reach

_LARGEST_SKEW_S = 1.0
_MAY_DIFFER = {"GLOO_SOCKET_IFNAME": "correct if the interfaces have other names there"}


@dataclass(frozen=True)
class Seen:
    """Report of one rank."""

    machine: Machine
    skew: tuple[float, float] | None = None
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
    yield from _present(reports)
    yield from _machines(reports)
    yield from _addresses(reports)
    yield from _connections(reports)
    yield from _lines(reports)
    yield from _sizes(reports)
    yield from _clocks(reports)
    yield from _versions(reports)
    yield from _different(
        reports,
        lambda row: row.machine.environment,
        "environment",
        lambda name: "wrong" if name == "GLOO_DEVICE_TRANSPORT" else "note",
        lambda name: _MAY_DIFFER.get(
            name, "set the same value in the environment of each torchrun"
        ),
    )
    yield from _group(reports)


def named(ranks: Iterable[int]) -> str:
    """Format ranks as text."""
    several = sorted(ranks)
    runs: list[list[int]] = []
    for rank in several:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(several) != 1)} {', '.join(texts)}"


def _present(reports: Reports) -> Iterator[Finding]:
    missing = [
        r for r in range(reports.size) if r not in reports.seen and r not in reports.strangers
    ]
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
    for ranks in reports.machines:
        for rank in ranks:
            for finding in machine_findings(
                reports.seen[rank].machine,
                ranks=reports.size,
                ranks_here=len(ranks),
                others=len(reports.machines) > 1,
            ):
                if finding.level != "ok":
                    ranks_with.setdefault(finding, []).append(rank)
    for finding, by in ranks_with.items():
        hosts = ", ".join(dict.fromkeys(reports.seen[rank].machine.host for rank in by))
        yield replace(finding, found=f"{named(by)} ({hosts}): {finding.found}")


def _addresses(reports: Reports) -> Iterator[Finding]:
    announcing: dict[str, list[list[int]]] = {}
    for ranks in reports.machines:
        for address in dict.fromkeys(reports.seen[rank].machine.address for rank in ranks):
            has = [rank for rank in ranks if reports.seen[rank].machine.address == address]
            announcing.setdefault(address, []).append(has)
    for address, having in announcing.items():
        if len(having) > 1 and address and not is_loopback(address):
            yield wrong(
                "addresses",
                f"{' and '.join(map(named, having))} are on different machines and announce the "
                f"same address, {address}",
                "on each machine, set GLOO_SOCKET_IFNAME to an interface with an address of "
                "its own",
            )
    for rank, row in reports.seen.items():
        if row.no_socket:
            yield wrong(
                "addresses",
                f"rank {rank} cannot listen on {row.machine.address or 'any address'}: "
                f"{row.no_socket}",
                "set GLOO_SOCKET_IFNAME to an interface that is up and has an address",
            )
    texts = [
        f"{named(rank for ranks in having for rank in ranks)} {address}"
        for address, having in announcing.items()
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
        worst, best = max(latencies, key=lambda p: latencies[p]), min(latencies.values())
        amount = "all" if not failed else "other"
        yield ok(
            "connections",
            f"{amount} pairs connect in both directions; round trips take {_ms(best)} to "
            f"{_ms(latencies[worst])}, the longest from rank {worst[0]} to rank {worst[1]}",
        )


def _lines(reports: Reports) -> Iterator[Finding]:
    if reports.lines:
        rank, to, line = min(reports.lines, key=lambda one: one[2].bytes_s)
        level = note if line.advice else ok
        yield level("line", f"rank {rank} to {to}: {line}", line.advice)


def _failed(reports: Reports, error: str, pairs: list[tuple[int, int]]) -> Finding:
    sources, targets = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
    machine = reports.seen[pairs[0][1]].machine
    source = reports.seen[pairs[0][0]].machine.address
    back = {(b, a) for a, b in pairs}
    connected = {
        (rank, reach.to)
        for rank, row in reports.seen.items()
        for reach in row.reaches or ()
        if not reach.error
    }
    one_way = " (the other direction works)" if back <= connected else ""
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
    sources, targets = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
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
    skews = {rank: row.skew for rank, row in reports.seen.items() if rank and row.skew}
    for rank, (ahead_s, unsure_s) in skews.items():
        if abs(ahead_s) - unsure_s > _LARGEST_SKEW_S:
            way = "ahead of" if ahead_s > 0 else "behind"
            yield note(
                "clocks",
                f"the clock of rank {rank} is {abs(ahead_s):.1f} s {way} rank 0's (± {unsure_s:.3f}"
                " s)",
                "training does not use the clock, but logs and certificates do: start chrony "
                "or systemd-timesyncd",
            )
    largest = max((abs(ahead) + unsure for ahead, unsure in skews.values()), default=None)
    if largest is not None and largest <= _LARGEST_SKEW_S:
        yield ok("clocks", f"all within {_ms(largest)} of rank 0's")


def _versions(reports: Reports) -> Iterator[Finding]:
    if 0 not in reports.seen:
        return
    first = reports.seen[0].machine.versions
    found = list(
        _different(
            reports,
            lambda row: row.machine.versions,
            "versions",
            # ranks refuse each other by the wire version alone
            lambda name: "wrong" if name == "wire" else "note",
            lambda _: "install the same version on all machines",
        )
    )
    yield from found
    if not found:
        same = ", ".join(f"{name} {value}" for name, value in first.items())
        yield ok("versions", f"the same everywhere: {same}")


def _different(
    reports: Reports,
    part: Callable[[Seen], Mapping[str, str]],
    check: str,
    level: Callable[[str], Level],
    advice: Callable[[str], str],
) -> Iterator[Finding]:
    """Yield entries whose values differ from those of the first rank."""
    if not reports.seen:
        return
    lowest = min(reports.seen)
    first = part(reports.seen[lowest])
    others: dict[tuple[str, str], list[int]] = {}
    for rank, row in reports.seen.items():
        for name in dict.fromkeys([*first, *part(row)]):
            theirs = part(row).get(name, "not set")
            if theirs != first.get(name, "not set"):
                others.setdefault((name, theirs), []).append(rank)
    for (name, theirs), ranks in others.items():
        ours = first.get(name, "not set")
        subject = "the wire format" if name == "wire" else name
        yield Finding(
            level(name),
            check,
            f"{subject} is {ours} on rank {lowest} and {theirs} on {named(ranks)}",
            advice(name),
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
        if row.gloo is None:
            errors.setdefault("no report in time", []).append(rank)
        elif row.gloo:
            errors.setdefault(row.gloo, []).append(rank)
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
