"""Copies that a save in the background makes late: what is written has what was there at the call.

The thread of each save here waits, so that only the program's own writes make copies.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import (
    FlatShard,
    OffloadPolicy,
    ShardedGradScaler,
    ShardingStrategy,
    clip_grad_norm_,
    find_checkpoint,
    fully_shard,
    get_handles,
    load_checkpoint,
    reshard,
    save_checkpoint,
    set_model_state_dict,
    set_optimizer_state_dict,
    unshard,
    unshard_params,
    writeback,
)
from composable_shard.checkpoint import CheckpointSave, staging
from composable_shard.tensor import DIRECT_OPS
from composable_shard.tensor.late_reads import LATE_READS
from composable_shard.torch_private import no_dispatch
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import rank_input, seeded

_STATE = "exp_avg"


class _SavedProgram:
    """A model of three units after a step, and its optimizer."""

    def __init__(
        self, strategy: str = "full_shard", offload: OffloadPolicy | None = None, **options: Any
    ) -> None:
        policies: dict[str, Any] = {"strategy": strategy}
        if offload is not None:
            policies["offload_policy"] = offload
        self.model = seeded(lambda: nn.Sequential(*(nn.Linear(7, 7) for _ in range(3))))
        for layer in self.model:
            fully_shard(layer, **policies)
        fully_shard(self.model, **policies)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)
        self.kept: list[Any] = []  # what the program got hold of before the save
        self.train()

    def train(self) -> None:
        """Take a step."""
        self.model(rank_input(3, 7)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def params(self) -> list[FlatShard]:
        return [param for param in self.model.parameters() if isinstance(param, FlatShard)]

    def states(self) -> list[Any]:
        return [self.optimizer.state[param][_STATE] for param in self.model.parameters()]

    def values(self) -> list[Tensor]:
        return [each._local.clone() for each in [*self.params(), *self.states()]]

    def save_at_once(self, path: Path) -> Path:
        """Save, and wait."""
        saved = save_checkpoint(path, self.model, self.optimizer, step=1)
        assert isinstance(saved, Path)
        return saved

    def save_late(self, path: Path) -> CheckpointSave:
        """Save in the background."""
        save = save_checkpoint(path, self.model, self.optimizer, step=1, async_op=True)
        assert isinstance(save, CheckpointSave)
        return save


def _each(edit: Callable[[Any], object]) -> Callable[[_SavedProgram], None]:
    """Return a program that edits each parameter and each state."""

    def run(program: _SavedProgram) -> None:
        with torch.no_grad():
            for each in [*program.params(), *program.states()]:
                edit(each)

    return run


def _got_before(take: Callable[[Any], Any]) -> tuple[Callable[[_SavedProgram], None], ...]:
    """Return a program that gets at each tensor before the save, and writes after it."""

    def before(program: _SavedProgram) -> None:
        program.kept = [take(each) for each in [*program.params(), *program.states()]]

    def after(program: _SavedProgram) -> None:
        with torch.no_grad():
            for each in program.kept:
                each.mul_(3)

    return before, after


def _set_positive(x: Any) -> None:
    x[x > 0] = 1.0


def _assign_data(x: Any) -> None:
    x.data = x.detach() * 3


def _clear_memory(x: Any) -> None:
    ctypes.memset(x.data_ptr(), 0, x._local.nbytes)


def _keep_addresses(program: _SavedProgram) -> None:
    """Ask rows for their addresses, as each row has a local tensor of its own."""
    rows = [each.detach().view(-1)[1:6] for each in [*program.params(), *program.states()]]
    program.kept = [(row.data_ptr(), row._local.nbytes) for row in rows]


def _clear_kept(program: _SavedProgram) -> None:
    for address, nbytes in program.kept:
        ctypes.memset(address, 0, nbytes)


def _on_lists(program: _SavedProgram) -> None:
    with torch.no_grad():
        for each in (program.params(), program.states()):
            torch._foreach_mul_(each, 3)
            torch._foreach_add_(each, each)


def _write_flat(program: _SavedProgram) -> None:
    for handle in get_handles(program.model):
        handle.local_shard.mul_(3)


def _write_full(program: _SavedProgram) -> None:
    """Each handle's own part of the full values, where these hold the shard."""
    for handle in get_handles(program.model):
        if handle.is_kept:
            handle.unsharded.mul_(3)


