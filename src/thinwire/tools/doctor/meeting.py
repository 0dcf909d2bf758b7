"""The meeting point of the ranks: MASTER_ADDR and MASTER_PORT, tried with a plain socket."""

import contextlib
import errno
import socket
from collections.abc import Mapping

from thinwire.tools.doctor.findings import Finding, note, ok, wrong
from thinwire.tools.doctor.interfaces import is_loopback, resolved

__all__ = ["meeting_point", "one_wait_s", "why_not"]

_CHECK = "store"
_REASONS = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "time-out",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
    errno.EADDRNOTAVAIL: "no route",
    errno.EINVAL: "no route",  # what a blackhole route answers
    errno.EACCES: "forbidden by this machine",
    errno.EPERM: "forbidden by this machine",
}


def one_wait_s(limit_s: float) -> float:
    """Seconds for one connection, where everything together may take `limit_s`."""
    return min(0.1 * limit_s, 5.0)


def why_not(error: OSError) -> str:
    """Why a connection did not come about, in a word or two."""
    if isinstance(error, TimeoutError):
        return "time-out"
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)


def meeting_point(
    environment: Mapping[str, str], own: tuple[str, ...], patience_s: float, *, started: bool
) -> Finding:
    """Whether the store of the ranks can be where the environment says.

    Args:
        environment: Of this process.
        own: Addresses of this machine.
        patience_s: For one connection.
        started: Whether the store must be there by now, as under torchrun.
    """
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not host and not port:
        return ok(_CHECK, "MASTER_ADDR and MASTER_PORT are not set; torchrun sets them")
    if not host or not port:
        there, away = ("MASTER_ADDR", "MASTER_PORT") if host else ("MASTER_PORT", "MASTER_ADDR")
        return wrong(_CHECK, f"{there} is set and {away} is not", f"set {away} or let torchrun do")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        return wrong(_CHECK, f"MASTER_PORT is {port!r}", "a number from 1 to 65535 is required")
    addresses, why_not_found = resolved(host)
    if not addresses:
        return wrong(
            _CHECK,
            f"MASTER_ADDR={host} does not resolve: {why_not_found}",
            "give the address of rank 0's machine, or a name that every machine resolves",
        )
    address = addresses[0]
    where = f"{host}:{port}" if host == address else f"{host}:{port} ({address})"
    return _tried(where, address, int(port), own, patience_s, started=started)


def _tried(
    where: str, address: str, port: int, own: tuple[str, ...], patience_s: float, *, started: bool
) -> Finding:
    try:
        with socket.create_connection((address, port), timeout=patience_s):
            return ok(_CHECK, f"{where} answers")
    except OSError as error:
        reason = why_not(error)
    here = address in own or is_loopback(address)
    if here and reason == "refused" and not started:
        with contextlib.suppress(OSError), socket.create_server((address, port)):
            return ok(_CHECK, f"{where} is this machine, and the port is free")
        return wrong(_CHECK, f"{where} is this machine, and the port cannot be had", "take another")
    if reason == "refused" and not started:
        return note(
            _CHECK,
            f"{where} refuses connections: nothing listens there yet",
            "where torchrun runs there already, its firewall refuses: let it accept this port",
        )
    return wrong(_CHECK, f"{where} cannot be reached from this machine: {reason}", _cure(reason))


def _cure(reason: str) -> str:
    if reason == "no route":
        return "`ip route get` with that address says why; give an address that has a route"
    if reason == "refused":
        return "torchrun on rank 0's machine has ended, or a firewall there refuses this port"
    return "let the firewalls between accept TCP on this port at rank 0's machine"
