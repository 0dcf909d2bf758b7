"""Checkpoints that survive a kill at any point and a change of ranks."""

from thinwire.checkpoint.combine import combine
from thinwire.checkpoint.export import Exported, export
from thinwire.checkpoint.files import on_all_ranks
from thinwire.checkpoint.loading import Loaded, load
from thinwire.checkpoint.random_state import random_state, set_random_state
from thinwire.checkpoint.saving import save
from thinwire.checkpoint.tensor_file import read_rank_file, write_rank_file

__all__ = [
    "Exported",
    "Loaded",
    "combine",
    "export",
    "load",
    "on_all_ranks",
    "random_state",
    "read_rank_file",
    "save",
    "set_random_state",
    "write_rank_file",
]
