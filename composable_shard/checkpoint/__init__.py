"""Atomic, resumable checkpoint directories.

Read `saving`, `loading` and `file_format` first.
"""

from composable_shard.checkpoint.background_save import CheckpointSave
from composable_shard.checkpoint.files import sync_path
from composable_shard.checkpoint.loading import LoadedCheckpoint, load_checkpoint
from composable_shard.checkpoint.peer_reader import PeerReader
from composable_shard.checkpoint.reader import (
    CheckpointReader,
    TensorReader,
    find_checkpoint,
    has_checkpoints,
)
from composable_shard.checkpoint.saving import save_checkpoint
from composable_shard.checkpoint.whole import (
    find_ties,
    open_checkpoint,
    read_model,
    read_objects,
    read_optimizers,
    tensors_of,
    verify,
    write_state,
)

__all__ = ["CheckpointSave", "LoadedCheckpoint"]
