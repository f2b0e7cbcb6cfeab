"""Checkpoints that are damaged, foreign or hostile, and saves that fail: nothing is changed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Partial, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import Replicate
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import (
    FlatShard,
    find_checkpoint,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)
from composable_shard.checkpoint import files
from composable_shard.conversion import describe_checkpoint
from composable_shard.layout import Region
from composable_shard.state_dict.json_tree import decode, encode, merge
from composable_shard.tensor.operands import find_places
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed, run_ranks
from tests.programs.models import Net, rank_input, shard_blocks

# --- reading ---


def _trained_net(seed: int = 0, num_blocks: int = 3) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net(num_blocks)
    model.register_buffer("seen", torch.tensor(seed))
    shard_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(rank_input(4, 5, step=seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [v for each in optimizer.state.values() for v in each.values()]
    tensors = [*model.state_dict().values(), *state]
    return [(t.to_local() if isinstance(t, FlatShard) else t).detach().clone() for t in tensors]


def _save_trained(path: Path, step: int = 1) -> None:
    save_checkpoint(path, *_trained_net(), step=step, extra={"note": "x"})


def _refused_load(path: Path, **options: Any) -> str:
    """Return the error of loading, after which everything is as before."""
    model, optimizer = _trained_net(seed=1)
    before, rng = _values(model, optimizer), torch.get_rng_state()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the caller matches
        load_checkpoint(path, model, optimizer, **options)
    for value, expected in zip(_values(model, optimizer), before, strict=True):
        assert_equal(value, expected)
    assert_equal(torch.get_rng_state(), rng)
    model(rank_input(4, 5)).sum().backward()
    optimizer.step()
    return str(caught.value)


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def _rewrite(path: Path, edit: Callable[[Any], object]) -> None:
    """Edit metadata and make its checksum right again, as a forger would."""
    content = json.loads(path.read_bytes())
    edit(content)
    del content["crc32"]
    rest = (json.dumps(content)[1:] + "\n").encode()
    path.write_bytes(f'{{"crc32":"{zlib.crc32(rest):08x}",\n'.encode() + rest)


def _first_piece(content: Any) -> Any:
    return content["tensors"]["model/inp.weight"]["pieces"][0]


_FILE = "rank_1_of_2.safetensors"
_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "the last byte": (lambda f: _flip(f / _FILE, -1), rf"{_FILE} is damaged.*checksum"),
    "a byte in the middle": (lambda f: _flip(f / _FILE, 9000), rf"{_FILE} is damaged"),
    "cut": (lambda f: os.truncate(f / _FILE, 9000), rf"{_FILE} is damaged: expected \d+ bytes"),
    "longer": (lambda f: (f / _FILE).write_bytes(b"x" * 99999), rf"{_FILE} is damaged"),
    "missing": (lambda f: (f / _FILE).unlink(), rf"can't read .*{_FILE}"),
    "a directory": (
        lambda f: ((f / _FILE).unlink(), (f / _FILE).mkdir()),
        rf"(can't read .*|{_FILE} is damaged)",
    ),
    "metadata: a digit": (lambda f: _flip(f / "metadata.json", 300), "metadata.json is damaged"),
    "metadata: cut": (lambda f: os.truncate(f / "metadata.json", 300), "metadata.json is damaged"),
    "metadata: empty": (lambda f: os.truncate(f / "metadata.json", 0), "is not the metadata"),
    "metadata: foreign": (lambda f: (f / "metadata.json").write_text("{}"), "is not the metadata"),
    "metadata: binary": (
        lambda f: (f / "metadata.json").write_bytes(bytes(range(256))),
        "is not the metadata",
    ),
    "latest: foreign": (lambda f: (f.parent / "latest").write_text("../x\n"), "latest is damaged"),
}
_FORGERIES: dict[str, tuple[Callable[[Any], object], str]] = {
    "another version": (lambda c: c.update(version=99), "version 99, expected"),
    "another format": (lambda c: c.update(format="x"), "format 'x'"),
    "a path": (lambda c: c["files"][0].__setitem__(0, "../x"), r"got '../x'"),
    "an absolute path": (
        lambda c: c["files"][0].__setitem__(0, "/etc/passwd"),
        "a data file of one",
    ),
    "a file too few": (lambda c: c["files"].pop(), "IndexError"),
    "in another file": (lambda c: _first_piece(c).__setitem__(0, 9), "files 9 to 1?[09] of 2"),
    "in no file": (lambda c: _first_piece(c).__setitem__(0, -1), "in files -1 to "),
    "too often": (lambda c: _first_piece(c).__setitem__(3, 10**9), "inside the tensor, got"),
    "often nothing": (
        lambda c: _first_piece(c).__setitem__(slice(1, 5), [0, 0, 10**9, 0]),
        "has 1000000000 pieces in files 0 to 0 of 2",
    ),
    "outside of the tensor": (lambda c: _first_piece(c).__setitem__(2, 10**9), "to \\d{10} of"),
    "negative": (lambda c: _first_piece(c).__setitem__(1, -8), "at least 0, got -8"),
    "a text": (lambda c: _first_piece(c).__setitem__(0, "0"), "TypeError"),
    "a number as a name": (
        lambda c: c["tree"]["optimizer"][""]["param_groups"][0]["params"].append(3),
        "metadata.json is damaged: TypeError: expected names of parameters, got",
    ),
    "half a file": (lambda c: _first_piece(c).__setitem__(0, 0.5), "TypeError"),
    "nothing": (lambda c: _first_piece(c).extend([[[0, 0], [0, 0]]]), "inside the tensor, got"),
    "a piece of nothing": (
        lambda c: _first_piece(c).__setitem__(slice(1, 6), [0, 0, 1, 0, [[0, 0], [0, 0]]]),
        "has a piece without elements",
    ),
    "a longer index": (lambda c: c["files"][0].__setitem__(2, 10**9), "more than its"),
    "a shorter index": (lambda c: c["files"][1].__setitem__(3, 0), f"{_FILE}.* of its index"),
    "other bytes as generators": (
        lambda c: c["tensors"].update(
            {f"rng/{rank}": c["tensors"]["optimizer/state/inp.weight/step"] for rank in range(2)}
        ),
        "damaged",
    ),
    "a hole": (lambda c: c["tensors"]["model/inp.weight"]["pieces"].pop(), "are in no file"),
    "another dtype": (
        lambda c: c["tensors"]["model/inp.weight"].update(dtype="Tensor"),
        "KeyError",
    ),
    "no tree": (lambda c: c.update(tree=[]), "expected a dict as tree"),
    "no model": (lambda c: c["tree"].pop("model"), "has no entry 'model'"),
    "kinds that are a list": (lambda c: c["tree"].update(optimizer_kinds=[""]), "damaged"),
    "no groups": (lambda c: c["tree"]["optimizer"][""].pop("param_groups"), "damaged"),
    "an unknown tensor": (
        lambda c: c["tree"]["model"]["inp.bias"].update(__tensor__="x"),
        "'inp.bias' has no data",
    ),
    "a strange mark": (
        lambda c: c["tree"].update(extra={"__tuple__": 5, "__set__": 7}),
        "damaged",
    ),
}


def _rewrite_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the header of a data file, and make the checksum of its index right again."""
    path = folder / _FILE
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    content = json.loads(data[8:start])
    edit(content)
    text = json.dumps(content).encode()
    header = len(text).to_bytes(8, "little") + text
    path.write_bytes(header + data[start:])

    def describe(metadata: Any) -> None:
        line = metadata["files"][1]
        line[1:3] = len(header) + len(data) - start, len(header)
        line[4] = f"{zlib.crc32(data[-line[3] :], zlib.crc32(header)):08x}"

    _rewrite(folder / "metadata.json", describe)


