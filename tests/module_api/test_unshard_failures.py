"""What `unshard_params` refuses, warns of, and leaves behind when something fails."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable_shard import (
    FlatShard,
    fully_shard,
    get_handles,
    get_states,
    register_flat_param,
    register_orig_params,
    reshard,
    unshard,
    unshard_params,
    writeback,
)
from composable_shard.comm import collectives
from composable_shard.comm.algorithms import AllGather
from composable_shard.runtime.training_state import TrainingState
from tests.harness.assertions import Planned, assert_equal
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.models import (
    FailingMode,
    Net,
    add_one,
    assert_at_rest,
    make_net,
    rank_input,
    shard_blocks,
)


def _sgd_step(model: nn.Module, step: int) -> Tensor:
    loss = model(rank_input(4, 5, step=step)).square().mean()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad, alpha=0.1)
    model.zero_grad()
    return loss.detach()


@functools.cache
def _undisturbed_losses() -> list[Tensor]:
    """Return the losses of steps that nothing disturbs."""
    model = make_net()
    return [_sgd_step(model, step) for step in range(3)]


@contextmanager
def _recovering(**options: Any) -> Iterator[Net]:
    """Give a model after one step; after the block it must be at rest, and train bitwise right."""
    losses = _undisturbed_losses()
    model = make_net(**options)
    assert_equal(_sgd_step(model, 0), losses[0], "loss before")
    before = [handle.local_shard.clone() for handle in get_handles(model)]
    yield model
    _assert_shown(model)
    for handle, shard in zip(get_handles(model), before, strict=True):
        assert_equal(handle.local_shard, shard, "nothing must be written")
    model.zero_grad()
    with unshard_params(model, writeback=False):
        pass
    for step in (1, 2):
        assert_equal(_sgd_step(model, step), losses[step], f"loss {step}")
    assert_at_rest(model)


def _assert_shown(model: nn.Module) -> None:
    """Assert that sharded parameters are shown and no scope is open."""
    assert all(isinstance(param, FlatShard) for param in model.parameters())
    for state in get_states(model):
        assert state.training_state is not TrainingState.UNSHARDED_PARAMS
    for handle in get_handles(model):
        assert handle.shown.scope is None
        assert not handle.guard.refusal
        assert not handle.full.readers.claims


# --- refused inside, by their texts ---


def _text(*parts: str) -> str:
    return f"^{re.escape(''.join(parts))}$"


_TRAINING_FORWARD = _text(
    "a training forward of unit 'Net' inside unshard_params: gradients would not be reduced. Run "
    "it under torch.no_grad(), or train outside the scope."
)
_BACKWARD = _text(
    "a backward inside unshard_params reached parameters that the scope shows: their gradients "
    "would not be reduced. Run forward and backward outside the scope."
)
_NESTED = _text(
    "unit 'Net' is shown by an unshard_params scope already. Read and edit its parameters in that "
    "scope, or close it first."
)
_BY_HAND = _text(
    "unit 'Net' shows its full parameters inside unshard_params already. Call unshard(module), its "
    "wait() and reshard(module) outside the scope."
)
_WRITEBACK = _text(
    "unit 'Net' is shown by unshard_params, which writes edits back itself when its block ends. "
    "Pass writeback=True to it."
)
_COPY = _text(
    "unit 'Net' can't be copied or pickled inside unshard_params, for the copy's parameters would "
    "belong to no unit. Copy it outside the scope, or its state_dict() inside."
)


def _open(model: nn.Module) -> None:
    with unshard_params(model):
        pass


def _regularise(model: nn.Module) -> None:
    (model.out.weight.norm() + 1).backward()


_REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "forward": (lambda model: model(rank_input(4, 5)), _TRAINING_FORWARD),
    "backward": (_regularise, _BACKWARD),
    "nested": (_open, _NESTED),
    "unshard": (unshard, _BY_HAND),
    "reshard": (lambda model: reshard(model, recurse=True), _BY_HAND),
    "writeback": (writeback, _WRITEBACK),
    "deepcopy": (copy.deepcopy, _COPY),
    "save": (lambda model: torch.save(model, io.BytesIO()), _COPY),
}


@pytest.mark.parametrize("kind", _REFUSED)
@distributed(1, 2, 3)
def test_what_makes_no_sense_inside_is_refused_and_harms_nothing(kind: str) -> None:
    """S1.6: a distinct error each; caught or not, what follows is right."""
    action, message = _REFUSED[kind]
    with _recovering() as model:
        with unshard_params(model, with_grads=True):
            with pytest.raises(RuntimeError, match=message):
                action(model)
            assert type(model.out.weight) is nn.Parameter
        with pytest.raises(RuntimeError, match=message), unshard_params(model, writeback=False):
            action(model)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
@distributed(2)
def test_sharding_full_parameters_is_refused(by_hand: bool, is_frozen: bool) -> None:
    """They have a unit, which would lose them; nothing has been changed."""
    message = _text(
        "parameter 'weight' is the full form of one that a unit manages already, shown by unshard, "
        "unshard_params or a forward. Shard before that, inner modules first."
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).requires_grad_(not is_frozen)
    plain = copy.deepcopy(model)
    fully_shard(model)
    with unshard_params(model) if not by_hand else nullcontext():
        if by_hand:
            unshard(model)
        with pytest.raises(ValueError, match=message):
            fully_shard(model[0])
    reshard(model)
    with torch.no_grad():
        assert_equal(model(rank_input(4, 5)), plain(rank_input(4, 5)))
    assert_at_rest(model)


@pytest.mark.parametrize("is_differentiable", [False, True])
@distributed(1, 2)
def test_an_optimizer_of_full_parameters_is_refused(is_differentiable: bool) -> None:
    """They get no gradient, so that it would step nothing."""
    model = Net()
    shard_blocks(model)
    unshard(model, recurse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, differentiable=is_differentiable)
    reshard(model, recurse=True)
    model(rank_input(4, 5)).square().mean().backward()
    with pytest.raises(RuntimeError, match="an optimizer is built of the full parameter"):
        optimizer.step()


@distributed(2)
def test_a_backward_to_what_the_body_unfreezes_is_refused() -> None:
    """Its gradient would not be reduced either."""
    model = fully_shard(nn.Linear(5, 3).requires_grad_(False))
    with unshard_params(model):
        model.weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match=_BACKWARD):
            model.weight.sum().backward()


@distributed(1, 2)
def test_a_backward_through_an_earlier_graph_is_refused_inside() -> None:
    """S1.6: after the scope the same backward works, and is right."""
    with _recovering() as model:
        loss = model(rank_input(4, 5)).square().mean()
        with (
            unshard_params(model, writeback=False),
            pytest.raises(RuntimeError, match=r"a backward reached unit '\w+' inside unshard_par"),
        ):
            loss.backward(retain_graph=True)
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["step", "shard"])
@distributed(2)
def test_writing_shards_inside_is_refused(kind: str) -> None:
    """The scope would overwrite what an optimizer does to them."""
    with _recovering() as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        param = model.out.weight
        model(rank_input(4, 5)).sum().backward()
        message = (
            "was written in its sharded form inside unshard_params, which shows its full values. "
            r"Call optimizer.step\(\) and edit shards outside the scope, or edit the module's own"
        )
        with unshard_params(model), pytest.raises(RuntimeError, match=message):
            optimizer.step() if kind == "step" else param.data.zero_()


def _call_inside(model: nn.Module, action: Callable[[], object], *, in_backward: bool) -> None:
    """Run a step, and `action` in the forward of the second block, or in its backward."""

    def hook(*args: Any) -> None:
        if in_backward:
            args[-1].register_hook(lambda _: action() and None)
        else:
            action()

    handle = model.blocks[1].up.register_forward_hook(hook)
    try:
        model(rank_input(4, 5)).sum().backward()
    finally:
        handle.remove()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", ["", "blocks.0", "blocks.1"])
@distributed(2)
def test_a_scope_inside_a_forward_or_a_backward_is_refused(name: str, in_backward: bool) -> None:
    """S1.6: whichever unit it is for; the texts differ."""
    message = (
        _text(
            "unshard_params can't be opened inside a backward pass. Do it after backward() has "
            "returned; gradients are complete only then."
        )
        if in_backward
        else _text(
            "unshard_params can't be opened inside the forward of unit 'Net', which shows its full "
            "parameters already. Do it before or after the call of the model."
        )
    )
    with _recovering() as model:
        unit = model.get_submodule(name)
        with pytest.raises(RuntimeError, match=message):
            _call_inside(model, lambda: _open(unit), in_backward=in_backward)


@pytest.mark.fast
@distributed(2)
def test_a_module_without_units_is_refused() -> None:
    """There is nothing to show; the text says what to do."""
    message = _text(
        "expected a module with sharded units, got Linear. Call fully_shard on it first, or pass "
        "the module around it that was sharded."
    )
    with pytest.raises(ValueError, match=message):
        _open(nn.Linear(2, 2))
    message = r"got Net. Call fully_shard on it first, or pass recurse=True for the units inside it"
    model = Net()
    fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match=message), unshard_params(model, recurse=False):
        pass


@distributed(2, 3)
def test_a_rank_without_values_can_not_run_the_model() -> None:
    """And says why; the first rank can."""
    with _recovering() as model, unshard_params(model, rank0_only=True), torch.no_grad():
        if dist.get_rank() == 0:
            model(rank_input(4, 5))
        else:
            message = _text(
                "unit 'Net' can't run inside unshard_params(rank0_only=True) on this rank, which "
                "has no full parameters. Run the model on the first rank only, or pass "
                "rank0_only=False."
            )
            with pytest.raises(RuntimeError, match=message):
                model(rank_input(4, 5))


@distributed(2, 3)
def test_gradients_on_some_ranks_only_are_named_on_all_ranks() -> None:
    """Before anything is gathered."""
    with _recovering() as model:
        model(rank_input(4, 5)).sum().backward()
        if dist.get_rank() == 0:
            model.out.bias.grad = None
        message = _text(
            "the parameters ['out.bias'] have a gradient on some ranks and none on others. Set or "
            "clear .grad alike on all ranks, for example with zero_grad()."
        )
        with pytest.raises(RuntimeError, match=message), unshard_params(model, with_grads=True):
            pass


@distributed(2)
def test_a_gradient_of_the_wrong_kind_on_one_rank_hangs_no_other() -> None:
    """The other ranks hear that something is wrong with the gradients."""
    with _recovering() as model:
        model(rank_input(4, 5)).sum().backward()
        message = r"the parameters \['inp.weight', .* have a gradient on some ranks and none"
        if dist.get_rank() == 0:
            model.out.bias.grad = torch.ones(3)
            message = "expected .grad of parameter 'out.bias' to be None or a FlatShard, got Tensor"
        with pytest.raises(RuntimeError, match=message), unshard_params(model, with_grads=True):
            pass


# --- replaced and assigned ---


def _edit_and(action: Callable[[nn.Module], object], model: nn.Module) -> None:
    add_one(model)
    action(model)


def _assign(model: nn.Module) -> None:
    model.inp.weight = nn.Parameter(torch.zeros(15, 5))


def _load_by_assignment(model: nn.Module) -> None:
    model.load_state_dict(Net().state_dict(), assign=True)


def _delete(model: nn.Module) -> None:
    del model.inp.weight


def _parametrize(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model.inp)


@pytest.mark.parametrize(
    *pairwise(
        flag=[True, False],
        replace=[_assign, _load_by_assignment, _delete, _parametrize],
        world_size=(1, 2),
    )
)
@distributed()
def test_a_replaced_parameter_is_named_on_exit(
    replace: Callable[[nn.Module], None], flag: bool
) -> None:
    """Whatever became of the slot, the sharded parameter is back in it; nothing is written."""
    with _recovering() as model:
        message = (
            r"^parameter 'inp.weight' was replaced by another object \((Parameter\(15, 5\)|None)\) "
            r"inside unshard_params. Its value was not written back, nor was any other. Write into "
            r"the existing parameter instead, for example `param.copy_\(value\)` under"
        )
        with pytest.raises(RuntimeError, match=message), unshard_params(model, writeback=flag):
            _edit_and(replace, model)
        if replace is _parametrize:
            del model.inp.parametrizations
            model.inp.__class__ = nn.Linear


@distributed(2)
def test_functional_call_inside_is_fine() -> None:
    """It puts back what it replaced."""
    with _recovering() as model, unshard_params(model), torch.no_grad():
        values = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
        output = torch.func.functional_call(model, values, (rank_input(4, 5),))
        assert_equal(output, torch.zeros(4, 3))


def _shrink(model: nn.Module) -> None:
    model.out.weight.data = torch.zeros(3)


def _halve(model: nn.Module) -> None:
    model.out.weight.data = model.out.weight.data.half()


def _shrink_gradient(model: nn.Module) -> None:
    values = model.out.weight.data
    model.out.weight.data = torch.zeros(3)  # so that torch accepts the gradient
    model.out.weight.grad = torch.zeros(3)
    model.out.weight.data = values


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("action", "what"),
    [
        (_shrink, ".data is (3,) torch.float32"),
        (_halve, ".data is (3, 15) torch.float16"),
        (_shrink_gradient, ".grad is (3,) torch.float32"),
    ],
)
@distributed(2)
def test_values_of_another_shape_or_dtype_are_named_on_exit(
    action: Callable[[nn.Module], None], what: str, rank: int
) -> None:
    """On the rank that set them; the others hear of it, and nothing is written anywhere."""
    attribute, kind = what.split(" is ")
    message = _text(
        f"expected 'out.weight'{attribute} to keep its shape, dtype and device inside "
        f"unshard_params, (3, 15) torch.float32 on cpu; it was set to {kind} on cpu. Nothing was "
        "written back. Convert the model outside the scope."
    )
    is_mine = dist.get_rank() == rank
    with _recovering() as model:
        model(rank_input(4, 5)).sum().backward()
        with (
            pytest.raises(RuntimeError, match=message if is_mine else _failed_on(rank)),
            unshard_params(model, with_grads=True),
        ):
            _edit_and(action if is_mine else add_one, model)


def _failed_on(rank: int | None) -> str:
    return _text(
        f"the body of unshard_params failed on ranks [{rank}] of its group, so nothing was written "
        "back on any rank. Its own error tells why."
    )


# --- warnings ---


@pytest.mark.parametrize("flag", [True, False])
@distributed(2)
def test_new_gradients_are_discarded_with_a_warning(flag: bool) -> None:
    """S1.1: gradients are written only where a sharded gradient exists."""
    model = make_net()
    message = r"the gradients that were set for \['out.bias'\] inside unshard_params are discarded"
    with (
        pytest.warns(UserWarning, match=message) as caught,
        unshard_params(model, with_grads=flag),
    ):
        model.out.bias.grad = torch.ones(3)
    assert caught[0].filename == __file__
    assert model.out.bias.grad is None


_LOST = (
    "were not written back, so they are lost where full values are freed. Edit parameters inside "
    "unshard_params(module), or call writeback(module) before reshard(module)."
)


@pytest.mark.parametrize("kind", ["in place", "flat"])
@distributed(2, 3)
def test_edits_between_unshard_and_reshard_are_lost_with_a_warning(kind: str) -> None:
    """Forwards in between use them, and do not warn; a flat one names its first parameter."""
    name = "out.weight"
    with _recovering() as model:
        unshard(model, recurse=True)
        if kind == "flat":
            register_flat_param(model)
            name = str(fully_shard.state(model).handles[0].entries[0].label)
            with torch.no_grad():
                dict(model.named_parameters())["_flat_param"].zero_()
        else:
            with torch.no_grad():
                model.out.weight.zero_()
        if kind != "flat":
            with torch.no_grad():
                assert_equal(model(rank_input(4, 5)), model.out.bias.detach().expand(4, 3))
        message = _text(f"the edits of ['{name}'] between unshard and reshard ", _LOST)
        with pytest.warns(UserWarning, match=message):
            reshard(model, recurse=True)
        register_orig_params(model)


@distributed(1)
def test_edits_by_hand_on_one_rank_stay_with_a_warning() -> None:
    """One rank has nothing to free; the same code would lose them on several."""
    model = make_net()
    unshard(model)
    with torch.no_grad():
        model.out.weight.zero_()
    message = r"\['out.weight'\] between unshard and reshard were not written back"
    with pytest.warns(UserWarning, match=message):
        reshard(model)
    assert model.out.weight.to_local().abs().sum() == 0


@distributed(2)
def test_closing_a_generator_inside_discards_edits_with_a_warning() -> None:
    """GeneratorExit is no failure that anyone sees, so it must not lose them silently."""
    with _recovering() as model:

        def show() -> Iterator[None]:
            with unshard_params(model):
                add_one(model.out)
                yield

        generator = show()
        next(generator)
        message = _text(
            "what was edited inside unshard_params is discarded: the generator that opened it was "
            "closed before the block had ended."
        )
        with pytest.warns(UserWarning, match=message):
            generator.close()


@distributed(2)
def test_freezing_a_part_of_a_flat_parameter_is_refused_on_exit() -> None:
    """The body's other edits are not written; afterwards all is as before."""
    model = make_net(use_orig_params=False)
    before = [handle.local_shard.clone() for handle in get_handles(model)]
    message = r"the parameters \['out.bias'\] of unit 'Net' were frozen inside unshard_params and"
    with pytest.raises(RuntimeError, match=message), unshard_params(model):
        _edit_and(lambda model: model.out.bias.requires_grad_(False), model)
    for handle, shard in zip(get_handles(model), before, strict=True):
        assert_equal(handle.local_shard, shard)
    assert all(param.requires_grad for param in model.parameters())


