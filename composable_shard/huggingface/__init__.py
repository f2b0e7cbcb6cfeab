"""Directories of safetensors files, as Hugging Face's libraries write them.

Read `api`; `files` knows the format.
"""

from composable_shard.huggingface.api import load_safetensors, save_safetensors

__all__ = ["load_safetensors", "save_safetensors"]