def _own_piece(content: dict[str, Any]) -> dict[str, Any]:
    return next(each for key, each in content.items() if key.startswith("model/inp.weight["))


_INDEX_FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "index: outside": (
        lambda c: _own_piece(c).update(data_offsets=[10**9, 10**9 + 8]),
        rf"{_FILE} is damaged: 'model/inp.weight\[.*' has 8 bytes at 1000",
    ),
    "index: negative": (lambda c: _own_piece(c).update(data_offsets=[-8, 0]), "at least 0, got -8"),
    "index: shorter": (
        lambda c: _own_piece(c)["data_offsets"].__setitem__(1, _own_piece(c)["data_offsets"][0]),
        rf"{_FILE} is damaged: it has \d+ checksums for \d+ chunks",
    ),
    "index: another name": (
        lambda c: c.update({"x": c.pop(next(k for k in c if k.startswith("model/inp.weight[")))}),
        rf"{_FILE} is damaged",
    ),
    "index: a list": (lambda c: c.update(more=[1]), rf"{_FILE} is damaged: TypeError"),
}


def _refuse_all(root: Path, names: list[str]) -> list[str]:
    return [_refused_load(root / name) for name in names]


def test_damage_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    """All ranks get the same ValueError, whichever rank has found it."""
    run_ranks(2, _save_trained, tmp_path / "good")
    for name, (damage, _) in _DAMAGES.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        damage(tmp_path / name / "step_00000001")
    for name, (edit, _) in _FORGERIES.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        _rewrite(tmp_path / name / "step_00000001" / "metadata.json", edit)
    for name, (edit, _) in _INDEX_FORGERIES.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        _rewrite_index(tmp_path / name / "step_00000001", edit)
    cases = _DAMAGES | _FORGERIES | _INDEX_FORGERIES
    expected = {name: message for name, (_, message) in cases.items()}
    errors, others = run_ranks(2, _refuse_all, tmp_path, list(expected))
    assert errors == others
    for (name, message), error in zip(expected.items(), errors, strict=True):
        assert re.search(message, error), f"{name}: {error}"
        assert str(tmp_path / name) in error or name == "latest: foreign"
    for name in ("a text", "half a file", "a piece of nothing"):  # also where nothing is loaded
        with pytest.raises(ValueError, match=rf"{name}.*metadata.json is damaged: "):
            describe_checkpoint(tmp_path / name)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    """A pickle in the place of any file, in a string, and in the place of a tensor's bytes."""
    run_ranks(2, _save_trained, tmp_path / "good")
    mark = tmp_path / "executed"
    bomb = pickle.dumps(_Bomb(mark))
    names = ["latest", "step_00000001/metadata.json", f"step_00000001/{_FILE}"]
    places = [tmp_path / name.replace("/", "_") for name in names]
    for name, place in zip(names, places, strict=True):
        shutil.copytree(tmp_path / "good", place)
        size = (place / name).stat().st_size
        (place / name).write_bytes(bomb.ljust(size, b"."))
    for error in run_ranks(2, _refuse_all, tmp_path, [place.name for place in places])[0]:
        assert "damaged" in error or "is not the metadata" in error

    def plant(content: Any) -> None:
        content["tree"]["extra"] = {"__bytes__": __import__("base64").b64encode(bomb).decode()}

    _rewrite(tmp_path / "good" / "step_00000001" / "metadata.json", plant)
    assert run_ranks(2, _load_extra, tmp_path / "good") == [bomb, bomb]
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()  # so it would have


