"""Trainable parameters that no unit manages: an error, wherever the whole model can be seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from composable_shard import (
    FlatShard,
    clip_grad_norm_,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    lazy_init,
    save_checkpoint,
    save_safetensors,
    unshard_params,
)
from composable_shard.comm.trace import count_collectives
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.claims import assert_close, unsharded_gradients
from tests.programs.models import Net, average_gradients, shard_blocks

OUTSIDE = r"\['inp.weight', 'inp.bias', 'out.weight', 'out.bias'\]"  # of a Net without a root


def _without_root() -> Net:
    net = Net()
    for block in net.blocks:
        fully_shard(block)
    return net


def _train_changed(net: nn.Module) -> None:
    net(torch.full((2, 5), float(1 + dist.get_rank()))).square().mean().backward()


def _clip(net: nn.Module, folder: Path) -> None:
    clip_grad_norm_(net, 1.0)


def _optimizer_state(net: nn.Module, folder: Path) -> None:
    get_optimizer_state_dict(net, torch.optim.SGD(net.parameters(), lr=0.1))


WHOLE: dict[str, Callable[[nn.Module, Path], object]] = {
    "clip_grad_norm_": _clip,
    "save_checkpoint": lambda net, folder: save_checkpoint(folder, net, step=1),
    "save_safetensors": lambda net, folder: save_safetensors(net, folder),
    "get_model_state_dict": lambda net, folder: get_model_state_dict(net),
    "get_optimizer_state_dict": _optimizer_state,
    "lazy_init": lambda net, folder: lazy_init(net),
    "forward": lambda net, folder: _train_changed(net),
}


@pytest.mark.parametrize("name", list(WHOLE))
@distributed(2)
def test_whole_forgotten_root_is_named(name: str, tmp_path: Path) -> None:
    """The layers are sharded, the model is not: all that see the model say what is missing."""
    net = _without_root()
    with pytest.raises(RuntimeError, match=f"no unit manages the trainable parameters {OUTSIDE}"):
        WHOLE[name](net, tmp_path)
    fully_shard(net)  # the remedy
    WHOLE[name](net, tmp_path)


@pytest.mark.parametrize("name", list(WHOLE))
@distributed(2)
def test_whole_ignored_and_frozen_parameters_need_no_unit(name: str, tmp_path: Path) -> None:
    """By any unit's `ignored_params`, and in a copy of a model that has a root."""
    net = Net()
    fully_shard(net.blocks[0], ignored_params={*net.inp.parameters(), net.out.weight})
    fully_shard(list(net.blocks)[1:])
    net.out.bias.requires_grad_(False)
    WHOLE[name](net, tmp_path)
    ignoring = Net()
    shard_blocks(ignoring, ignored_params=set(ignoring.out.parameters()))
    for each in (ignoring, copy.deepcopy(ignoring)):
        WHOLE[name](each, tmp_path)


@distributed(2)
def test_whole_scope_opens_what_is_sharded() -> None:
    """And a forward after it says what is missing."""
    net, plain = _without_root(), Net()
    with unshard_params(net):
        for param, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert param.shape == other.shape
            assert type(param) is nn.Parameter
            param.data.fill_(2.0)
    assert all(param.full_tensor().eq(2).all() for param in net.blocks.parameters())
    with pytest.raises(RuntimeError, match=f"no unit manages the trainable parameters {OUTSIDE}"):
        _train_changed(net)
    fully_shard(net)
    _train_changed(net)


@distributed(2)
def test_whole_layers_alone_are_a_model_where_they_hold_everything() -> None:
    """No root is needed where units manage all parameters."""
    net = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    fully_shard(net[0])
    fully_shard(net[2])
    _train_changed(net)
    clip_grad_norm_(net, 1.0)


@distributed(2)
def test_whole_unit_called_by_itself_sees_no_model() -> None:
    """Nobody calls the model: clipping is the first to see it."""
    net = _without_root()
    net.blocks[0](torch.ones(2, 15)).sum().backward()
    with pytest.raises(RuntimeError, match="fully_shard on the module that holds them"):
        clip_grad_norm_(net, 1.0)


