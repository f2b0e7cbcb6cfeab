"""A mixture of experts over several ranks, and the same in one process.

Each rank holds some experts. Tokens travel to theirs and back by all-to-all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from composable_shard import fully_shard, set_gradient_divide_factor

__all__ = [
    "Experts",
    "MixtureLayer",
    "MixtureNet",
    "expert_mesh",
    "mixture_batch",
    "own_experts",
    "shard_mixture",
    "take_experts",
]

DIM, HIDDEN = 8, 16


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks of a group, and their gradients back."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.routes = sent, received, group  # type: ignore[attr-defined] # as autograd has it
        output = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group)
        return output

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[object, ...]:
        sent, received, group = ctx.routes  # type: ignore[attr-defined] # set in forward
        rows = grads[0].new_empty(sum(sent), grads[0].shape[1])
        dist.all_to_all_single(rows, grads[0].contiguous(), sent, received, group)
        return rows, None, None, None


class Experts(nn.Module):
    """Experts in two grouped parameters."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, DIM, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(num_experts, HIDDEN, DIM) / 4)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Run each expert on its rows, which lie one after another."""
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        if rows.dtype is torch.float64:  # for which there is no grouped product
            parts = zip(rows.split(counts.tolist()), up, down, strict=True)
            return torch.cat([torch.tanh(x @ first) @ second for x, first, second in parts])
        ends = counts.cumsum(0).to(torch.int32)
        hidden = torch.tanh(F.grouped_mm(rows, up, offs=ends))
        return F.grouped_mm(hidden, down, offs=ends)


class MixtureLayer(nn.Module):
    """A router and experts; `group` has the ranks that each hold some of them."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, num_experts)
        self.experts = Experts(num_experts)
        self.group: dist.ProcessGroup | None = None
        self.aux_loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).softmax(-1)
        weight, chosen = probabilities.max(-1)
        order = chosen.argsort(stable=True)
        num_experts = probabilities.shape[-1]
        counts = torch.bincount(chosen, minlength=num_experts)
        # Of the whole batch, as the sum over all choices: kept beside the output.
        self.aux_loss = (probabilities.mean(0) * counts / len(x)).sum() * num_experts
        rows = self._run(x[order], counts)
        output = torch.empty_like(rows).index_copy(0, order, rows)
        return x + output * weight[:, None]

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        if self.group is None:
            return self.experts(rows, counts)
        size = self.group.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(size, -1).sum(1).tolist()
        received = theirs.view(size, -1).sum(1).tolist()
        arrived = _Exchange.apply(rows, sent, received, self.group)
        # From "by rank, then by expert" to "by expert".
        experts = torch.arange(len(counts)) % (len(counts) // size)
        order = experts.repeat_interleave(theirs).argsort(stable=True)
        done = self.experts(arrived[order], theirs.view(size, -1).sum(0))
        back = torch.empty_like(done).index_copy(0, order, done)
        return _Exchange.apply(back, received, sent, self.group)


class MixtureNet(nn.Module):
    """Dense layers around a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.mixture = MixtureLayer()
        self.out = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mixture(torch.tanh(self.inp(x))))

    def loss(self, x: Tensor) -> Tensor:
        """Return a loss with the auxiliary one."""
        return self(x).square().mean() + 0.1 * self.mixture.aux_loss


def expert_mesh() -> DeviceMesh:
    """Return a mesh of four ranks: the experts of an axis "ep" are shared along "efsdp"."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))


def take_experts(model: MixtureNet, mesh: DeviceMesh, *, as_dtensors: bool = False) -> None:
    """Keep this rank's experts of a whole model, and let tokens travel."""
    layer, ranks = model.mixture, mesh["ep"]
    layer.group = ranks.get_group()
    for name, param in list(layer.experts.named_parameters()):
        whole = param.detach()
        split = (
            distribute_tensor(whole, ranks, [Shard(0)]) if as_dtensors else own_experts(whole, mesh)
        )
        setattr(layer.experts, name, nn.Parameter(split.clone()))


def own_experts(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's experts of a tensor with all of them."""
    return value.chunk(mesh["ep"].size())[mesh["ep"].get_local_rank()]


def shard_mixture(
    model: MixtureNet, mesh: DeviceMesh, *, as_dtensors: bool = False, **options: Any
) -> None:
    """Share this rank's experts along "efsdp", and the rest over all ranks."""
    take_experts(model, mesh, as_dtensors=as_dtensors)
    fully_shard(model.mixture.experts, mesh=mesh["efsdp"], **options)
    # Each expert's gradients are sums over the tokens of all ranks.
    set_gradient_divide_factor(model.mixture.experts, mesh.size())
    for module in (model.mixture, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (mesh.size(),)), **options)


def mixture_batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the batch of a rank in a step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn((6, DIM), generator=generator, dtype=dtype)
