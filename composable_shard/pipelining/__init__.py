"""Sharded modules as stages of `torch.distributed.pipelining`, whose import takes two seconds.

So `composable_shard` does not import this package: `from composable_shard.pipelining import ...`.
"""

from composable_shard.pipelining.stage import PipelineStage

__all__ = ["PipelineStage"]