# --- failures of the body ---


@pytest.mark.parametrize(
    *pairwise(
        error=[Planned, KeyboardInterrupt],
        rank0_only=[False, True],
        rank=[0, 1, None],
        world_size=(2, 3),
    )
)
@distributed()
def test_nothing_is_written_on_any_rank_if_the_body_fails_on_one(
    rank: int | None, rank0_only: bool, error: type[BaseException]
) -> None:
    """The error comes through on the ranks that have it; the others name those."""
    with _recovering() as model:
        is_mine = rank in (None, dist.get_rank())
        expected = error if is_mine else RuntimeError
        with (
            pytest.raises(expected, match="planned" if is_mine else _failed_on(rank)),
            unshard_params(model, rank0_only=rank0_only),
        ):
            _edit_and_raise(model, error if is_mine else None)


def _edit_and_raise(model: nn.Module, error: type[BaseException] | None) -> None:
    if isinstance(next(model.parameters()), FlatShard):
        assert dist.get_rank() > 0  # rank0_only
    else:
        add_one(model)
    if error is not None:
        raise error("planned")


@distributed(2)
def test_a_failed_body_without_writeback_concerns_no_other_rank() -> None:
    """Nothing would have been written, so nothing is sent."""
    with _recovering() as model:
        if dist.get_rank() == 0:
            with pytest.raises(Planned), unshard_params(model, writeback=False):
                raise Planned
        else:
            with unshard_params(model, writeback=False):
                pass