def _keep_flat(program: _SavedProgram) -> None:
    program.kept = [handle.local_shard for handle in get_handles(program.model)]


def _write_kept(program: _SavedProgram) -> None:
    for each in program.kept:
        each.mul_(3)


def _edit_whole(program: _SavedProgram) -> None:
    with unshard_params(program.model, writeback=True), torch.no_grad():
        for param in program.model.parameters():
            param.mul_(3)


def _edit_unsharded(program: _SavedProgram) -> None:
    unshard(program.model, recurse=True)
    with torch.no_grad():
        for param in program.model.parameters():
            param.mul_(3)
    writeback(program.model, recurse=True)
    reshard(program.model, recurse=True)


def _edit_in_forward(program: _SavedProgram) -> None:
    def clamp(module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)

    handles = [layer.register_forward_pre_hook(clamp) for layer in program.model]
    program.model(rank_input(3, 7)).sum().backward()
    for handle in handles:
        handle.remove()


def _load_model(program: _SavedProgram) -> None:
    program.model.load_state_dict(
        {name: value * 3 for name, value in program.model.state_dict().items()}
    )
    set_model_state_dict(
        program.model, {name: value * 3 for name, value in program.model.state_dict().items()}
    )


def _load_optimizer(program: _SavedProgram) -> None:
    states = program.optimizer.state_dict()
    for state in states["state"].values():
        state[_STATE] = state[_STATE] * 3
    program.optimizer.load_state_dict(states)
    named = {
        name: {_STATE: value * 2, "exp_avg_sq": value * value, "step": torch.tensor(4.0)}
        for name, value in program.model.state_dict().items()
    }
    groups = [{**program.optimizer.param_groups[0], "params": list(named)}]
    set_optimizer_state_dict(
        program.model, program.optimizer, {"state": named, "param_groups": groups}
    )


def _step_compiled(program: _SavedProgram) -> None:
    program.model(rank_input(3, 7)).sum().backward()
    # Where parameters of other sizes were compiled before, torch takes sizes as variables, and then
    # makes a graph of shards that it refuses itself.
    torch.compiler.reset()
    torch.compile(program.optimizer.step, backend="aot_eager")()


def _free_all(program: _SavedProgram) -> None:
    numels = [each._local.numel() for each in [*program.params(), *program.states()]]
    del program.model, program.optimizer
    gc.collect()
    program.kept = [torch.full((numel,), 7.0) for numel in numels * 3]


_PROGRAMS: dict[str, Any] = {
    "step": _SavedProgram.train,
    "edit": _each(lambda x: x.mul_(3)),
    "data": _each(lambda x: x.data.mul_(3)),
    "assign": _each(_assign_data),
    "out": _each(lambda x: torch.add(x, 1, out=x.data)),
    "item": _each(_set_positive),
    "row": _each(lambda x: x.view(-1)[1:6].fill_(3)),
    "columns": _each(lambda x: x.view(-1)[::2].fill_(3)),
    "transpose": _each(lambda x: x.view(7, -1).t().mul_(torch.arange(7.0))),
    "random": _each(lambda x: x.normal_(generator=torch.Generator().manual_seed(1))),
    "local": _each(lambda x: x.to_local().mul_(3)),
    "address": _each(_clear_memory),
    "shared": _each(lambda x: x.detach().share_memory_().mul_(3)),
    "flat": _write_flat,
    "full": _write_full,
    "kept flat": (_keep_flat, _write_kept),
    "lists": _on_lists,
    "kept alias": _got_before(lambda x: x.detach()),
    "kept view": _got_before(lambda x: x.detach().view(-1)),
    "kept row": _got_before(lambda x: x.detach().view(-1)[1:6]),
    "kept columns": _got_before(lambda x: x.detach().view(-1)[::2]),
    "kept local": _got_before(lambda x: x.to_local()),
    "kept local row": _got_before(lambda x: x.detach().view(-1)[1:6].to_local()),
    "kept address": (_keep_addresses, _clear_kept),
    "whole": _edit_whole,
    "unsharded": _edit_unsharded,
    "forward": _edit_in_forward,
    "load model": _load_model,
    "load optimizer": _load_optimizer,
    "compiled": _step_compiled,
    "free": _free_all,
}