def _load_extra(path: Path) -> Any:
    return load_checkpoint(path, *_trained_net()).extra


@distributed(2)
def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """Missing, unexpected, of another shape or dtype; `strict=False` takes what is common."""
    model, optimizer = _trained_net()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    larger = Net(4)
    with pytest.raises(ValueError, match=r"missing: blocks\.3\..*unexpected: seen\. Pass strict"):
        load_checkpoint(tmp_path, larger)
    load_checkpoint(tmp_path, larger, strict=False)
    assert_equal(larger.inp.weight.detach(), model.inp.weight.full_tensor())
    other = Net()
    other.register_buffer("seen", torch.tensor(0))
    other.out = nn.Linear(15, 4)
    shard_blocks(other)
    with pytest.raises(ValueError, match=r"'out.weight' was saved with shape \(3, 15\), the model"):
        load_checkpoint(tmp_path, other)
    half = Net().to(torch.float16)
    half.register_buffer("seen", torch.tensor(0))
    with pytest.raises(ValueError, match=r"saved as torch.float32, .* strict=False casts"):
        load_checkpoint(tmp_path, half)
    load_checkpoint(tmp_path, half, strict=False)
    assert_equal(half.inp.weight.detach(), model.inp.weight.full_tensor().half())
    double = Net().to(torch.float64)
    double.register_buffer("seen", torch.tensor(0))
    load_checkpoint(tmp_path, double)  # exact
    assert_equal(double.inp.weight.detach(), model.inp.weight.full_tensor().double())
    with pytest.raises(ValueError, match=r"other parameters in an optimizer .* unexpected: inp"):
        load_checkpoint(tmp_path, model, torch.optim.AdamW(model.blocks.parameters()))
    groups = [{"params": list(model.inp.parameters())}, {"params": list(model.out.parameters())}]
    save_checkpoint(tmp_path, model, torch.optim.SGD(groups, lr=1.0), step=2)
    params = [*model.inp.parameters(), *model.out.parameters()]
    with pytest.raises(ValueError, match="are in different groups of the state dict"):
        load_checkpoint(tmp_path, model, torch.optim.SGD(params, lr=1.0))
    with torch.device("meta"):
        unborn = Net()
    with pytest.raises(RuntimeError, match=r"on the meta device, and has no .* Call .*to_empty"):
        load_checkpoint(tmp_path, unborn, strict=False)
    shard_blocks(unborn)
    unborn.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"\['table'\] are on the meta device, and the checkpoint"):
        load_checkpoint(tmp_path, unborn, strict=False)
    assert all(param.is_meta for param in unborn.parameters())


