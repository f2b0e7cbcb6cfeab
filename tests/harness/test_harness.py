"""The harness keeps its promises, so that a green test of the package means something."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.conftest import NEEDS_GPU
from tests.harness import ranks
from tests.harness.assertions import assert_equal
from tests.harness.memory import peak_bytes
from tests.harness.ranks import RankError, distributed, run_processes, run_ranks

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def _rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def _gather_ranks(*, offset: int) -> list[int]:
    mine = torch.tensor([dist.get_rank() + offset])
    gathered = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [int(rank) for rank in gathered]


def _random() -> float:
    return torch.rand(1).item()


def _fail_on(*ranks: int) -> None:
    if dist.get_rank() in ranks:
        print("printed by", dist.get_rank())
        raise KeyError(f"broken on {dist.get_rank()}")


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def _compare(left: int, right: int) -> None:
    total = left + right
    assert total == left


def _crash() -> None:
    ctypes.string_at(0)


def _set_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_TEST", "set")


def _variable() -> str | None:
    return os.environ.get("HARNESS_TEST")


def _warn() -> None:
    warnings.warn("a warning nobody expects", UserWarning, stacklevel=1)


class _FailsInFinalizer:
    def __del__(self) -> None:
        raise ValueError("raised in a finalizer")


def _fail_in_finalizer() -> None:
    _FailsInFinalizer()


def _return_function() -> object:
    return lambda: None


def _make_groups(num_groups: int) -> None:
    for _ in range(num_groups):
        dist.new_group()


def _skip_a_barrier() -> None:
    if dist.get_rank() == 0:
        dist.barrier(async_op=True)


def _rank_error(world_size: int, fn: object, *args: object, timeout: float = 60.0) -> RankError:
    with pytest.raises(RankError) as caught:
        run_ranks(world_size, fn, *args, timeout=timeout)  # type: ignore[arg-type]
    return caught.value


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(_is_running(pid) for pid in pids)


def _run_pytest(
    tmp_path: Path, source: str, *options: str, env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run pytest with the project's conftest and settings on one more test file.

    Returns the exit status and what it prints. It runs in a fork, which has imported torch.
    """
    (tmp_path / "test_inner.py").write_text(textwrap.dedent(source))
    args = ["-p", "tests.conftest", f"--rootdir={ROOT}", f"-c{ROOT / 'pyproject.toml'}"]
    args += ["-pno:cacheprovider", str(tmp_path), *options]
    return run_processes([{"CI": "", **(env or {})}], _run_pytest_here, args, timeout=100)[0]


def _run_pytest_here(args: list[str]) -> tuple[int, str]:
    os.chdir(ROOT)
    ranks._PRELOADED, ranks.NUM_SERVERS = (), 1  # which start sooner
    ranks._pools = ranks._Pools()  # the servers of the test's own process are not this one's
    with redirect_stdout(io.StringIO()) as output:
        status = pytest.main(args)
    return int(status), output.getvalue()


# --- results and reuse ---


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    """The list index is the rank."""
    ranks = [rank for rank, _ in run_ranks(world_size, _rank_and_pid)]
    assert ranks == list(range(world_size))


def test_workers_are_reused() -> None:
    """A second call runs in the same processes."""
    assert run_ranks(2, _rank_and_pid) == run_ranks(2, _rank_and_pid)


def test_neighbours_have_different_fork_servers() -> None:
    """Ranks that share hash seeds and addresses would hide an order that depends on them."""
    servers = run_ranks(3, os.getppid)
    assert len({*servers[:2], os.getpid()}) == 3
    assert servers[2] == servers[0]
    assert run_ranks(2, os.getppid) == servers[:2]


def test_workers_are_not_the_parent() -> None:
    """Every rank is a process of its own."""
    pids = {pid for _, pid in run_ranks(2, _rank_and_pid)} | {os.getpid()}
    assert len(pids) == 3


def test_collectives_work_on_the_default_group() -> None:
    """Ranks reach each other, and keyword arguments reach them."""
    assert run_ranks(3, _gather_ranks, offset=10) == [[10, 11, 12]] * 3


