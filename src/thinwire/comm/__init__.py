"""Communication with other ranks; the only package that calls `torch.distributed`."""

from thinwire.comm.ddp import BucketTap, tap_buckets
from thinwire.comm.failures import state_told
from thinwire.comm.group import Group, Pending, Regrouped, require_process_group, time_limit_s
from thinwire.comm.handshake import (
    busy,
    by_rank,
    mapping_of,
    require_agreement,
    while_busy,
    wrong_call_site,
)
from thinwire.comm.nodes import (
    Nodes,
    Replicas,
    Sites,
    Sources,
    node_size_of,
    require_mesh,
    sources_of,
)
from thinwire.comm.private import is_alone, next_identity, place_in
from thinwire.comm.proofs import ALL_RANKS, unproven
from thinwire.comm.waiting import long_waits_logged, one_deadline, own_deadlines, seconds_of

__all__ = [
    "ALL_RANKS",
    "BucketTap",
    "Group",
    "Nodes",
    "Pending",
    "Regrouped",
    "Replicas",
    "Sites",
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
    "place_in",
    "require_agreement",
    "require_mesh",
    "require_process_group",
    "seconds_of",
    "sources_of",
    "state_told",
    "tap_buckets",
    "time_limit_s",
    "unproven",
    "while_busy",
    "wrong_call_site",
]
