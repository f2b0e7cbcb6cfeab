"""`PipelineStage`: torch's, for a module with sharded units.

[Note: Pipelines]
A schedule of torch runs several microbatches through a stage and then calls `perform_reduce_grad`
once. Torch's stages recognise torch's data-parallel modules by their class, and make them reduce
nothing before. Sharded modules have no such class, so this stage does it: backwards before the last
one leave gradients unsharded and keep the full parameters for the next microbatch; the last one
reduces everything while it runs. Schedules that run the backward in two parts ask autograd for
gradients of `module.parameters()`, which must be the graph's parameters: such a stage is unsharded
from its first part to the end of the step, and its gradients are reduced there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed import pipelining

from composable_shard.module_api import reduce_pending_gradients, reshard, unshard
from composable_shard.runtime import get_states


class PipelineStage(pipelining.PipelineStage):
    """A stage for all schedules of `torch.distributed.pipelining`, whose arguments it takes.

    Each unit of its module is reduced once a step. With `reshard_after_forward=False` it is
    gathered once, too; otherwise once for each forward, unless it is kept, and once for the first
    backward. A module without units is treated as in torch's stage.

    Under `no_sync` and the like, gradients wait for a reduction after a step too. Pass
    `scale_grads=False` to the schedule then, which scales `.grad`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_reduced = False  # whether the last backward has reduced the gradients

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run the backward of one microbatch; reduce gradients if it is the last and whole one."""
        is_whole = backward_type == "full"
        if not is_whole and get_states(self.submod):
            unshard(self.submod, recurse=True)
        self._is_reduced = last_backward and is_whole
        with _further_microbatches(self.submod, not self._is_reduced):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Free the full parameters; reduce gradients unless the last backward has."""
        states = get_states(self.submod)
        if states:
            reshard(self.submod, recurse=True)
            if not self._is_reduced and all(state.settings.reduces_fully for state in states):
                reduce_pending_gradients(self.submod)
        super().perform_reduce_grad(grad_scale_factor)


@contextmanager
def _further_microbatches(module: nn.Module, are_there: bool) -> Iterator[None]:
    """If further microbatches come, make backwards reduce nothing and keep full parameters."""
    if not are_there:
        yield
        return
    states = get_states(module)
    before = [state.settings for state in states]
    for state in states:
        state.change(requires_gradient_sync=False, reshard_after_backward=False)
    try:
        yield
    finally:
        for state, old in zip(states, before, strict=True):
            state.change(
                requires_gradient_sync=old.requires_gradient_sync,
                reshard_after_backward=old.reshard_after_backward,
            )