@distributed(4)
def test_a_failure_reaches_all_ranks_of_a_tensor_parallel_mesh() -> None:
    """They hold other parts of the same parameters, in shard groups of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    before = [param.to_local().clone() for param in model.parameters()]
    messages = {
        0: "planned",
        1: "failed on another rank of the tensor-parallel mesh, so nothing was written back",
        2: r"failed on ranks \[0\] of its group, so nothing was written back",
        3: "failed on another rank of the tensor-parallel mesh, so nothing was written back",
    }
    rank = dist.get_rank()
    with pytest.raises((Planned, RuntimeError), match=messages[rank]), unshard_params(model):
        _edit_and_raise(model, Planned if rank == 0 else None)
    for param, value in zip(model.parameters(), before, strict=True):
        assert_equal(param.to_local(), value)
    with unshard_params(model):
        add_one(model)
    for param, value in zip(model.parameters(), before, strict=True):
        assert_equal(param.to_local(), value + 1)


@distributed(4)
def test_a_failure_is_passed_on_between_groups() -> None:
    """Units on the two axes of a grid: one rank shares no group with the one that failed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    fully_shard(model[0], mesh=mesh["rows"])
    fully_shard(model[1], mesh=mesh["columns"])
    before = [param.to_local().clone() for param in model.parameters()]
    # By the rank's number in the group that told it.
    messages = {0: "planned", 1: r"ranks \[0\] of", 2: r"ranks \[0\] of", 3: r"ranks \[0\] of"}
    rank = dist.get_rank()
    with pytest.raises((Planned, RuntimeError), match=messages[rank]), unshard_params(model):
        _edit_and_raise(model, Planned if rank == 0 else None)
    for param, value in zip(model.parameters(), before, strict=True):
        assert_equal(param.to_local(), value)


