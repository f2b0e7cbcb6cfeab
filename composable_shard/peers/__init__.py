"""Checkpoints of other libraries: what they have, under which names, and where it is.

Read `run`, `tensors` and `pickles` first; each format has a module of its own. No element of a
tensor is read here.
"""

from composable_shard.peers.companions import read_generators
from composable_shard.peers.formats import open_run
from composable_shard.peers.naming import OwnGroup, Rename, named_as, named_by_order
from composable_shard.peers.run import PeerRun, without_inert
from composable_shard.peers.tensors import PeerTensor, Span
from composable_shard.peers.universal_writing import write_universal
from composable_shard.peers.zips import locate_item
