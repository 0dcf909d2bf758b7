"""Communication with other ranks; the only package that calls `torch.distributed`."""

from thinwire.comm.ddp import tap_buckets
from thinwire.comm.group import (
    Group,
    Pending,
    Regrouped,
    require_process_group,
    sealed,
    time_limit_s,
)
from thinwire.comm.handshake import (
    by_rank,
    mapping_of,
    require_agreement,
    while_busy,
    wrong_call_site,
)
from thinwire.comm.macs import ALL_RANKS, wrong_mac_text
from thinwire.comm.nodes import Sources, node_size_of, require_mesh, sites_of, sources_of
from thinwire.comm.private import is_alone, next_identity, rank_and_size_in
from thinwire.comm.waiting import (
    busy,
    long_waits_logged,
    one_deadline,
    own_deadlines,
    seconds_of,
    state_in_errors,
)

__all__ = [
    "ALL_RANKS",
    "Group",
    "Pending",
    "Regrouped",
    "Sources",
    "busy",
    "by_rank",
    "is_alone",
    "long_waits_logged",
    "mapping_of",
    "next_identity",
    "node_size_of",
    "one_deadline",
    "own_deadlines",
    "rank_and_size_in",
    "require_agreement",
    "require_mesh",
    "require_process_group",
    "sealed",
    "seconds_of",
    "sites_of",
    "sources_of",
    "state_in_errors",
    "tap_buckets",
    "time_limit_s",
    "while_busy",
    "wrong_call_site",
    "wrong_mac_text",
]