@distributed(2)
def test_an_error_of_the_scope_keeps_no_values_alive() -> None:
    """Not in a reference cycle that waits for the collector."""
    with _recovering() as model:
        alive: list[weakref.ref[Any]] = []

        def fail(model: nn.Module) -> None:
            for handle in get_states(model)[0].handles:
                assert handle.shown.scope is not None
                assert handle.shown.scope.full is not None
                alive.append(weakref.ref(handle.shown.scope.full.buffer))
            _assign(model)

        gc.disable()
        try:
            with pytest.raises(RuntimeError, match="was replaced"), unshard_params(model):
                fail(model)
            assert [ref() for ref in alive] == [None]
        finally:
            gc.enable()


# --- failures of the scope itself ---


class _FailingCollective:
    """Stands in for a collective: the k-th fails, when it is issued or when it is waited for."""

    def __init__(self, collective: Callable[..., Any], k: int, *, in_wait: bool) -> None:
        self.collective, self.k, self.calls, self.in_wait = collective, k, 0, in_wait

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the collective, or fail."""
        self.calls += 1
        if self.calls != self.k:
            return self.collective(*args, **kwargs)
        if not self.in_wait:
            raise RuntimeError("planned")
        self.work = self.collective(*args, **kwargs)
        return self

    def wait(self) -> None:
        """Fail after waiting."""
        self.work.wait()
        raise RuntimeError("planned")


def _forms(model: nn.Module) -> list[Any]:
    """Return all that a scope that could not open, or close, must leave as it was."""
    names = [(name, id(param), id(param.grad)) for name, param in model.named_parameters()]
    states = [(state.training_state, state.depth) for state in get_states(model)]
    sizes = [
        (h.unsharded.untyped_storage().size(), h.shown.is_unsharded, h.shown.scope is not None)
        for h in get_handles(model)
    ]
    return [names, states, sizes]


def _make_with_gradients(**options: Any) -> tuple[Net, Net]:
    """Return a model with gradients, and an unsharded one of the same values without."""
    model = make_net(**options)
    model(rank_input(4, 5)).sum().backward()
    torch.manual_seed(0)
    return model, Net()


def _assert_works(model: nn.Module, plain: nn.Module) -> None:
    """Assert that a scope shows the values of `plain` and keeps edits, and that training works."""
    named = dict(plain.named_parameters())
    with unshard_params(model, with_grads=True):
        for name, param in model.named_parameters():
            assert_equal(param.detach(), named[name].detach(), name)
        add_one(model)
    with unshard_params(model, writeback=False):
        for name, param in model.named_parameters():
            assert_equal(param.detach(), named[name].detach() + 1, name)
    model.zero_grad()
    register_orig_params(model)
    model(rank_input(4, 5)).sum().backward()
    assert_at_rest(model)


@pytest.mark.deadline(240)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("flags", [{}, {"offload_to_cpu": True, "with_grads": True}], ids=str)
@distributed(2, timeout=200)
def test_running_out_of_memory_in_any_operation_of_opening(
    flags: dict[str, bool], use_orig_params: bool
) -> None:
    """S1.6: on all ranks alike; everything is as before, and the next scope is right."""
    model, plain = _make_with_gradients(use_orig_params=use_orig_params)
    before = _forms(model)
    for k in itertools.count(1 + use_orig_params, 2):  # every other one, the rest in another case
        mode, scope = FailingMode(k), unshard_params(model, writeback=False, **flags)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with mode:
                    scope.__enter__()
            except torch.OutOfMemoryError:
                assert _forms(model) == before, k
                continue
        scope.__exit__(None, None, None)
        break
    assert k > 40
    _assert_works(model, plain)


_COLLECTIVES: list[tuple[str, str, dict[str, bool], int]] = [
    ("open", "all_gather", {"with_grads": True}, 8),
    ("open", "all_gather", {"offload_to_cpu": True}, 4),
    ("open", "all_gather", {"rank0_only": True, "with_grads": True}, 8),
    ("open", "all_reduce", {"with_grads": True}, 1),
    ("close", "all_reduce", {}, 1),
    ("close", "broadcast", {"rank0_only": True, "with_grads": True}, 8),
]


def _enter_or_exit(scope: AbstractContextManager[None], phase: str) -> None:
    if phase == "open":
        scope.__enter__()
    else:
        scope.__exit__(None, None, None)


@pytest.mark.parametrize("in_wait", [False, True])
@pytest.mark.parametrize(("phase", "name", "flags", "num_calls"), _COLLECTIVES)
@distributed(2, 3)
def test_any_collective_may_fail(
    phase: str, name: str, flags: dict[str, bool], num_calls: int, in_wait: bool
) -> None:
    """S1.9: the k-th one, on all ranks, when issued or waited for; the next scope is right."""
    model, plain = _make_with_gradients()
    before = _forms(model)
    for k in range(1, num_calls + 2):
        failing = _FailingCollective(getattr(collectives, name), k, in_wait=in_wait)
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")
            scope = unshard_params(model, **flags)
            if phase == "close":
                scope.__enter__()
            patch.setattr(collectives, name, failing)
            with pytest.raises(RuntimeError, match="planned") if k <= num_calls else nullcontext():
                _enter_or_exit(scope, phase)
            patch.undo()
            if phase == "open" and k > num_calls:
                scope.__exit__(None, None, None)
        assert failing.calls <= num_calls
        assert _forms(model) == before, k
    _assert_works(model, plain)


@pytest.mark.parametrize("phase", ["open", "close"])
@distributed(2)
def test_an_error_on_one_rank_reaches_the_other_within_the_timeout(phase: str) -> None:
    """The group is broken then; registration, storages and states are as before all the same."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    torch.manual_seed(0)
    model = Net()
    shard_blocks(model, mesh=DeviceMesh.from_group(group, "cpu"))
    model(rank_input(4, 5)).sum().backward()
    before = _forms(model)
    scope = unshard_params(model, rank0_only=phase == "close")
    if phase == "close":
        scope.__enter__()
    name = "all_gather" if phase == "open" else "broadcast"
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(collectives, name, _FailingCollective(None, 1, in_wait=False))
            message = "planned"
        else:
            message = r"not all ranks came: rank 1 is in unshard_params\(|(?i:time|closed)"
        with pytest.raises(RuntimeError, match=message):
            _enter_or_exit(scope, phase)
    assert _forms(model) == before


