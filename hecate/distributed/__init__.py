"""Training over several processes: the world that a process is one rank of, and models laid over it.

Importing it loads nothing of torch.distributed: that waits for a world of more than one.
"""

from hecate.distributed.shard import adapt, copied, gathered, is_sharded, overwrite, shard, spread
from hecate.distributed.world import AXES, ParallelConfig, World, each_of, start

__all__ = [
    "AXES", "ParallelConfig", "World", "adapt", "copied", "each_of", "gathered", "is_sharded", "overwrite", "shard",
    "spread", "start",
]  # fmt: skip
