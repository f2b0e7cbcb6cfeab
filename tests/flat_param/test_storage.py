"""Storages come and go under tensors that stay; parameters change places and stay themselves."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard.flat_param.entries import dense_stride
from composable_shard.flat_param.slots import ModuleItems, find_slots
from composable_shard.flat_param.storage import alloc_storage, free_storage
from composable_shard.flat_param.swapping import swap_parameter
from tests.harness.memory import peak_bytes

pytestmark = pytest.mark.fast

# --- storages ---


def test_freed_storage_comes_back_under_the_same_tensor_and_views() -> None:
    """Views that modules and graphs hold see what is written after the storage is back."""
    tensor = torch.zeros(6)
    view = tensor[2:4]
    free_storage(tensor)
    assert tensor.untyped_storage().size() == view.untyped_storage().size() == 0
    alloc_storage(tensor)
    tensor.fill_(5)
    assert view.tolist() == [5, 5]


def test_allocating_twice_keeps_the_content() -> None:
    """A second call touches nothing, and neither does a second free."""
    tensor = torch.arange(4.0)
    pointer = tensor.data_ptr()
    alloc_storage(tensor)
    assert tensor.data_ptr() == pointer
    assert tensor.tolist() == [0, 1, 2, 3]
    free_storage(tensor)
    free_storage(tensor)
    assert tensor.untyped_storage().size() == 0


def test_bytes_are_given_back() -> None:
    """What is freed is free, not cached."""
    with peak_bytes() as memory:
        tensor = torch.empty(1000, dtype=torch.float64)
        free_storage(tensor)
    assert (memory.peak, memory.current) == (8000, 0)


# --- strides ---


def _channels_last() -> Tensor:
    return torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(()), ()),
        (torch.empty(0), (1,)),
        (torch.empty(3, 0, 2), (2, 2, 1)),
        (torch.empty(7, 15), (15, 1)),
        (torch.empty(7, 15).t(), (1, 15)),
        (torch.empty(2, 3, 4).permute(2, 0, 1), (1, 12, 4)),
        (_channels_last(), (60, 1, 15, 3)),
    ],
    ids=["0-d", "empty", "empty 3-d", "rows", "transposed", "permuted", "channels last"],
)
def test_dense_layouts_are_kept(tensor: Tensor, expected: tuple[int, ...]) -> None:
    """A tensor that fills its range in any order of dims keeps that order."""
    assert dense_stride(tensor) == expected
    assert sorted(dense_stride(tensor)) == sorted(tensor.stride())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(1, 4).expand(3, 4),
        torch.empty(1).expand(3, 4),
        torch.empty(6, 8)[::2],
        torch.empty(6, 8)[:, :4],
        torch.empty(6, 8)[:, ::2].t(),
        torch.empty(4).as_strided((3, 2), (1, 1)),
    ],
    ids=["expanded", "expanded scalar", "every other row", "columns", "transposed", "overlapping"],
)
def test_other_layouts_become_row_major(tensor: Tensor) -> None:
    """Elements that overlap or leave gaps are laid out anew."""
    assert dense_stride(tensor) == torch.empty(tensor.shape).stride()
    assert dense_stride(tensor) != tensor.stride()


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((1, 4), (77, 1)),
        ((4, 1), (1, 99)),
        ((1,), (5,)),
        ((1, 1, 1), (9, 2, 7)),
        ((2, 1, 3), (1, 50, 2)),
        ((3, 1, 2, 1), (2, 1, 1, 1)),
    ],
)
def test_strides_of_dims_of_size_one_are_canonical(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    """They address nothing, and must not make specs of different ranks differ."""
    tensor = torch.empty(100).as_strided(shape, stride)
    found = dense_stride(tensor)
    assert found == dense_stride(torch.empty_strided(shape, found))
    moved = torch.arange(100.0).as_strided(shape, stride)
    flat = torch.empty(moved.numel())
    flat.as_strided(shape, found).copy_(moved)
    assert flat.tolist() == sorted(moved.flatten().tolist())


def test_stride_of_size_one_dims_does_not_depend_on_how_they_came_about() -> None:
    """The same layout with other meaningless strides gives the same answer."""
    canonical = dense_stride(torch.empty(3, 1, 4))
    assert {
        dense_stride(torch.empty(99).as_strided((3, 1, 4), (4, stride, 1)))
        for stride in (1, 3, 4, 12, 60)
    } == {canonical}


# --- swaps ---


class _Tagged(nn.Parameter):
    pass


def test_swap_exchanges_data_class_and_attributes() -> None:
    """The object stays; all that it is becomes the other's."""
    first, second = nn.Parameter(torch.zeros(2)), _Tagged(torch.ones(3))
    first.note, second.tag = "first", "second"  # type: ignore[attr-defined]
    swap_parameter(first, second)
    assert (type(first), first.tolist(), first.__dict__) == (_Tagged, [1] * 3, {"tag": "second"})
    assert (type(second), second.tolist(), second.__dict__) == (
        nn.Parameter,
        [0] * 2,
        {"note": "first"},
    )


