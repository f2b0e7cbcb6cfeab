"""What is issued when, how much of it, and what is copied: exact counts."""

from __future__ import annotations

import itertools
from contextlib import suppress
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from composable_shard import (
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    get_handles,
    no_sync,
)
from composable_shard.comm.messages import exchange
from composable_shard.comm.order import GroupOrder
from composable_shard.comm.trace import CollectiveLog, Event, count_collectives, trace_events
from tests.common.step_counter import is_inside_collective
from tests.harness.ranks import distributed
from tests.programs.models import FailingMode, Net, rank_input

NUM_BLOCKS = 5


class EmbeddingStack(nn.Module):
    """Embedding, blocks and a head; the embedding makes the root's last gradient come last."""

    def __init__(self, dim: int = 33) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(dim, 19)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, 19)."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _make_embedding_stack(
    reshard_after_forward: bool | None = None, **options: Any
) -> EmbeddingStack:
    torch.manual_seed(0)
    model = EmbeddingStack()
    options["reshard_after_forward"] = reshard_after_forward
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _same_tokens() -> Tensor:
    return torch.arange(24).view(4, 6) % 19


def _backward_of_tokens(model: nn.Module) -> None:
    model(_same_tokens()).square().mean().backward()


def _counted_step(model: nn.Module) -> CollectiveLog:
    with count_collectives() as log:
        _backward_of_tokens(model)
    return log


@pytest.mark.parametrize(
    ("reshard_after_forward", "num_gathers"),
    [(None, 2 * NUM_BLOCKS + 1), (True, 2 * NUM_BLOCKS + 2), (False, NUM_BLOCKS + 1)],
)
@distributed(2)
def test_a_step_on_n_units_issues_exact_numbers_of_collectives(
    reshard_after_forward: bool | None, num_gathers: int
) -> None:
    """2N-1 gathers with the root kept, 2N without, N with all kept; N reductions always."""
    model = _make_embedding_stack(reshard_after_forward)
    _backward_of_tokens(model)  # the first call also compares the ranks
    for _ in range(2):
        log = _counted_step(model)
        assert log.count("all_gather") == num_gathers
        assert log.count("reduce_scatter") == NUM_BLOCKS + 1


@distributed(2, 3)
def test_the_payload_is_the_parameters_within_padding() -> None:
    """Each reduction and each gather carries its unit's parameters once, padding included."""
    model = _make_embedding_stack()
    nbytes = sum(param.numel() * 4 for param in model.parameters())
    padded = sum(handle.layout.padded_numel * 4 for handle in get_handles(model))
    num_units, world_size = NUM_BLOCKS + 1, torch.distributed.get_world_size()
    assert nbytes <= padded < nbytes + 16 * (num_units * world_size + 2 * num_units)
    root = get_handles(model)[0].layout.padded_numel * 4
    _backward_of_tokens(model)
    log = _counted_step(model)
    assert log.nbytes("reduce_scatter") == padded
    assert log.nbytes("all_gather") == 2 * padded - root


@distributed(2)
def test_the_use_of_parameters_costs_one_byte_each() -> None:
    """One all-reduce for the whole tree says which parameters no rank used."""
    model = _make_embedding_stack()
    _backward_of_tokens(model)
    log = _counted_step(model)
    assert log.count("all_reduce") == 1
    assert log.nbytes("all_reduce") == len(list(model.parameters()))


@distributed(2)
def test_a_forward_without_gradients_gathers_each_unit_once() -> None:
    """Nothing stays unsharded after it, the root included."""
    model = _make_embedding_stack()
    for _ in range(2):
        with torch.no_grad(), count_collectives() as log:
            model(_same_tokens())
    assert log.count("all_gather") == NUM_BLOCKS + 1
    assert not any(handle.full.has_values for handle in get_handles(model))