@pytest.mark.fast
def test_every_call_starts_with_the_same_seed() -> None:
    """Random numbers depend neither on the rank nor on earlier calls."""
    torch.manual_seed(0)
    assert run_ranks(2, _random) + run_ranks(2, _random) == [_random()] * 4


def test_pool_with_many_groups_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process groups, which nobody can safely destroy, do not pile up for ever."""
    before = run_ranks(2, _rank_and_pid)
    monkeypatch.setattr(ranks, "MAX_NUM_GROUPS", 3)
    run_ranks(2, _make_groups, 4)
    assert not any(_is_running(pid) for _, pid in before)


# --- failures ---


def test_report_holds_the_traceback_of_the_failing_rank() -> None:
    """The rank, the line, the message and the output are there; healthy ranks are not."""
    error = _rank_error(3, _fail_on, 1)
    assert list(error.errors) == [1]
    for expected in ("_fail_on failed on 1 of 3 ranks", "rank 1", 'KeyError: "', "printed by 1"):
        assert expected.replace('"', "'") in str(error)
    assert 'raise KeyError(f"broken on' in error.errors[1]


def test_every_failing_rank_is_reported_once() -> None:
    """Two ranks that fail make two sections."""
    error = _rank_error(2, _fail_on, 0, 1)
    assert sorted(error.errors) == [0, 1]
    assert str(error).count("Traceback") == 2


@pytest.mark.fast
def test_failed_assert_shows_its_values() -> None:
    """Asserts of test modules are rewritten in the workers as they are in the parent."""
    assert "assert 5 == 2" in _rank_error(1, _compare, 2, 3).errors[0]


def test_workers_undo_what_monkeypatch_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a test decides what the tests after it in the same workers measure."""
    run_ranks(2, _set_variable, monkeypatch)
    assert run_ranks(2, _variable) == [None, None]


def test_call_after_a_failure_uses_fresh_workers() -> None:
    """A group that may be broken is never used again."""
    before = run_ranks(2, _rank_and_pid)
    _rank_error(2, _fail_on, 0)
    after = run_ranks(2, _rank_and_pid)
    assert [rank for rank, _ in after] == [0, 1]
    assert not {pid for _, pid in before} & {pid for _, pid in after}


def test_deadline_kills_the_workers_and_shows_the_hanging_stack() -> None:
    """Only the rank that hangs is reported, with the line it hangs in."""
    before = run_ranks(2, _rank_and_pid)
    error = _rank_error(2, _hang_on, 1, timeout=1.0)
    assert list(error.errors) == [1]
    assert "no answer after 1." in error.errors[1]
    assert "in _hang_on" in error.errors[1]
    assert not any(_is_running(pid) for _, pid in before)
    assert [rank for rank, _ in run_ranks(2, _rank_and_pid)] == [0, 1]


def test_crash_is_reported_with_its_stack() -> None:
    """A worker that dies does not hang the parent, and says where it died."""
    error = _rank_error(1, _crash)
    assert f"the worker died with exit status -{signal.SIGSEGV}" in error.errors[0]
    assert "in _crash" in error.errors[0]


def test_unexpected_warning_is_an_error() -> None:
    """The workers apply pytest's filters."""
    assert "UserWarning: a warning nobody expects" in _rank_error(1, _warn).errors[0]


def test_exception_in_a_finalizer_is_an_error() -> None:
    """What Python only prints fails the rank."""
    error = _rank_error(1, _fail_in_finalizer)
    assert "ValueError: raised in a finalizer" in error.errors[0]


def test_result_without_a_pickle_is_an_error() -> None:
    """The worker answers even if it cannot answer with the result."""
    assert "lambda" in _rank_error(1, _return_function).errors[0]