@pytest.mark.fast
@distributed(2)
def test_what_one_rank_can_not_read_no_rank_loads(tmp_path: Path) -> None:
    """Its error is raised on all, and the next load works."""
    save_checkpoint(tmp_path, *_trained_net(), step=1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            fail, work = _failing_call(errno.EACCES), os.open
            patch.setattr(
                "composable_shard.checkpoint.reader.os.open",
                lambda path, *args: (fail if "rank" in path.name else work)(path, *args),
            )
        error = _refused_load(tmp_path)
    assert re.search(r"on ranks \[1\]: can't read .*rank_\d_of_2.*Permission denied", error)
    load_checkpoint(tmp_path, *_trained_net(seed=1))


@pytest.mark.fast
@distributed(2)
def test_ranks_that_see_other_metadata_load_nothing(tmp_path: Path) -> None:
    """A rank that reads another file of the name, as one whose disk is its own."""
    path = save_checkpoint(tmp_path, *_trained_net(), step=1)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            text = (path / "metadata.json").read_bytes()
            other = text.replace(b'"step":1', b'"step":2')
            patch.setattr("composable_shard.checkpoint.reader.read_bytes", lambda _: other)
        error = _refused_load(tmp_path)
    assert re.search(
        r"on ranks \[1\]: .*metadata.json is another file on this rank than on rank 0: give", error
    )
    load_checkpoint(tmp_path, *_trained_net(seed=1))


@distributed(2)
def test_files_of_another_step_are_not_taken(tmp_path: Path) -> None:
    """Of the same run, with the same names and lengths."""
    model, optimizer = _trained_net()
    first = save_checkpoint(tmp_path, model, optimizer, step=1)
    model(rank_input(4, 5)).sum().backward()
    optimizer.step()
    second = save_checkpoint(tmp_path, model, optimizer, step=2)
    dist.barrier()
    assert isinstance(first, Path)
    assert isinstance(second, Path)
    if dist.get_rank() == 0:
        shutil.copy(first / _FILE, second / _FILE)
    dist.barrier()
    assert f"{second / _FILE} is damaged" in _refused_load(tmp_path)


@distributed(2)
def test_which_checkpoint_is_found(tmp_path: Path) -> None:
    """The latest, by step, one directory of it; saving a step again makes another."""
    model, optimizer = _trained_net()
    with pytest.raises(ValueError, match="there is no complete checkpoint in"):
        load_checkpoint(tmp_path, model)
    paths = [save_checkpoint(tmp_path, model, optimizer, step=step) for step in (5, 7, 5)]
    assert [path.name for path in paths] == ["step_00000005", "step_00000007", "step_00000005.1"]
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path, 5) == paths[2]
    assert load_checkpoint(tmp_path, model, step=7).path == paths[1]
    assert load_checkpoint(paths[0], model).path == paths[0]
    with pytest.raises(ValueError, match="no complete checkpoint of step 6"):
        load_checkpoint(tmp_path, model, step=6)
    is_first = dist.get_rank() == 0
    text: Any = "seven"
    seven: Any = torch.tensor(7) if is_first else 7
    assert load_checkpoint(tmp_path, model, step=seven).path == paths[1]
    with pytest.raises(ValueError, match=r"expected step to be an int, .*, got 'seven'"):
        load_checkpoint(tmp_path, model, step=text)
    with pytest.raises(ValueError, match=r"different values of step: \[7, \"'seven'\"\]"):
        load_checkpoint(tmp_path, model, step=7 if is_first else text)
    for options in ({"strict": is_first}, {"step": 5 if is_first else 7}):
        with pytest.raises(ValueError, match=f"different values of {next(iter(options))}: "):
            load_checkpoint(tmp_path, model, **options)
    dist.barrier()
    if is_first:
        (tmp_path / "latest").unlink()
        (paths[0] / "metadata.json").unlink()
    dist.barrier()
    assert load_checkpoint(tmp_path, model).path == paths[1]  # the highest complete one
    kept = save_checkpoint(tmp_path, model, optimizer, step=1, keep_last=1)
    dist.barrier()
    names = sorted(path.name for path in tmp_path.iterdir() if path != paths[0])
    assert names == [".lock", "latest", "step_00000001"]
    assert find_checkpoint(tmp_path) == kept