class _AroundLayers(nn.Module):
    """A module around a sharded model that is no unit, with a frozen layer of its own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.head = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


def _replace_head(model: _AroundLayers) -> None:
    del model.net.out  # whose memory, and `id`, the new one may get
    model.net.out = nn.Linear(15, 3)


def _add_inside(model: _AroundLayers) -> None:
    model.net.blocks[1].down = nn.Sequential(model.net.blocks[1].down, nn.Linear(15, 15))


def _add_to_leaf(model: _AroundLayers) -> None:
    model.net.inp.lora = nn.Linear(5, 7)


SURGERY: dict[str, tuple[Callable[[_AroundLayers], object], str]] = {
    "child": (lambda m: setattr(m.net, "extra", nn.Linear(3, 3)), "net.extra.weight"),
    "child around": (lambda m: setattr(m, "extra", nn.Linear(3, 3)), "extra.weight"),
    "replaced": (_replace_head, "net.out.weight"),
    "inside": (_add_inside, "net.blocks.1.down.1.weight"),
    "in a leaf": (_add_to_leaf, "net.inp.lora.weight"),
    "parameter": (lambda m: setattr(m.net.inp, "scale", nn.Parameter(torch.ones(7))), "scale"),
    "of the root": (lambda m: setattr(m.net, "scale", nn.Parameter(torch.ones(7))), "net.scale"),
    "bias": (lambda m: setattr(m.net.act, "bias", nn.Parameter(torch.ones(7))), "net.act.bias"),
    "unfrozen": (lambda m: m.head.requires_grad_(True), "head.weight"),
}


@pytest.mark.parametrize("when", ["after a step", "before a backward"])
@pytest.mark.parametrize("layers_alone", [False, True])
@pytest.mark.parametrize("kind", SURGERY)
@distributed(1, 2)
def test_whole_surgery_is_named_in_the_next_forward(
    kind: str, layers_alone: bool, when: str
) -> None:
    """Whatever is new or unfrozen below the module that is called; without it training goes on."""
    change, name = SURGERY[kind]
    net = Net()
    net.act = nn.Identity()
    net.act.register_parameter("bias", None)
    for unit in [*net.blocks, *([net.inp, net.out] if layers_alone else [net])]:
        fully_shard(unit)
    model = _AroundLayers(net)
    for _ in range(2):
        _train_changed(model)
    if when == "before a backward":
        model(torch.ones(2, 5)).sum()
    change(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"trainable parameters \['[^]]*{name}'"):
            _train_changed(model)
    for param in model.parameters():
        if not isinstance(param, FlatShard):
            param.requires_grad_(False)
    _train_changed(model)


@distributed(2)
def test_whole_new_layers_are_sharded_by_a_call_of_their_own() -> None:
    """LoRA beside a sharded weight: the error's remedy, by value."""
    torch.manual_seed(0)
    plain = Net()
    net = copy.deepcopy(plain)
    shard_blocks(net)
    for model in (plain, net):
        _train_changed(model)
        model.zero_grad()
        torch.manual_seed(1)
        for block in model.blocks:
            block.down.extra = nn.Linear(15, 15)
            block.down.register_forward_hook(lambda each, args, y: y + each.extra(y))
    for block in net.blocks:
        fully_shard(block.down.extra)
    for model in (plain, net):
        _train_changed(model)
    average_gradients(plain.parameters())
    found = unsharded_gradients(net)
    for name, param in plain.named_parameters():
        assert_close(found[name], param.grad, name)


@distributed(2)
def test_whole_parts_of_other_libraries_need_no_unit() -> None:
    """Neither what DistributedDataParallel manages, nor DTensors over all ranks."""
    net = Net()
    shard_blocks(net, ignored_params={*net.inp.parameters(), *net.out.parameters()})
    model = nn.Sequential(net.inp, *net.blocks, net.out)
    model[0] = DistributedDataParallel(nn.Linear(5, 15))
    mesh = init_device_mesh("cpu", (2,))
    scale = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    model.register_parameter("scale", scale)
    model[-1] = nn.Linear(15, 3)
    with pytest.raises(RuntimeError, match=r"parameters \['4.weight', '4.bias'\]"):
        _train_changed(model)
    fully_shard(model[-1])
    _train_changed(model)
    clip_grad_norm_(model, 1.0)


@distributed(2)
def test_whole_only_one_rank_has_an_unmanaged_parameter() -> None:
    """The comparison of the first forward tells both ranks."""
    net = Net()
    shard_blocks(net)
    if dist.get_rank():
        net.extra = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match=r"ranks \[1\]: 'extra.weight' is managed by no unit"):
        _train_changed(net)


@distributed(2)
def test_whole_plain_gradients_that_differ_are_not_clipped() -> None:
    """A list of parameters has no names, but each rank would scale its shards differently."""
    net = _without_root()
    for block in net.blocks:
        block(torch.full((2, 15), float(1 + dist.get_rank()))).sum().backward()
    net.out.weight.grad = torch.full((3, 15), float(1 + dist.get_rank()))
    grads = [p.grad.to_local().clone() for p in net.blocks.parameters()]
    with pytest.raises(RuntimeError, match=r"plain parameter of shape \(3, 15\) differs between"):
        clip_grad_norm_(net.parameters(), 0.1)
    for param, grad in zip(net.blocks.parameters(), grads, strict=True):
        assert_equal(param.grad.to_local(), grad)
    dist.all_reduce(net.out.weight.grad)
    with count_collectives() as log:
        norm = clip_grad_norm_(net.parameters(), 0.1)
    assert len(log.events) == 2
    norms = [torch.empty_like(norm) for _ in range(2)]
    dist.all_gather(norms, norm)
    assert_equal(norms[0], norms[1])