def test_rank_that_is_a_collective_ahead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives left over from a call do not pair with those of the next."""
    monkeypatch.setattr(ranks, "GRACE_S", 0)
    with pytest.raises(RankError, match=r"the barrier after .*_skip_a_barrier failed"):
        run_ranks(2, _skip_a_barrier, timeout=1.0)


@pytest.mark.fast
def test_local_function_is_refused() -> None:
    """Workers import the function by name, which a closure has none of."""

    def local() -> None: ...

    with pytest.raises(ValueError, match=r"expected a module-level function.*<locals>.local"):
        run_ranks(2, local)


# --- end of session ---


@pytest.mark.long
def test_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    """Workers that are busy die with a parent that had no time to say goodbye."""
    code = """
        import os
        from tests.harness import ranks, test_harness
        ranks._PRELOADED = ()
        servers = ranks.run_ranks(1, os.getppid)
        print(*ranks.worker_pids(1), *servers, flush=True)
        ranks.run_ranks(1, test_harness._hang_on, 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    env = os.environ | {"TMPDIR": str(tmp_path)}  # nobody removes the logs of its workers
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    _wait_for_end(pids)


# --- @distributed ---


@distributed(2, 3)
@pytest.mark.parametrize("factor", [1, 10])
def test_distributed_body_runs_on_every_rank(world_size: int, factor: int) -> None:
    """World sizes and other parameters multiply, and the body sees them."""
    total = torch.tensor(factor)
    dist.all_reduce(total)
    assert total == factor * world_size == factor * dist.get_world_size()


@distributed(2)
def test_distributed_body_gets_fixtures(tmp_path: Path) -> None:
    """A fixture's value is one value on all ranks; the world size need not be an argument."""
    if dist.get_rank() == 0:
        (tmp_path / "seen").touch()
    dist.barrier()
    assert (tmp_path / "seen").exists()


# --- session rules ---

SIZES = """
    import pytest
    from tests.harness.ranks import distributed

    @pytest.mark.parametrize("a", [10, 20, 30])
    @pytest.mark.parametrize("b", "xy")
    @distributed(2, 3)
    def test_two(a, b): ...

    @distributed(1, 2, 3)
    def test_one(): ...

    @pytest.mark.parametrize("c", range(4))
    @pytest.mark.parametrize("d", range(3))
    @distributed(2)
    def test_grid(c, d): ...

    @pytest.mark.parametrize("e, f", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)])
    @distributed(2)
    def test_list(e, f): ...
"""


@pytest.mark.parametrize("options", [(), ("--all-cases",)], ids=["default", "all cases"])
def test_each_case_runs_on_one_of_the_world_sizes(options: tuple[str, ...], tmp_path: Path) -> None:
    """Each value still meets each size; a test of one case runs on all of them.

    Of a larger grid each value meets two of the other's, of what is no grid each case runs.
    """
    output = _run_pytest(tmp_path, SIZES, "--collect-only", "-q", *options)[1]
    found = {line.partition("::")[2] for line in output.splitlines() if "::" in line}
    two = [name for name in found if name.startswith("test_two")]
    assert len(two) == (12 if options else 6)
    assert {name[:11] for name in two} == {f"test_two[{size}-" for size in (2, 3)}
    cases = [name.removesuffix("]").partition("[")[2].split("-") for name in two]
    assert len({(size, b) for size, b, _ in cases}) == 4
    assert len({(size, a) for size, _, a in cases}) == 6
    assert {f"test_one[{size}]" for size in (1, 2, 3)} < found
    assert sum(name.startswith("test_grid") for name in found) == (12 if options else 8)
    assert sum(name.startswith("test_list") for name in found) == 6


SKIPS = f"""
    import pytest

    @pytest.mark.skip(reason={NEEDS_GPU!r})
    def test_known(): ...

    @pytest.mark.skip(reason="not today")
    def test_unknown(): ...
"""

FAILURES = """
    import time
    import torch.distributed as dist
    from tests.harness.ranks import distributed

    @distributed(2)
    def test_ranks():
        assert dist.get_rank() == 0

    @pytest.mark.deadline(0.5)
    def test_hangs():
        time.sleep(600)

    def test_next(): ...
"""


@pytest.fixture(scope="module")
def failing_session(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what pytest prints, outside CI, about skips and two failing tests."""
    return _run_pytest(tmp_path_factory.mktemp("failing"), SKIPS + FAILURES)[1]


def test_distributed_test_fails_with_its_ranks(failing_session: str) -> None:
    """A failing body fails the test, with the rank's own assertion in pytest's report."""
    assert "----- rank 1 -----" in failing_session
    assert "assert 1 == 0" in failing_session


def test_hanging_test_fails_at_its_deadline(failing_session: str) -> None:
    """A test that waits for ever fails, and the session goes on."""
    assert "test_hangs has not ended after 0.5 s" in failing_session
    assert "2 failed, 1 passed, 2 skipped" in failing_session


def test_developer_may_skip(failing_session: str) -> None:
    """Outside CI no skip is an error."""
    assert "SKIP NOT ALLOWED" not in failing_session


def test_unknown_skip_fails_in_ci(tmp_path: Path) -> None:
    """CI names the skip that nobody allowed, and no other."""
    status, output = _run_pytest(tmp_path, SKIPS, env={"CI": "true"})
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "SKIP NOT ALLOWED IN CI" in output
    assert "test_unknown: not today" in output
    assert "test_known: " not in output


@pytest.mark.gpu
def test_gpu_tests_run_only_where_there_is_one() -> None:
    """The marker skips this test on a machine without CUDA."""
    assert torch.cuda.is_available()


# --- memory and equality ---


def test_peak_bytes_counts_nothing_in_an_empty_scope() -> None:
    """The profiler's own work is not counted."""
    with peak_bytes() as memory:
        pass
    assert (memory.peak, memory.current, memory.allocated) == (0, 0, 0)


def test_peak_bytes_counts_allocations_and_frees() -> None:
    """The peak is what lives together, not the sum."""
    with peak_bytes() as memory:
        first = torch.empty(1000)
        second = torch.empty(500, dtype=torch.float64)
        del first
        third = torch.empty(3, 5, dtype=torch.bfloat16)
    assert memory.peak == 4000 + 4000
    assert memory.current == second.nbytes + third.nbytes == 4000 + 30
    assert memory.allocated == 8030


def test_peak_bytes_counts_resized_storages() -> None:
    """Growing holds both copies for a moment; resizing to zero frees."""
    with peak_bytes() as memory:
        storage = torch.UntypedStorage(100)
        storage.resize_(5000)
        storage.resize_(0)
        storage.resize_(300)
    assert memory.peak == 5100
    assert memory.current == storage.nbytes() == 300


def test_peak_bytes_counts_autograd_and_temporaries() -> None:
    """Forward: product, sum. Backward: seed, one product per factor, added up in place."""
    weight = torch.ones(10, 10, requires_grad=True)
    with peak_bytes() as memory:
        (weight * weight).sum().backward()
    assert weight.grad is not None
    assert memory.current == weight.grad.nbytes == 400
    assert memory.allocated == (400 + 4) + 4 + 2 * 400


def test_peak_bytes_ignores_what_is_older_than_the_scope() -> None:
    """Freeing an older storage subtracts nothing, even one at an address counted before."""
    with peak_bytes():
        known = [torch.empty(1000) for _ in range(50)]
    del known
    older = [torch.empty(1000) for _ in range(50)]
    with peak_bytes() as memory:
        older.clear()
        gc.collect()
        newer = torch.empty(10)
    assert memory.current == memory.peak == newer.nbytes == 40


def _gather_and_count() -> tuple[int, int]:
    size = dist.get_world_size()
    with peak_bytes() as memory:
        mine = torch.ones(1000)
        gathered = [torch.empty(1000) for _ in range(size)]
        dist.all_gather(gathered, mine, async_op=True).wait()
    del gathered
    return memory.peak, memory.current


def test_peak_bytes_counts_the_threads_of_gloo() -> None:
    """gloo gathers a list through a flat buffer that one of its threads makes and frees."""
    for peak, current in run_ranks(2, _gather_and_count):
        assert current == 3 * 4000
        assert peak == 5 * 4000


def test_assert_equal_accepts_equal_nan() -> None:
    """NaN in the same place is equal."""
    assert_equal(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))


@pytest.mark.parametrize(
    "other",
    [torch.tensor([1.0, 2.0 + 1e-6]), torch.tensor([1.0]), torch.tensor([1.0, 2.0]).double()],
)
def test_assert_equal_refuses_a_difference(other: torch.Tensor) -> None:
    """Last bits, shapes and dtypes count, and the message names the tensor."""
    with pytest.raises(AssertionError, match=r"layers.0.weight: "):
        assert_equal(torch.tensor([1.0, 2.0]), other, "layers.0.weight")