@distributed(2)
def test_no_sync_issues_no_reduction() -> None:
    """Inside no_sync only gathers are issued; the next backward reduces once."""
    model = _make_embedding_stack()
    _backward_of_tokens(model)
    with no_sync(model):
        log = _counted_step(model)
    assert log.count("reduce_scatter") == log.count("all_reduce") == 0
    assert _counted_step(model).count("reduce_scatter") == NUM_BLOCKS + 1


@distributed(2)
def test_clipping_takes_one_collective() -> None:
    """The norms of all gradients travel together."""
    model = _make_embedding_stack()
    _backward_of_tokens(model)
    with count_collectives() as log:
        clip_grad_norm_(model, 1.0)
    assert len(log.events) == 1


def _position(events: list[Event], kind: str, name: str, last: bool = False) -> int:
    found = [i for i, event in enumerate(events) if event[:2] == (kind, name)]
    return found[-1] if last else found[0]


@pytest.mark.fast
@distributed(2)
def test_forward_gathers_the_next_unit_before_the_current_one_computes() -> None:
    """From the second call on, the order of the first is known."""
    model = _make_embedding_stack()
    _backward_of_tokens(model)
    with torch.no_grad(), trace_events() as events:
        model(_same_tokens())
    names = ["EmbeddingStack", *(f"blocks.{i}" for i in range(NUM_BLOCKS))]
    for current, following in pairwise(names):
        assert _position(events, "issue_gather", following) < _position(events, "compute", current)


def test_sends_are_posted_before_receives() -> None:
    """Posted first, receives would wake the other rank for each (`communication even`)."""
    group = Mock()
    order = GroupOrder()
    order.enter(0)
    exchange([(1, torch.ones(2)), (2, torch.ones(2))], [(1, torch.ones(2))], group, order).wait()
    posted = [name for name, *_ in group.mock_calls if name in ("send", "recv")]
    assert posted == ["send", "send", "recv"]


@pytest.mark.parametrize(
    ("units_at_once", "batches"),
    [(0, [1] * NUM_BLOCKS), (1, [1] * NUM_BLOCKS), (2, [2, 2, 1]), (3, [3, 2]), (9, [NUM_BLOCKS])],
)
@distributed(2)
def test_small_units_are_gathered_several_at_a_time(units_at_once: int, batches: list[int]) -> None:
    """As many as fit into `prefetch_nbytes`, the next one at least, in forward and backward."""
    unit_nbytes = get_handles(_make_embedding_stack())[1].layout.padded_numel * 4
    model = _make_embedding_stack(prefetch_nbytes=units_at_once * unit_nbytes)
    for _ in range(2):
        _backward_of_tokens(model)
    with trace_events() as events:
        _backward_of_tokens(model)
    found = [0]
    for event in events:
        if event.kind.startswith("compute"):
            found.append(0)
        elif event.kind == "issue_gather" and event.name.startswith("blocks"):
            found[-1] += 1
    assert [number for number in found if number] == 2 * batches


class _SharedBetween(nn.Module):
    """Many small layers, each of which runs before and after a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 5)
        self.own = nn.ModuleList(nn.Linear(5, 5) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Return what has the input's shape, (batch, 5)."""
        for layer in self.own:
            x = torch.tanh(layer(self.shared(layer(x))))
        return x


@pytest.mark.parametrize("units_at_once", [0, 3, 99])
@distributed(2)
def test_what_is_on_its_way_stays_when_a_unit_that_runs_again_is_gathered(
    units_at_once: int,
) -> None:
    """One gather for each call, however many are gathered ahead."""
    model = _SharedBetween()
    nbytes = units_at_once * 4 * 30
    for layer in (model.shared, *model.own):
        fully_shard(layer, prefetch_nbytes=nbytes)
    fully_shard(model, prefetch_nbytes=nbytes)
    with torch.no_grad():
        model(torch.ones(2, 5))
        with count_collectives() as log:
            model(torch.ones(2, 5))
    assert log.count("all_gather") == 3 * NUM_BLOCKS


