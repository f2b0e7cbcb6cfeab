"""Directories of safetensors files, as Hugging Face's libraries write them, and their Trainer.

Read `api`; `files` knows the format and the names there.
"""

from composable_shard.huggingface.api import (
    TrainerMixin,
    keep_unwrapped,
    load_safetensors,
    save_pretrained,
    save_safetensors,
)
from composable_shard.huggingface.files import Joined, TensorFiles, TensorWriter, parse_nbytes

__all__ = ["Joined", "TrainerMixin", "keep_unwrapped", "save_pretrained"]