@distributed(2)
def test_a_failing_gather_of_what_is_held_shows_shards() -> None:
    """After the write-back: freed full values must not be shown, for reading them would crash."""
    model = make_net()
    unshard(model, recurse=True)
    failing = _FailingCollective(AllGather.start, 2, in_wait=False)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RuntimeError, match="planned"),
        unshard_params(model),
    ):
        _edit_and(lambda _: patch.setattr(AllGather, "start", lambda *args: failing(*args)), model)
    assert all(isinstance(param, FlatShard) for param in model.parameters())
    torch.manual_seed(0)
    plain = Net()
    add_one(plain)
    with torch.no_grad():
        assert_equal(model(rank_input(4, 5)), plain(rank_input(4, 5)))
    reshard(model, recurse=True)
    assert_at_rest(model)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    *pairwise(
        in_backward=[False, True], place=["", "blocks.0", "blocks.1.up", "out"], world_size=(1, 2)
    )
)
@distributed(on_device=True)
def test_a_scope_after_an_interrupted_step(place: str, in_backward: bool) -> None:
    """It ends what was left half done, shows the right values, and the next step is right."""
    with _recovering() as model:
        module = model.get_submodule(place)
        expected = [param.full_tensor() for param in model.parameters()]
        if in_backward:
            hook = module.register_forward_hook(
                lambda *args: args[-1].register_hook(_interrupt) and None
            )
        else:
            hook = module.register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(rank_input(4, 5)).sum().backward()
        hook.remove()
        with unshard_params(model, with_grads=True):
            for param, value in zip(model.parameters(), expected, strict=True):
                assert_equal(param.detach(), value)
                assert param.grad is None