def test_swap_works_where_weak_references_exist() -> None:
    """RNNs refer to their weights weakly; torch's own swap refuses those."""
    original = nn.Parameter(torch.zeros(2))
    reference = weakref.ref(original)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(original, nn.Parameter(torch.ones(3)))
    swap_parameter(original, nn.Parameter(torch.ones(3)))
    assert reference() is original
    assert original.tolist() == [1, 1, 1]


# --- slots ---


class _Strict(nn.Module):
    """Checks what is assigned, and mirrors it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Tensor):
            object.__setattr__(self, f"mirror_{name}", value)


def test_plain_module_keeps_a_parameter_in_one_place() -> None:
    """The slot is the module's own dict, which costs no attribute look-up."""
    module = nn.Linear(2, 3)
    assert [slot[:2] for slot in find_slots(ModuleItems(module), "weight")] == [
        (module._parameters, "weight")
    ]
    ((container, key, _),) = find_slots(ModuleItems(module), "bias")
    replacement = nn.Parameter(torch.ones(3))
    container[key] = replacement
    assert module.bias is replacement


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnn_keeps_a_parameter_in_two_places(kind: type[nn.RNNBase]) -> None:
    """Writing all slots changes what forward reads, also after the RNN made a new list."""
    module = kind(2, 3, num_layers=2)
    slots = find_slots(ModuleItems(module), "weight_hh_l1")
    assert len(slots) == 2
    module.to(torch.float64)
    replacement = nn.Parameter(torch.ones_like(module.weight_hh_l1))
    for container, key, _ in slots:
        container[key] = replacement
    position = module._flat_weights_names.index("weight_hh_l1")
    assert module.weight_hh_l1 is replacement
    assert module._flat_weights[position] is replacement


def test_a_parameter_that_a_subclass_adds_to_an_rnn_is_in_one_place() -> None:
    """Torch's forward does not read it."""
    module = nn.LSTM(2, 3)
    module.scale = nn.Parameter(torch.ones(2))
    ((container, key, _),) = find_slots(ModuleItems(module), "scale")
    container[key] = replacement = nn.Parameter(torch.ones(2))
    assert module.scale is replacement


def test_module_with_its_own_setattr_is_asked() -> None:
    """Its `__setattr__` sees every change of registration."""
    module = _Strict()
    ((container, key, _),) = find_slots(ModuleItems(module), "weight")
    replacement = nn.Parameter(torch.ones(2))
    container[key] = replacement
    assert container[key] is module.weight is replacement
    assert module.mirror_weight is replacement


@pytest.mark.parametrize("module", [_Strict(), nn.LSTM(2, 3)], ids=["setattr", "rnn"])
def test_slots_hold_their_module_weakly(module: nn.Module) -> None:
    """A handle holds slots, and a module's hooks hold the handle: no cycle."""
    module = copy.deepcopy(module)
    name = next(iter(module._parameters))
    container, key, _ = find_slots(ModuleItems(module), name)[-1]
    del module
    with pytest.raises(RuntimeError, match="the module that shows this parameter was deleted"):
        container[key]


@pytest.mark.parametrize("is_module_first", [True, False])
@pytest.mark.parametrize("kind", ["setattr", "rnn", "plain"])
def test_copied_slots_belong_to_the_copied_module(kind: str, is_module_first: bool) -> None:
    """A copy of module and slots is independent of the original, in whatever order it is made."""
    module: nn.Module = {"setattr": _Strict, "rnn": nn.LSTM, "plain": nn.Linear}[kind](
        *([] if kind == "setattr" else [2, 3])
    )
    name = next(iter(module._parameters))
    pair = (module, find_slots(ModuleItems(module), name))[:: 1 if is_module_first else -1]
    twin, slots = copy.deepcopy(pair)[:: 1 if is_module_first else -1]
    replacement = nn.Parameter(torch.ones(1))
    for container, key, _ in slots:
        container[key] = replacement
    assert all(container[key] is replacement for container, key, _ in slots)
    assert getattr(twin, name) is replacement
    assert all(
        container[key] is not replacement
        for container, key, _ in find_slots(ModuleItems(module), name)
    )
