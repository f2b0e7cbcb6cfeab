"""On one CUDA GPU: parity, waits, memory, overlap, CUDA graphs. Skipped where there is none.

Over NCCL of this process alone, and over torch's `fake` group of eight ranks, whose all-gather
copies this rank's shard once for each rank: what is computed there makes no sense, but is the same
each time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp

from composable_shard import (
    FlatShard,
    MixedPrecisionPolicy,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)
from composable_shard.checkpoint import CheckpointSave
from tests.common.gpu_steps import capture, overlap, trace
from tests.harness.fake_group import fake_group

pytestmark = pytest.mark.gpu

STRATEGIES = list(ShardingStrategy)
GROUPS = ["fake", "nccl"]
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class _AlignedNet(nn.Module):
    """Residual blocks; every parameter takes a multiple of 256 bytes, so that kernels are the same.

    Matrix products on an address that is a multiple of less may be rounded differently.
    """

    def __init__(self, num_blocks: int = 4, dim: int = 128) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(num_blocks)
        )
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


@contextmanager
def _group(kind: str, tmp_path: Any) -> Iterator[None]:
    torch.cuda.set_device(0)
    if kind == "fake":
        with fake_group(8):
            yield
        return
    store, device = dist.FileStore(str(tmp_path / "store"), 1), torch.device("cuda", 0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(params=GROUPS)
def group(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[str]:
    """A process group, by name."""
    with _group(request.param, tmp_path):
        yield request.param


@pytest.fixture
def nccl(tmp_path: Any) -> Iterator[None]:
    """NCCL of one rank."""
    with _group("nccl", tmp_path):
        yield


@pytest.fixture
def eight_ranks(tmp_path: Any) -> Iterator[None]:
    """The fake group."""
    with _group("fake", tmp_path):
        yield


def _make_on_gpu(dim: int = 128, num_blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return _AlignedNet(num_blocks, dim).cuda()


def _with_sharded_blocks(model: nn.Module, shard: Any = fully_shard, **options: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        shard(block, **options)
    shard(model, **options)
    return model


class _Trainer:
    """Steps on one batch; the loss stays on the device."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, **options)
        torch.manual_seed(1)
        self.x = torch.randn(64, 128, device="cuda")

    def step(self) -> Tensor:
        loss = self.model(self.x).square().mean()
        loss.backward()
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _losses(trainer: _Trainer, num_steps: int = 6) -> list[float]:
    return torch.stack([trainer.step() for _ in range(num_steps)]).tolist()


# Parity


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_equals_the_bare_model_and_fsdp2(strategy: ShardingStrategy) -> None:
    """On one rank, bitwise: losses and parameters."""
    bare, fsdp2, ours = (
        _make_on_gpu(),
        _with_sharded_blocks(_make_on_gpu(), fsdp.fully_shard),
        _with_sharded_blocks(_make_on_gpu(), strategy=strategy),
    )
    expected = _losses(_Trainer(bare))
    assert _losses(_Trainer(ours)) == expected
    assert _losses(_Trainer(fsdp2)) == expected
    for (name, param), original in zip(ours.named_parameters(), bare.parameters(), strict=True):
        assert isinstance(param, FlatShard)
        assert torch.equal(param.full_tensor(), original), name


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BFLOAT16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_streams_change_no_bit(
    strategy: ShardingStrategy,
    policy: MixedPrecisionPolicy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against everything on one stream."""
    options = {"strategy": strategy, "mp_policy": policy}
    beside = _losses(_Trainer(_with_sharded_blocks(_make_on_gpu(), **options)), 20)
    monkeypatch.setattr("composable_shard.runtime.unit.make_streams", lambda _: None)
    assert beside == _losses(_Trainer(_with_sharded_blocks(_make_on_gpu(), **options)), 20)


# Waits of the host, and memory


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_host_waits_for_nothing(group: str, strategy: ShardingStrategy) -> None:
    """In the second to fourth step."""
    trainer = _Trainer(_with_sharded_blocks(_make_on_gpu(), strategy=strategy))
    trainer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _allocator() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    names = ("reserved_bytes.all.current", "segment.all.current", "num_alloc_retries")
    return {name: stats[name] for name in names}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_allocator_grows_no_more(group: str, strategy: ShardingStrategy) -> None:
    """After the second step, and every step has the same peak."""
    trainer = _Trainer(_with_sharded_blocks(_make_on_gpu(512), strategy=strategy))
    trainer.x = torch.randn(64, 512, device="cuda")
    trainer.step()
    trainer.step()
    before, peaks = _allocator(), []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        trainer.step()
        peaks.append(torch.cuda.max_memory_allocated())
    assert _allocator() == before
    assert len(set(peaks)) == 1


# Beside compute


@pytest.mark.usefixtures("eight_ranks")
def test_side_streams_run_beside_compute() -> None:
    """More than half of the time of gathers and reductions, on units that take long enough."""
    trainer = _Trainer(_with_sharded_blocks(_make_on_gpu(2048)))
    trainer.x = torch.randn(8192, 2048, device="cuda")
    for _ in range(3):
        trainer.step()
    spans = trace(trainer.step)
    assert len({stream for stream, *_ in spans}) >= 3
    assert overlap(spans) > 0.5


# CUDA graphs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_graph_of_a_step_computes_what_steps_compute(
    group: str, strategy: ShardingStrategy
) -> None:
    """Forward, backward, clipping and AdamW captured once; replays go on where warm-up ended."""
    model = _with_sharded_blocks(_make_on_gpu(), strategy=strategy)
    eager = _losses(
        _Trainer(_with_sharded_blocks(_make_on_gpu(), strategy=strategy), capturable=True), 8
    )
    trainer = _Trainer(model, capturable=True)
    replay = capture(trainer.step)  # after three steps, which capturing does not add to
    replayed = [replay().item() for _ in range(4)]
    assert replayed == eager[3:7]
    # What was captured left the units ready for steps of the usual kind.
    assert trainer.step().item() == eager[7]


@pytest.mark.usefixtures("nccl")
def test_a_background_save_comes_before_what_is_issued_next(tmp_path: Path) -> None:
    """Before a replayed graph, which no call of the library can see; both times into one memory."""
    trainer = _Trainer(_with_sharded_blocks(_make_on_gpu()), capturable=True)
    replay = capture(trainer.step)
    for step in (1, 2):
        params = [*trainer.model.parameters()]
        states = [each for x in params for each in trainer.optimizer.state[x].values()]
        tensors = [x._local if isinstance(x, FlatShard) else x for x in [*params, *states]]
        expected = [each.detach().clone() for each in tensors]
        save = save_checkpoint(tmp_path, trainer.model, trainer.optimizer, step=step, async_op=True)
        replay()
        assert isinstance(save, CheckpointSave)
        save.wait()
        other = _Trainer(_with_sharded_blocks(_make_on_gpu()), capturable=True)
        load_checkpoint(tmp_path, other.model, other.optimizer)
        params = [*other.model.parameters()]
        states = [each for x in params for each in other.optimizer.state[x].values()]
        for found, wanted in zip([*params, *states], expected, strict=True):
            local = found._local if isinstance(found, FlatShard) else found
            assert torch.equal(local, wanted)


@pytest.mark.usefixtures("eight_ranks")
def test_a_copy_of_a_model_has_streams_too() -> None:
    """And trains like it."""
    model = _with_sharded_blocks(_make_on_gpu())
    other = copy.deepcopy(model)
    assert _losses(_Trainer(other)) == _losses(_Trainer(model))
