"""How a member finds the host of its run, and compares its set-up with that of the run."""

import json
import math
import ssl
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import DistError

from thinwire._version import __version__
from thinwire._watchdog import Late, within
from thinwire.errors import Mismatch, PayloadCorrupt, PeerLost, PeerStalled
from thinwire.members.client import HostStore
from thinwire.members.credentials import (
    Address,
    Signer,
    host_secret,
    parse_address,
    run_secret,
)
from thinwire.members.host import GREETING_KEY, MEETING_VERSION, require_run_name
from thinwire.members.kv import AuthenticatedStore, KeyValueView

_SHORTEST_S = 0.1


def connect(
    address: str,
    run: str,
    token: bytes | None,
    timeout: timedelta,
    tls: ssl.SSLContext | None = None,
    *,
    at_most_s: float = math.inf,
) -> AuthenticatedStore:
    """Return the store of a run, after the host has shown that it knows the token."""
    require_run_name(run)
    host = parse_address("address", address, scheme=True)
    limit_s = min(timeout.total_seconds(), at_most_s)
    begun = time.monotonic()
    where = f"tcp://{host}"
    store = HostStore(host, timeout, limit_s, tls)
    try:
        left_s = max(limit_s - (time.monotonic() - begun), _SHORTEST_S)
        session = within(
            left_s, lambda: _checked_session(store, token, host), name="thinwire-meeting"
        )
    except Late:
        store.close()
        raise PeerStalled(
            f"{where} accepted the connection but did not answer within {limit_s:g} s: it is "
            "stopped, cut off, or no meeting place of thinwire"
        ) from None
    except DistError as error:
        raise PeerLost(
            f"{where} closed the connection: {error}. Has `thinwire host` ended, or is it no "
            "meeting place of this release of thinwire?"
        ) from None
    secret = run_secret(token, run, session)
    return AuthenticatedStore(store, secret, f"run/{run}/", session)


def require_same(kv: KeyValueView, occasion: str, facts: Mapping[str, Any]) -> None:
    """Compare facts (JSON values) with those of the run; the first member sets them."""
    own: dict[str, Any] = json.loads(json.dumps(facts))
    theirs = kv.put_if_absent(f"{occasion}/facts", own)
    for name in [*own, *theirs]:
        own_value = own.get(name, "nothing")
        run_value = theirs.get(name, "nothing")
        if own_value != run_value:
            raise Mismatch(
                f"this member does not fit the run: {name} is {own_value} here and {run_value} "
                "there. Start it as the others were started, or as another run"
            )


def _checked_session(store: HostStore, token: bytes | None, host: Address) -> str:
    """Return the session of a host with the same token and version."""
    _, plain = store.ask("look", "0", "0", GREETING_KEY)
    try:
        found = Signer(host_secret(token)).verify(GREETING_KEY, plain or b"")
        reported = json.loads(found)
        version = reported["meeting"]
        release = reported["thinwire"]
        session = reported["session"]
    except PayloadCorrupt:
        other = "no token" if (plain or b"").startswith(b"{") else "another token"
        raise Mismatch(
            f"the host at tcp://{host} has {other}: use the same token file on all machines "
            "and for `thinwire host --token-file`"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise Mismatch(
            f"the host at tcp://{host} has a token, and this member has none: pass a copy of "
            "the host's token file as token_file="
        ) from None
    if version != MEETING_VERSION or not isinstance(session, str):
        raise Mismatch(
            f"the host at tcp://{host} has thinwire {release} (protocol {version}), and this "
            f"member {__version__} (protocol {MEETING_VERSION}): install the same release on all "
            "machines"
        )
    return session