@contextmanager
def _copying_held(patch_size: int = 0) -> Iterator[threading.Event]:
    """Let the threads of saves make no copy until the event is set; small copies are late too."""
    may_copy, make = threading.Event(), staging.LateCopies.make

    def wait_and_make(late: staging.LateCopies) -> None:
        assert may_copy.wait(30)
        make(late)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_LATE_NBYTES", patch_size)
        patch.setattr(staging.LateCopies, "make", wait_and_make)
        try:
            yield may_copy
        finally:
            may_copy.set()


def _files(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.glob("*.safetensors")}


def _check_files(tmp_path: Path, name: str, program: _SavedProgram, twin: _SavedProgram) -> None:
    """Run a program after a save, and beside it on a twin that does not save."""
    parts = _PROGRAMS[name]
    before, after = parts if isinstance(parts, tuple) else (lambda _: None, parts)
    before(program)
    before(twin)
    expected = program.save_at_once(tmp_path / "at once")
    with _copying_held() as may_copy:
        save = program.save_late(tmp_path / "late")
        after(program)
        may_copy.set()
        path = save.wait()
    assert not LATE_READS.are_there
    assert _files(path) == _files(expected)
    after(twin)
    if name != "free":
        for value, wanted in zip(program.values(), twin.values(), strict=True):
            assert_equal(value, wanted)


@pytest.mark.parametrize("strategy", [each.name.lower() for each in ShardingStrategy])
@pytest.mark.parametrize("name", _PROGRAMS)
@distributed(2, 3)
def test_what_is_written_after_the_call_is_not_saved(
    tmp_path: Path, name: str, strategy: str
) -> None:
    """And arrives all the same; under each policy, as some keep shards in full buffers."""
    _check_files(tmp_path, name, _SavedProgram(strategy), _SavedProgram(strategy))


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"amsgrad": True}], ids=str
)
@distributed(2)
def test_a_step_of_lists_makes_the_copies_first(tmp_path: Path, options: dict[str, bool]) -> None:
    """Also after the first one, from which on lists run past the dispatcher."""
    programs = _SavedProgram(**options), _SavedProgram(**options)
    for each in programs:
        each.train()
    _check_files(tmp_path, "step", *programs)


@pytest.mark.parametrize("name", ["step", "edit", "whole", "forward"])
@distributed(2, on_device=True)
def test_offloaded_shards_are_copied_late(tmp_path: Path, name: str) -> None:
    """They are in host memory, with their state, while the device computes."""
    offload = OffloadPolicy(pin_memory=False)
    _check_files(tmp_path, name, _SavedProgram(offload=offload), _SavedProgram(offload=offload))


def _num_late(program: _SavedProgram, path: Path) -> tuple[int, int]:
    """Save, and return how many copies were late, of parameters and of state."""
    found = []
    begin = staging.LateCopies.begin

    def note_and_begin(late: staging.LateCopies) -> None:
        state = len(late._by_storage)
        found.append((sum(map(len, late._by_guard.values())), state))
        begin(late)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_LATE_NBYTES", 0)
        patch.setattr(staging.LateCopies, "begin", note_and_begin)
        save = save_checkpoint(path, program.model, program.optimizer, step=1, async_op=True)
        assert isinstance(save, CheckpointSave)
        save.wait()
    return found[0]


