"""Directories of safetensors files, as Hugging Face's libraries write them.

Read `load` and `save`; `files` knows the format.
"""

from composable_shard.huggingface.load import load_safetensors
from composable_shard.huggingface.save import save_safetensors

__all__ = ["load_safetensors", "save_safetensors"]
