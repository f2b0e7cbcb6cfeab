"""Atomic, resumable checkpoint directories.

Read `api`, `file_format` and `writer` first.
"""

from composable_shard.checkpoint.api import (
    CheckpointSave,
    LoadedCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from composable_shard.checkpoint.file_format import byte_view
from composable_shard.checkpoint.files import sync_path
from composable_shard.checkpoint.reader import CheckpointReader, find_checkpoint
from composable_shard.checkpoint.whole import (
    open_checkpoint,
    read_model,
    read_optimizers,
    tensors_of,
    verify,
    write_state,
)

__all__ = ["CheckpointSave", "LoadedCheckpoint"]
