"""The seam to the ranks: the only package that imports `torch.distributed`."""

from thinwire.comm.ddp import BucketTap, tap_buckets
from thinwire.comm.group import Group, Pending
from thinwire.comm.handshake import require_agreement

__all__ = ["BucketTap", "Group", "Pending", "require_agreement", "tap_buckets"]
