"""Context parallelism with torch's ring attention: each rank has a part of the sequences.

Torch's `context_parallel` knows the attention kernels of CUDA alone. Here its ring (which chunks a
rank computes, what it sends, how results are merged) calls the kernel of the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from composable_shard import clip_grad_norm_, fully_shard, set_gradient_divide_factor
from tests.harness.ranks import distributed
from tests.programs.models import seeded

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
WORDS, DIM, HEADS, LENGTH, BATCH = 32, 16, 2, 16, 4


class _RingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM)
        self.out, self.mlp = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x).tanh()


class _RingDecoder(nn.Module):
    is_checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(_RingBlock() for _ in range(2))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        x = self.words(words) + self.places(places)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


def _call_on_cpu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call torch's ring with the kernel of the CPU."""
    like = next(arg._spec for arg in args if isinstance(arg, DTensor))
    group = like.mesh.get_group()
    local = [arg.to_local() if isinstance(arg, DTensor) else arg for arg in args]
    wrap: Any = DTensor._op_dispatcher.wrap
    if op is FORWARD:
        query, key, value, dropout, is_causal, *_ = [*local, *(0.0, False)[len(local) - 3 :]]
        found = ring._templated_ring_attention(
            group, 2, op, query, key, value, is_causal=is_causal, dropout_p=dropout
        )
        shape = like.shape[:3]
        meta = TensorMeta(shape, (shape[1] * shape[2], shape[2], 1), torch.float32)
        return wrap(found, (like, DTensorSpec(like.mesh, like.placements, meta)))
    names = ("query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
    grads = ring._templated_ring_attention_backward(
        group, 2, op, local[0], "grad_out", **dict(zip(names, local[1:], strict=True))
    )
    return wrap(grads, (like, like, like))


@contextmanager
def _ring_of_the_cpu() -> Iterator[Counter[Any]]:
    """Let torch's ring serve the CPU's kernel; count its calls."""
    calls: Counter[Any] = Counter()

    def handle(op: Any, args: Any, kwargs: Any) -> Any:
        calls[op] += 1
        return _call_on_cpu(op, args, kwargs)

    known = dict(ring.custom_ops)
    ring.custom_ops.update({FORWARD: handle, BACKWARD: handle})
    try:
        yield calls
    finally:
        ring.custom_ops.clear()
        ring.custom_ops.update(known)


def _ring_mesh() -> DeviceMesh:
    sizes = (dist.get_world_size() // 2, 2)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp"))


def _ring_batch(step: int, num_masked: int = 0) -> tuple[Tensor, Tensor]:
    """Return the sequences of all ranks, and the next word of each place; the first are masked."""
    draw = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=draw)
    labels = words[:, 1:].clone()
    labels[0, :num_masked] = -100
    return words[:, :-1].contiguous(), labels


def _ring_loss(model: nn.Module, words: Tensor, labels: Tensor, places: Tensor) -> Tensor:
    logits = model(words, places).flatten(0, 1)
    return functional.cross_entropy(logits, labels.flatten(), reduction="sum")


def _shard_decoder(model: Any, name: str, mesh: DeviceMesh, **options: Any) -> None:
    """Shard over all ranks, or in copies: one for each rank of "dp"."""
    chosen = {"over all": {}, "in copies": {"mesh": mesh}}[name]
    for block in model.blocks:
        fully_shard(block, **chosen, **options)
    fully_shard(model, **chosen, **options)


def _ring_backward(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh) -> float:
    """Run forward and backward on this rank's part of its sequences; return the mean loss."""
    rows, num_words = BATCH // mesh["dp"].size(), (batch[1] >= 0).sum()
    first = rows * mesh["dp"].get_local_rank()
    words, labels = (part[first : first + rows].clone() for part in batch)
    buffers = [words, labels, torch.arange(LENGTH)]
    with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 0]):
        assert words.shape == (rows, LENGTH // 2)
        loss = _ring_loss(model, *buffers) / num_words
        loss.backward()
    found = loss.detach().clone()
    dist.all_reduce(found)
    return found.item()


@pytest.mark.parametrize("shards", ["over all", "in copies"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optim"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
@distributed(2, 4)
def test_ring_attention_trains_as_one_process_does(
    shards: str, strategy: str, is_checkpointed: bool
) -> None:
    """Losses, the norm of the gradients and the weights of three steps on whole sequences."""
    mesh = _ring_mesh()
    plain, model = seeded(_RingDecoder), seeded(_RingDecoder)
    model.is_checkpointed = is_checkpointed
    _shard_decoder(model, shards, mesh, strategy=strategy)
    set_gradient_divide_factor(model, 1.0)  # a loss is divided by the words of all ranks
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.05, eps=1e-3) for each in (plain, model)
    ]
    with _ring_of_the_cpu() as calls:
        for step in range(3):
            words, labels = batch = _ring_batch(step, num_masked=5 * step)
            expected = _ring_loss(plain, words, labels, torch.arange(LENGTH)) / (labels >= 0).sum()
            expected.backward()
            norms = [torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)]
            assert _ring_backward(model, batch, mesh) == pytest.approx(expected.item(), abs=1e-5)
            norms.append(clip_grad_norm_(model, 0.5))
            torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=1e-5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
                found = param.detach().full_tensor()
                torch.testing.assert_close(found, whole.detach(), rtol=0, atol=1e-5)
    num_layers = 2 * 3
    assert calls == {FORWARD: num_layers * (1 + is_checkpointed), BACKWARD: num_layers}
