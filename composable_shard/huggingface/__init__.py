"""Directories of safetensors files, as Hugging Face's libraries write them, and their Trainer.

Read `loading_tensors`; `files` knows the format and the names there.
"""

from composable_shard.huggingface.files import Joined, TensorWriter, parse_nbytes
from composable_shard.huggingface.loading_tensors import load_safetensors
from composable_shard.huggingface.merging import iter_merged_params
from composable_shard.huggingface.saving_tensors import save_pretrained, save_safetensors
from composable_shard.huggingface.training import TrainerMixin, keep_unwrapped

__all__ = ["Joined", "TrainerMixin", "iter_merged_params", "keep_unwrapped", "save_pretrained"]