@distributed(2)
def test_the_next_unit_is_gathered_while_the_first_module_of_several_runs() -> None:
    """Its gather overlaps with all of them, and it is gathered once."""
    model = Net(6)
    for blocks in (model.blocks[:3], model.blocks[3:]):
        fully_shard(list(blocks), prefetch_nbytes=0)
    fully_shard(model, prefetch_nbytes=0)
    for _ in range(2):
        with trace_events() as log:
            model(rank_input(4, 5)).sum().backward()
    forward = [(event.kind, event.name) for event in log if event.kind == "compute"]
    assert forward == [("compute", name) for name in ("Net", *["blocks.0"] * 3, *["blocks.3"] * 3)]
    kinds = [event.kind for event in log if event.kind in ("compute", "all_gather")]
    # The root and the first unit, which is gathered ahead; the second one behind the first block.
    assert kinds[:9] == [*["all_gather"] * 2, "compute", "all_gather", *["compute"] * 5]


@distributed(2)
def test_what_was_gathered_ahead_in_vain_is_freed() -> None:
    """The order changes: a unit that is left out holds nothing after the forward, nor before."""
    model = _make_embedding_stack()
    with torch.no_grad():
        model(_same_tokens())
        blocks = list(model.blocks)
        model.blocks = nn.ModuleList([blocks[0], *blocks[2:]])
        torch.manual_seed(0)
        plain = EmbeddingStack()
        del plain.blocks[1]
        expected = plain(_same_tokens())
        left_out = get_handles(blocks[1])
        assert not any(handle.full.has_values for handle in left_out)
        for _ in range(2):
            assert torch.equal(model(_same_tokens()), expected)
            assert not any(handle.full.has_values for handle in (*get_handles(model), *left_out))


@distributed(2)
def test_ranks_that_would_gather_in_another_order_are_told() -> None:
    """`prefetch_nbytes` decides on the order of collectives, so it must agree."""
    model = _make_embedding_stack(prefetch_nbytes=torch.distributed.get_rank())
    with pytest.raises(RuntimeError, match="prefetch_nbytes=1"):
        _backward_of_tokens(model)


@pytest.mark.parametrize("nbytes", [-1, 2.0**20, True, None])
def test_a_wrong_number_of_bytes_is_refused(nbytes: object) -> None:
    """Before anything is changed."""
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="expected prefetch_nbytes to be a number of bytes, 0 or"):
        fully_shard(model, prefetch_nbytes=nbytes)  # type: ignore[arg-type]
    assert type(model.weight) is nn.Parameter


@distributed(2)
def test_backward_reduces_and_frees_a_unit_before_the_next_but_one_begins() -> None:
    """Unit k's reduction is issued and its parameters are freed before unit k-2 begins."""
    model = _make_embedding_stack()
    _backward_of_tokens(model)
    with trace_events() as events:
        _backward_of_tokens(model)
    for k in range(NUM_BLOCKS - 1, 1, -1):
        begin = _position(events, "compute_backward", f"blocks.{k - 2}")
        assert _position(events, "issue_reduce", f"blocks.{k}") < begin
        assert _position(events, "free", f"blocks.{k}", last=True) < begin


@pytest.mark.fast
@distributed(2)
def test_backward_gathers_the_next_unit_before_the_current_one_computes() -> None:
    """The reverse of the forward's order is expected, in the first backward already."""
    model = _make_embedding_stack()
    _backward_of_tokens(model)
    with trace_events() as events:
        _backward_of_tokens(model)
    for k in range(NUM_BLOCKS - 1, 0, -1):
        issued = _position(events, "issue_gather", f"blocks.{k - 1}", last=True)
        assert issued < _position(events, "compute_backward", f"blocks.{k}")