# --- writing ---


def _failing_call(kind: int) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise OSError(kind, os.strerror(kind))

    return fail


_BY_ALL = ["create", "write", "sync"]  # rank 0 alone does the rest
_BY_FIRST = [n for n in files.__all__ if n not in (*_BY_ALL, "list_names", "close")]


@pytest.mark.parametrize(
    ("name", "rank"), [*[(n, r) for n in _BY_ALL for r in (0, 1)], *[(n, 0) for n in _BY_FIRST]]
)
@distributed(2)
def test_a_save_that_fails_leaves_what_was_there(name: str, rank: int, tmp_path: Path) -> None:
    """Whatever operation fails on whichever rank: all ranks raise, and the next save works."""
    model, optimizer = _trained_net()
    first = save_checkpoint(tmp_path, model, optimizer, step=1)
    kind = errno.ENOSPC if name == "write" else errno.EACCES
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(files, name, _failing_call(kind))
        if not name.startswith("remove"):
            with pytest.raises(RuntimeError, match=os.strerror(kind)):
                save_checkpoint(tmp_path, model, optimizer, step=2)
            assert find_checkpoint(tmp_path) == first
        else:
            save_checkpoint(tmp_path, model, optimizer, step=2)
    dist.barrier()
    second = save_checkpoint(tmp_path, model, optimizer, step=3)
    dist.barrier()
    assert load_checkpoint(tmp_path, model, optimizer).path == second
    left = {path.name for path in tmp_path.iterdir()} - {"step_00000002"}
    assert left == {".lock", "latest", first.name, second.name}


