"""`join`: this process becomes a member of a run."""

import datetime
import os
import ssl
from functools import partial
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from thinwire import _validate as check
from thinwire._launched import require_linux
from thinwire.comm.outgoing import known_certificate
from thinwire.comm.relay import RelayEndpoint, relay_times, require_relay
from thinwire.comm.waiting import seconds_of
from thinwire.members.code import CODE_VARIABLE, read_code
from thinwire.members.credentials import parse_address, read_token
from thinwire.members.group import SingleRank, Site
from thinwire.members.kv import KeyValueView
from thinwire.members.meeting import connect
from thinwire.members.members import Member, Members
from thinwire.members.relay import relay_key
from thinwire.members.watcher import Terms
from thinwire.page import shown_name

_TIMEOUT_S = 60.0


@check.by_name
def join(
    address: str | None = None,
    *,
    run: str | None = None,
    token_file: str | Path | None = None,
    min_members: int = 1,
    start_members: int | None = None,
    rejoin: bool = True,
    grace_seconds: float | None = None,
    timeout: float | datetime.timedelta | None = None,
    mesh: DeviceMesh | None = None,
    relay: bool = False,
    ca: str | Path | None = None,
    streams: int | None = None,
    keep_batch: bool = False,
    name: str | None = None,
) -> Members:
    """Join a run, or start it together with the other members, without torchrun.

    Example::

        with tw.join("tcp://10.0.0.1:29400", run="llm", token_file="token") as members:
            print(members.rank, members.size)

    Args:
        address: Address of the meeting place (`thinwire host`), such as "tcp://10.0.0.1:29400".
            Without it, what `thinwire join` or `thinwire up` has set: address, run, token, relay
            and certificate.
        run: Name of the run; its members train together.
        token_file: File with the secret of the run; None if the meeting place has no token.
        min_members: Number of members needed to start, and to continue after the loss of a member:
            those that reach the meeting place, also one alone. `leave` may take a run below it.
        start_members: Members needed to start, if more than `min_members`; the same on all.
        rejoin: True if this member, once it was away longer than the time-out, enters the run again
            with what it has trained: `sync.step` jumps to that of the others. With False, for a
            member of shards, and after three failures it gets `Evicted`. May differ.
        grace_seconds: Seconds, from when more than half of the members have come to an averaging,
            after which it is made without the late ones. A late member takes its result over, and
            its own change is part of its next averaging. None: all are waited for. Same on all.
        timeout: Longest wait for others, in seconds or as a timedelta; 60 s by default.
        mesh: Mesh (1, shards) of a member with a sharded model, "replicate" and "shard", over all
            ranks of this site, which are a job of their own. They join and leave together.
        relay: True if others cannot reach this member: it connects to the meeting place and relays
            alone (`thinwire host --relay`). Members with False reach each other directly.
        ca: File with the CA certificate of the relays, or their own, on all members; needed if they
            have --cert. Without it the connections to relays are not encrypted.
        streams: Connections to each other member for large messages, as in `prepare`.
        keep_batch: True if an engine keeps the microbatches of an update, over all members, as of
            the first round, rounded up by the factor `stats()["batch_share"]`; same on all.
        name: Name of this member on the host's page, beside its identity; by default the variable
            THINWIRE_NAME, which `thinwire up` sets. Up to 64 printable characters.

    Returns:
        The members, a context manager. If the run has begun, this process is a joiner until it
        enters `local_sgd(..., members=members)`.

    Raises:
        QuorumLost: Fewer than `min_members` came within the time-out; the error names them.
        ThinwireError: No host answers at the address, no relay answers, or the token differs.
        Mismatch: An argument differs from the other members', or a certificate does not verify.
        TypeError, ValueError: An argument is invalid.
    """
    require_linux("training with members", or_macos=True)
    token, known = None, None
    if address is None:
        address = os.environ.get("THINWIRE_ADDRESS")
        token_file = token_file or os.environ.get("THINWIRE_TOKEN_FILE")
        if text := os.environ.get(CODE_VARIABLE):
            code = read_code(text)
            address, run, relay = f"tcp://{code.address}", run or code.run, relay or code.relay
            token, known = code.token, known_certificate(code.fingerprint)
    if address is None or run is None:
        missing = "run" if address else "address"
        raise ValueError(
            f"{missing} is missing: give the one of `thinwire host`, or start this script with "
            "`thinwire join -- python ...`"
        )
    check.instance("run", run, str)
    check.integer("min_members", min_members, at_least=1)
    start_members = min_members if start_members is None else start_members
    check.integer("start_members", start_members, at_least=min_members)
    check.boolean("rejoin", rejoin)
    if grace_seconds is not None:
        grace_seconds = check.real("grace_seconds", grace_seconds, at_least=0)
        if mesh is not None:
            raise ValueError("grace_seconds is not for members that are sites: omit it, or mesh")
    timeout_s = seconds_of(timeout) or _TIMEOUT_S
    check.instance("address", address, str)
    host = parse_address("address", address, scheme=True)
    if token_file is not None:
        check.instance("token_file", token_file, (str, Path))
        token = read_token(token_file)
    check.instance("relay", relay, bool)
    name = os.environ.get("THINWIRE_NAME") if name is None else name
    if name is not None:
        check.instance("name", name, str)
        if shown_name(name) != name:
            raise ValueError(f"name={name!r}: only up to 64 printable characters are allowed")
    tls = known if ca is None else _authority(ca)
    limit = datetime.timedelta(seconds=timeout_s)
    site = SingleRank() if mesh is None else Site(mesh, timeout_s)
    reach = partial(connect, address, run, token, limit, known)
    kv = KeyValueView(reach(), timeout_s, reach)
    own_address = None if relay else kv.store.connection.own_address
    endpoint = RelayEndpoint(*host, relay_key(token), tls, own_address, timeout_s / 4)
    if relay and not relay_times(kv.call(lambda: kv.store.relays(endpoint)), timeout_s):
        require_relay(endpoint, timeout_s)
    streams = None if streams is None else check.integer("streams", streams, at_least=1)
    check.boolean("keep_batch", keep_batch)
    limits = endpoint, min_members, start_members, timeout_s
    terms = Terms(*limits, streams, keep_batch, name, grace_seconds)
    return Members(Member(kv, terms, site, rejoin=rejoin))


def _authority(ca: str | Path) -> ssl.SSLContext:
    check.instance("ca", ca, (str, Path))
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"ca={str(ca)!r} holds no certificate: {why}") from None