def _reductions_and_flags(model: nn.Module) -> list[str]:
    x = rank_input(4, 5)  # needs no gradient, so the first units to run end with the backward
    with trace_events() as events:
        model(x).sum().backward()
    names = {"all_reduce": "flags", "gradient_hooks": "hooks"}
    kinds = ("issue_reduce", *names)
    return [names.get(event.kind, event.name) for event in events if event.kind in kinds]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("unit end", "blocks.2 blocks.1 flags blocks.0 Net"),
        ("postponed", "blocks.2 blocks.1 flags blocks.0 Net"),
        # Known to all ranks beforehand, so that the rest may go before the flags.
        ("buckets", "flags blocks.1 blocks.1 Net flags"),
        ("agreed", "blocks.2 blocks.1 blocks.0 Net flags"),
        # Their own flags, and the hooks when the next unit's reduction was issued.
        ("hooks", "blocks.2 flags blocks.1 flags blocks.0 hooks Net"),
    ],
)
@distributed(2)
def test_each_order_of_reductions_has_its_place_for_flags(name: str, expected: str) -> None:
    """Where one rank sends flags all must: they are collectives, as the reductions are."""
    torch.manual_seed(0)
    model = Net(3)
    strategy = ShardingStrategy.SHARD_OPTIM if name == "agreed" else ShardingStrategy.FULL_SHARD
    cap = 600 / (1 << 20) if name == "buckets" else None
    for block in model.blocks[1:2] if name == "buckets" else model.blocks:
        fully_shard(block, strategy=strategy, bucket_cap_mb=cap)
    fully_shard(model, strategy=strategy)
    for param in model.blocks[1].parameters() if name == "hooks" else ():
        param.register_post_accumulate_grad_hook(lambda _: None)
    _reductions_and_flags(model)
    if name == "postponed":
        with no_sync(model):
            assert _reductions_and_flags(model) == []
    assert " ".join(_reductions_and_flags(model)) == expected


class _WrittenBytes(TorchDispatchMode):
    """Sum of the bytes of fresh or changed results, outside of the collectives layer."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and count what it wrote."""
        result = func(*args, **(kwargs or {}))
        if not is_inside_collective():
            returns = func._schema.returns
            results = result if isinstance(result, (tuple, list)) else [result]
            for spec, value in zip(returns, results, strict=False):
                is_view = spec.alias_info is not None and not spec.alias_info.is_write
                # Its schema does not say so.
                is_view = is_view or func is torch.ops.aten.unsafe_split_with_sizes.default
                is_empty = "empty" in func.__name__
                if isinstance(value, Tensor) and not is_view and not is_empty:
                    self.nbytes += value.numel() * value.element_size()
        return result


def _written_bytes(model: nn.Module) -> int:
    with _WrittenBytes() as mode:
        _backward_of_tokens(model)
    return mode.nbytes


@pytest.mark.counts
@distributed(2)
def test_a_step_copies_each_gradient_once_and_nothing_else() -> None:
    """Bytes written outside collectives and model compute: one time the parameters."""
    model = _make_embedding_stack()
    torch.manual_seed(0)
    plain = EmbeddingStack()
    _backward_of_tokens(model)
    _backward_of_tokens(plain)
    for module in (model, plain):
        module.zero_grad()
    copied = _written_bytes(model) - _written_bytes(plain)
    assert copied <= sum(param.numel() * 4 for param in model.parameters()) + 64


@pytest.mark.counts
@distributed(2)
def test_a_forward_that_fails_in_any_operation_leaves_nothing_gathered() -> None:
    """Neither of the unit whose gather failed, nor of those ahead."""
    model = _make_embedding_stack(reshard_after_forward=True)
    for k in itertools.count(1, 3):
        _backward_of_tokens(model)
        mode = FailingMode(k)
        with suppress(torch.OutOfMemoryError), mode:
            model(_same_tokens())
        if mode.calls < k:
            break
        assert not any(handle.full.has_values for handle in get_handles(model)), k
    assert k > 20