@pytest.mark.parametrize("rank", [0, 1])
@distributed(2)
def test_any_one_operation_of_a_save_may_fail(rank: int, tmp_path: Path) -> None:
    """Nothing is left of the save, and the one before is found: the newest, of the lower step."""
    model = fully_shard(nn.Linear(4, 4))
    for step in (5, 3):
        newest = save_checkpoint(tmp_path, model, step=step)
    before = sorted(os.listdir(tmp_path))
    real, done, number = {name: getattr(files, name) for name in files.__all__}, 0, -1

    def fail_once(name: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done == number + 1:
                if name == "close":
                    real[name](*args)
                raise OSError(errno.EIO, "planned")
            return real[name](*args, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            for name in files.__all__:
                patch.setattr(files, name, fail_once(name))
        save_checkpoint(tmp_path / "other", model, step=4)
        counts: list[int] = [0, 0]
        dist.all_gather_object(counts, done)
        for number in range(counts[rank]):
            done = 0
            with pytest.raises(RuntimeError, match=r"planned"):
                save_checkpoint(tmp_path, model, step=4)
            dist.barrier()  # rank 0 removes it when all know
            assert sorted(set(os.listdir(tmp_path)) - {"other"}) == before, number
            assert find_checkpoint(tmp_path) == newest, number
            dist.barrier()
    assert counts[rank] >= 4


@distributed(2)
def test_an_old_checkpoint_that_stays_is_a_warning(tmp_path: Path) -> None:
    """The save has succeeded."""
    model, optimizer = _trained_net()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(files, "remove_file", _failing_call(errno.EACCES))
            with pytest.warns(RuntimeWarning, match="could not remove an old checkpoint"):
                save_checkpoint(tmp_path, model, optimizer, step=2, keep_last=1)
        else:
            save_checkpoint(tmp_path, model, optimizer, step=2, keep_last=1)
    assert load_checkpoint(tmp_path, model).step == 2


@distributed(2)
def test_each_rank_removes_its_own_file_of_an_old_checkpoint(tmp_path: Path) -> None:
    """Rank 0 removes the rest, and what another rank could not remove."""
    model, optimizer = _trained_net()
    rank, removed = dist.get_rank(), list[str]()

    def remove(path: Path) -> None:
        removed.append(path.name)
        if rank == 1 and path.parent.name == ".tmp_step_00000002":
            raise OSError(errno.EACCES, "planned")
        os.unlink(path)

    for step in (1, 2):
        old = save_checkpoint(tmp_path, model, optimizer, step=step)
        if rank == 0:
            (old / "rank_2_of_3.safetensors").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "remove_file", remove)
        save_checkpoint(tmp_path, model, optimizer, step=3, keep_last=1)
    own, other = (f"rank_{each}_of_2.safetensors" for each in (rank, 1 - rank))
    assert removed[:2] == [own, own]
    assert sorted(removed[2:]) == (
        ["metadata.json"] * 2 + [other] + ["rank_2_of_3.safetensors"] * 2 if rank == 0 else []
    )
    dist.barrier()
    assert {name for name in os.listdir(tmp_path) if "step" in name} == {"step_00000003"}


class _Thing:
    pass


class _Saved:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"a": self.value}