@distributed(2)
def test_only_what_nobody_writes_unseen_is_copied_late(tmp_path: Path) -> None:
    """Where full values share the memory, state alone."""
    program = _SavedProgram()
    num = sum(param._local.numel() > 0 for param in program.params())
    assert num >= 3
    assert _num_late(program, tmp_path) == (num, 2 * num)
    assert _num_late(_SavedProgram("shard_optim"), tmp_path) == (0, 2 * num)
    assert _num_late(_SavedProgram("no_shard"), tmp_path) == (0, 0)
    program.params()[0].to_local()  # of its unit's parameters none is late any more
    program.states()[0].to_local()
    assert _num_late(program, tmp_path) == (num // 3 * 2, 2 * num - 1)


@distributed(2)
def test_ops_are_as_usual_when_the_copies_are_made(tmp_path: Path) -> None:
    """The ways into the rules are exchanged while there is something to copy, and no longer."""
    program = _SavedProgram()
    usual = {name: vars(FlatShard)[name] for name in ("__torch_dispatch__", *DIRECT_OPS)}
    with _copying_held() as may_copy:
        save = program.save_late(tmp_path)
        assert LATE_READS.are_there
        assert all(vars(FlatShard)[name] is not way for name, way in usual.items())
        may_copy.set()
        save.wait()
    assert {name: vars(FlatShard)[name] for name in usual} == usual
    left = [copy._both for handle in get_handles(program.model) for copy in _copies(handle)]
    assert left
    assert set(left) == {None}


def _copies(handle: Any) -> list[Any]:
    return [copy for read in handle.guard._reads for copy in read.args[0]]


@distributed(2)
def test_an_error_of_a_late_copy_is_told_on_all_ranks(tmp_path: Path) -> None:
    """By `wait`; writes go on, and the next save works."""
    program = _SavedProgram()

    def fail(_: object) -> None:
        raise RuntimeError("planned")

    with pytest.MonkeyPatch.context() as patch, _copying_held() as may_copy:
        save = program.save_late(tmp_path)
        if dist.get_rank() == 1:
            patch.setattr(staging._LateCopy, "make_in_thread", fail)
        may_copy.set()
        with pytest.raises(RuntimeError, match=r"a checkpoint was not saved: .*planned"):
            save.wait()
    program.train()
    assert find_checkpoint(tmp_path) is None
    save_checkpoint(tmp_path, program.model, program.optimizer, step=2)
    assert load_checkpoint(tmp_path, program.model, program.optimizer).step == 2


@distributed(2)
def test_an_interrupt_before_the_thread_starts_leaves_nothing_behind(tmp_path: Path) -> None:
    """On one rank; its thread never comes, and writes wait for nobody."""
    program, twin = _SavedProgram(), _SavedProgram()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_LATE_NBYTES", 0)
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, program.model, program.optimizer, step=1, async_op=True)
    assert not LATE_READS.are_there
    for each in (program, twin):
        each.train()
    for value, wanted in zip(program.values(), twin.values(), strict=True):
        assert_equal(value, wanted)


@contextmanager
def _interrupted() -> Iterator[None]:
    yield
    raise KeyboardInterrupt


@distributed(2)
def test_an_interrupt_of_a_copy_leaves_it_to_the_next_write(tmp_path: Path) -> None:
    """The write that it interrupts does not happen."""
    program = _SavedProgram()
    expected = program.save_at_once(tmp_path / "at once")
    with _copying_held() as may_copy:
        save = program.save_late(tmp_path / "late")
        tensors = [x for x in [*program.params(), *program.states()] if x._local.numel()]
        for each in tensors:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(staging, "no_dispatch", _interrupted)
                with pytest.raises(KeyboardInterrupt), torch.no_grad():
                    each.mul_(3)
        with torch.no_grad():
            for each in tensors:
                each.mul_(3)
        may_copy.set()
        assert _files(save.wait()) == _files(expected)


@pytest.mark.filterwarnings("ignore:.*fork")
@distributed(2)
def test_a_fork_writes_its_own_memory_at_once(tmp_path: Path) -> None:
    """It has no thread that would ever make a copy, nor one that holds its lock."""
    program = _SavedProgram()
    with _copying_held() as may_copy:
        save = program.save_late(tmp_path)
        locks = [copy._lock for handle in get_handles(program.model) for copy in _copies(handle)]
        for lock in locks:
            lock.acquire()
        child = os.fork()
        if child == 0:
            with torch.no_grad():
                for each in [*program.params(), *program.states()]:
                    each.mul_(3)
            os._exit(0)
        for lock in locks:
            lock.release()
        assert os.waitpid(child, 0)[1] == 0
        may_copy.set()
        save.wait()


def _unscale(model: nn.Module) -> None:
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(1))
    scaler.unscale_(torch.optim.SGD(model.parameters()))


def _edit_gradients(model: nn.Module) -> None:
    with unshard_params(model, with_grads=True):
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(3)


_GRADIENT_EDITS: dict[str, Callable[[nn.Module], object]] = {
    "backward": lambda model: model(rank_input(3, 7)).sum().backward(),
    "clip": lambda model: clip_grad_norm_(model, 1e-3),
    "torch's clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "unscale": _unscale,
    "whole": _edit_gradients,
}


