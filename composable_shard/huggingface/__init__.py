"""Directories of safetensors files, as Hugging Face's libraries write them.

Read `api`; `files` knows the format, `conversion` other names.
"""

from composable_shard.huggingface.api import load_safetensors, save_pretrained, save_safetensors
from composable_shard.huggingface.conversion import Joined

__all__ = ["Joined", "load_safetensors", "save_pretrained", "save_safetensors"]