@distributed(2)
def test_what_can_not_be_saved_is_refused(tmp_path: Path) -> None:
    """On all ranks, also where one rank alone has it."""
    model, optimizer = _trained_net()
    rank = dist.get_rank()
    term = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,)), [Replicate()])
    term._spec.placements = (Partial(),)
    faster = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"extra": {"a": [1, {"b": _Thing() if rank else 3}]}}, r"'extra/a/1/b', a .*_Thing"),
        ({"extra": {_Thing(): 1}}, "'extra': a key of it is a _Thing"),
        ({"extra": [term]}, "DTensor of shards or replicas"),
        ({"step": rank}, r"different values of step: \[0, 1\]"),
        ({"step": -1}, r"number of steps taken, an int .*, got -1"),
        ({"step": "a"}, r"an int of at least 0 and below 10\*\*12, got 'a'"),
        ({"keep_last": 0}, "keep_last to be at least 1"),
        ({"scheduler": _Saved(torch.zeros(2 + rank))}, r"rank 1 has 'scheduler/a' as .*another"),
        ({"extra": [2**20_000 if rank else 3]}, r"can't save 'extra/0', a builtins.int"),
        ({"extra": {(torch.ones(1),): 1}}, "'extra': a key of it has a tensor in it"),
        ({"extra": torch.eye(2).to_sparse()}, r"'extra', a Tensor of the layout torch.sparse_coo"),
        ({"extra": torch.empty(2, device="meta")}, "'extra', a Tensor on the meta device"),
        ({"extra": TwoTensor(torch.ones(2), torch.ones(2))}, "'extra', a TwoTensor of the layout"),
        (
            {"scheduler": {1: _Saved(0), "1": _Saved(1)}},
            r"names that differ as text, got \[1, '1'\]",
        ),
        ({"optimizer": optimizer if rank else None}, r"different optimizers: \[\[\], \[''\]\]"),
        ({"optimizer": faster}, r"rank 1 steps '.*' with lr=0.2, another rank with 0.1: all ranks"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            save_checkpoint(tmp_path, model, **{"step": 1, "optimizer": optimizer, **options})
    assert list(tmp_path.iterdir()) == []
    kinds = {"share memory": torch.ones(1).expand(4)}
    with torch.inference_mode():
        kinds["in inference mode"] = torch.ones(4)
    for text, buffer in kinds.items():
        model.register_buffer("buffer", torch.ones(4))
        path = save_checkpoint(tmp_path / text, model, step=1)
        model.register_buffer("buffer", buffer)
        with pytest.raises(ValueError, match=f"can't save 'buffer', which .*{text}"):
            save_checkpoint(tmp_path, model, step=1)
        with pytest.raises(ValueError, match=f"does not fit the model: 'buffer' .*{text}"):
            load_checkpoint(path, model)


# --- parts ---


@pytest.mark.fast
def test_a_tree_comes_back_as_it_was() -> None:
    """All kinds of values, and dicts that look like our own marks."""
    tree = {
        "numbers": [0, -5, 2**70, 0.1, float("inf"), True, None],
        "text": "\u00e9\n",
        "bytes": bytes(range(256)),
        "nested": ((), [], {}, {1: (2,), None: 3, "x": {4, 5}, (1, 2): 6, 1.5: 7}),
        "marks": {"__tensor__": "x", "other": 1},
        "counter": Counter({30: 1, 80: 2}),
        "ordered": OrderedDict(b=1, a=2),
        "frozen": {frozenset({1, (2,)}), frozenset()},
        "frozen key": {(1, frozenset({2})): 3},
    }
    assert decode(json.loads(json.dumps(encode(tree, "t", {}))), lambda name: None) == tree
    found = decode(encode([float("nan")], "t", {}), lambda name: None)
    assert found[0] != found[0]
    tensors: dict[str, Tensor] = {}
    weird = {
        "a/b": torch.ones(1),
        "a": {"b": torch.zeros(1), 1: torch.ones(2)},
        "#1": torch.ones(3),
    }
    encoded = encode(weird, "t", tensors)
    assert len(tensors) == 4
    assert decode(encoded, tensors.__getitem__) == weird
    trees = {"a": 1, "b": {"c": 2}}, {"a": 5, "b": {"d": 3}, "e": [4]}
    assert merge(*trees, depth=2) == {"a": 1, "b": {"c": 2, "d": 3}, "e": [4]}
    assert merge(*trees, depth=1) == {"a": 1, "b": {"c": 2}, "e": [4]}
    assert merge(*trees, depth=0) == trees[0]


def test_places_are_those_of_an_index_tensor() -> None:
    """Random boxes, orders and ranges, against torch's own indexing."""
    torch.manual_seed(0)
    for _ in range(300):
        shape = [int(n) for n in torch.randint(1, 5, (int(torch.randint(0, 4, ())),))]
        logical = torch.arange(torch.Size(shape).numel()).view(shape)
        regions, numbers = [], []
        for _ in range(2):
            cuts = [sorted(torch.randint(0, size + 1, (2,)).tolist()) for size in shape]
            order = torch.randperm(len(shape)).tolist()
            inside = logical[tuple(slice(*cut) for cut in cuts)].permute(order).reshape(-1)
            start, end = sorted(torch.randint(0, inside.numel() + 1, (2,)).tolist())
            regions.append(Region(tuple(map(tuple, cuts)), tuple(order), start, end))
            numbers.append(inside[start:end])
        places, sources = find_places(*regions, 0, regions[0].numel)
        assert_equal(numbers[0][places], numbers[1][sources])
        assert len(places) == len(set(numbers[0].tolist()) & set(numbers[1].tolist()))