@pytest.mark.parametrize("name", _GRADIENT_EDITS)
@distributed(2)
def test_saved_gradients_are_copied_before_they_change(tmp_path: Path, name: str) -> None:
    """A run that accumulates may save them; the library writes to their slices without an op."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(7, 7, bias=False) for _ in range(3))))
    for layer in model:
        fully_shard(layer)
    model(rank_input(3, 7)).square().mean().backward()
    extra = {name: param.grad for name, param in model.named_parameters()}
    expected = save_checkpoint(tmp_path / "at once", model, step=1, extra=extra)
    assert isinstance(expected, Path)
    with _copying_held() as may_copy:
        save = save_checkpoint(tmp_path / "late", model, step=1, extra=extra, async_op=True)
        assert isinstance(save, CheckpointSave)
        assert LATE_READS.are_there
        _GRADIENT_EDITS[name](model)
        may_copy.set()
        assert _files(save.wait()) == _files(expected)


@distributed(2)
def test_threads_that_write_one_shard_wait_for_its_copy(tmp_path: Path) -> None:
    """Each of them until it is made."""
    program = _SavedProgram()
    expected = program.save_at_once(tmp_path / "at once")
    errors: list[BaseException] = []
    make = staging._LateCopy.make

    def make_slowly(copy: staging._LateCopy) -> None:
        make(copy)
        time.sleep(0.02)  # in which the other thread comes to the same place

    def write() -> None:
        try:
            with torch.no_grad():
                for param in program.params():
                    param.add_(1)
        except BaseException as error:
            errors.append(error)

    with pytest.MonkeyPatch.context() as patch, _copying_held() as may_copy:
        patch.setattr(staging._LateCopy, "make", make_slowly)
        save = program.save_late(tmp_path / "late")
        threads = [threading.Thread(target=write) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        may_copy.set()
        assert _files(save.wait()) == _files(expected)
    assert not errors


@distributed(2)
def test_the_memory_of_a_save_is_freed_by_that_of_another_model(tmp_path: Path) -> None:
    """Though nobody writes to the parameters, which are frozen."""
    program, other = _SavedProgram(), _SavedProgram()
    with _copying_held() as may_copy:
        save = program.save_late(tmp_path)
        copies = [each for handle in get_handles(program.model) for each in _copies(handle)]
        memory = [weakref.ref(each._both[1]) for each in copies if each._both is not None]
        may_copy.set()
        save.wait()
    assert memory
    save_checkpoint(tmp_path, nn.ModuleDict({"other": other.model}), step=2, async_op=True)
    del save
    gc.collect()
    assert [each() for each in memory if each() is not None] == []


@distributed(2)
def test_a_handler_may_wait_for_the_save_and_write(tmp_path: Path) -> None:
    """A signal comes while the step makes a copy; SIGTERM's handler waits, and writes."""
    program = _SavedProgram()
    expected = program.save_at_once(tmp_path / "at once")
    saves: list[CheckpointSave] = []
    found: list[Path] = []

    @contextmanager
    def handled() -> Iterator[None]:
        if threading.current_thread() is threading.main_thread() and not found:
            may_copy.set()
            found.append(Path())
            found.append(saves[0].wait())
            with torch.no_grad():
                for each in [*program.params(), *program.states()]:
                    each.mul_(3)
        with no_dispatch():
            yield

    with pytest.MonkeyPatch.context() as patch, _copying_held() as may_copy:
        patch.setattr(staging, "no_dispatch", handled)
        save = program.save_late(tmp_path / "late")
        saves.append(save)
        program.train()
        assert _files(found[1]) == _files(expected)


@distributed(2)
def test_ranks_stay_in_step_when_only_some_have_made_their_copies(tmp_path: Path) -> None:
    """Collectives of ops have the same names, whichever way the ops take."""
    program, twin = _SavedProgram(), _SavedProgram()
    for each in (program, twin):
        each.model(rank_input(3, 7)).square().mean().backward()
    with _copying_held() as may_copy:
        save = program.save_late(tmp_path)
        if dist.get_rank() == 0:
            may_copy.set()
            while LATE_READS.are_there:
                time.sleep(0.01)
        for each in (program, twin):
            nn.utils.clip_grad_norm_(each.model.parameters(), 0.01)
            with torch.no_grad():
                for x in [*each.params(), *each.states()]:
                    x.div_(x.norm())
                    if x.dim() == 2:
                        x.mul_(x.t())  # gathers
            each.optimizer.step()
        assert LATE_READS.are_there == (dist.get_rank() == 1)
        may_copy.set()
        save.wait()
    for value, wanted in zip(program.values(), twin.values(), strict=True):
        assert_equal(value, wanted)