# --- kept beyond the scope ---


def _pass_on(param: Tensor) -> object:
    return torch.utils.dlpack.to_dlpack(param), param.shape


_USES: dict[str, Callable[[Any], object]] = {
    "arithmetic": lambda param: param + 1,
    "shape": lambda param: param.shape,
    "grad": lambda param: param.grad,
    "data": lambda param: param.data,
    "detach": lambda param: param.detach(),
    "address": lambda param: param.data_ptr(),
    "storage": lambda param: param.untyped_storage(),
    "numpy": lambda param: param.numpy(),
    "list": lambda param: param.tolist(),
    "index": lambda param: param[0],
    "write": lambda param: param.zero_(),
    "compare": lambda param: param == param,
    "stack": lambda param: torch.stack([param, param]),
    "low level": lambda param: torch.ops.aten.add.Tensor(param, 1),
    "deepcopy": copy.deepcopy,
    "save": lambda param: torch.save(param, io.BytesIO()),
    "register": lambda param: nn.Linear(5, 15).register_parameter("other", param),
    "dlpack": _pass_on,
    "full": lambda param: param.full_tensor(),
    "step": lambda param: torch.optim.SGD([param], lr=1.0),
}


@pytest.mark.parametrize("flags", [{}, {"offload_to_cpu": True}, {"with_grads": True}], ids=str)
@distributed(1, 2)
def test_a_parameter_kept_beyond_its_scope_raises_in_every_use(flags: dict[str, bool]) -> None:
    """It never crashes, and says its name; printing it works."""
    with _recovering() as model:
        model(rank_input(4, 5)).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with unshard_params(model, writeback=False, **flags):
                param, view = model.inp.weight, model.inp.weight[1:3]
                expected = param.detach().clone()
                norm = param.norm()
        message = _text(
            "parameter 'inp.weight' was kept beyond its unshard_params scope, which freed its "
            "values. Use the module's own parameters, or clone() inside the scope what you want "
            "to keep."
        )
        for use in _USES.values():
            with pytest.raises(RuntimeError, match=message):
                use(param)
        for text in (repr(param), str(param), f"{param}"):
            assert text == "<parameter 'inp.weight' of an ended unshard_params scope>"
        assert param in {param}
        assert repr(view)
        assert_equal(view.detach(), expected[1:3])
        for graph in (norm, view.sum()):
            with pytest.raises(RuntimeError):
                graph.backward()


@distributed(2)
def test_an_optimizer_built_inside_fails_by_name_when_it_steps() -> None:
    """Instead of training nothing, silently."""
    with _recovering() as model:
        with unshard_params(model):
            optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(RuntimeError, match=r"parameter 'inp.weight' was kept beyond its"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"parameter 'inp.weight' was kept beyond its"):
            optimizer.zero_grad()
