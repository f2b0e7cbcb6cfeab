"""Test support: functions run on every rank of a worker pool, exact memory counts, exact equality.

A worker is a Python process that starts once per world size and session, joins a gloo group, and
then runs the functions it is sent, so a test pays for a round trip, not for a spawn. It is a fork
of a server that has imported torch: see [Note: Neighbours have different servers]. Everything the
parent asks of the workers, their set-up included, is one kind of *round*: the same call to every
rank, one answer from every rank, one deadline. See [Note: One round].
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from tests import device as accelerator
from tests.device import build
from tests.harness import fork_server
from tests.harness.fork_server import ForkServer
from tests.harness.poison import SWITCH, poisoned

GROUP_TIMEOUT_S = 20  # a collective that some rank does not join raises after this long
START_TIMEOUT_S = 90  # importing torch in every worker of a busy machine
GRACE_S = 3  # what the other ranks still get once one has failed
DUMP_S = 1  # writing the stacks of the hanging ranks
_HOST = "127.0.0.1"
_COVERAGE = "COVERAGE_PROCESS_START"
_PRELOADED = ("composable_shard", "torch._dynamo")  # the latter is what optimizers import
NUM_SERVERS = 2  # a neighbour has another one
MAX_NUM_GROUPS = 100  # made by one pool: each has two threads, and connections
ON_CPU = "cpu"
DEVICE_MODES = ("slow_side", "slow_compute", "random")  # how late the device's streams are
DELAY_US = 200


class RankError(AssertionError):
    """Some ranks of a `run_ranks` call failed; `errors` maps each of them to its full report."""

    def __init__(self, errors: dict[int, str], *, name: str, world_size: int) -> None:
        self.errors = errors
        reports = [f"----- rank {rank} -----\n{errors[rank]}" for rank in sorted(errors)]
        title = f"{name} failed on {len(errors)} of {world_size} ranks"
        super().__init__("\n".join([title, *reports]))


class Planned(Exception):
    """What tests raise to see what an error leaves behind."""


def run_ranks(
    world_size: int, fn: Callable[..., Any], /, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on every rank of a gloo group; return the results in rank order.

    `fn` is a module-level function; arguments and results are pickled. The default group has
    `world_size` ranks, torch is seeded with 0, and a warning is an error where pytest's filters
    say so. Of the call, only imported modules and process groups outlive it.

    Raises:
        RankError: A rank raised, died, or gave no answer within `timeout` seconds. The pool is
            then discarded, and the next call starts a fresh one.
        ValueError: `fn` cannot be imported by name.
    """
    __tracebackhide__ = True
    return _run_on(_PoolKey(world_size), _Call.of(fn, args, kwargs), timeout)


def run_ranks_on_device(
    mode: str, world_size: int, fn: Callable[..., Any], /, *args: Any, timeout: float, **kwargs: Any
) -> list[Any]:
    """As `run_ranks`, where ranks have the device of `tests.device`, whose streams are late.

    The default group has a backend for the device too, and `device()` is the device. Freed memory
    is filled with NaN. An error that a stream meets after `fn` has returned is an error of `fn`.
    The test is skipped, by the name of what is missing, where the device can't be built.
    """
    __tracebackhide__ = True
    if missing := build.why_unavailable():
        pytest.skip(missing)
    call = replace(_Call.of(fn, args, kwargs), device_mode=mode)
    return _run_on(_PoolKey(world_size, has_device=True), call, timeout)


def _run_on(key: _PoolKey, call: _Call, timeout: float) -> list[Any]:
    __tracebackhide__ = True
    pool = _pools.get(key)
    try:
        results = pool.round(call, timeout)
        # A second round, so that a rank whose peer raised does not wait in this barrier.
        closing = f"the barrier after {call.name}"
        made, known = zip(*pool.round(_Call.of(_end_call), timeout, name=closing), strict=True)
    except BaseException:
        # Also for Ctrl-C and the test's own deadline: an answer may be outstanding.
        _pools.discard(key)
        raise
    if max(made) > MAX_NUM_GROUPS or len(set(known)) > 1:  # torch can't name new groups then
        _pools.discard(key)
    return results


def run_processes(
    environments: Sequence[dict[str, str]],
    fn: Callable[..., Any],
    /,
    *args: Any,
    timeout: float = 60.0,
) -> list[Any]:
    """Run `fn(*args)` in fresh processes, which have joined no group; return the results.

    As `run_ranks` does it, in one process for each of `environments`, whose variables it has. The
    processes end with the call.
    """
    __tracebackhide__ = True
    call = _Call.of(fn, args)
    pool = _Pool(_pools.start_servers(len(environments)))
    try:
        pool.round(_Call.of(_set_environment, (pool.pids, environments)), START_TIMEOUT_S)
        return pool.round(call, timeout)
    finally:
        pool.kill()


def device() -> torch.device:
    """Return where a test's tensors belong: on the CPU, or on the device that this worker has."""
    return torch.device(accelerator.NAME if accelerator.is_loaded() else "cpu")


def distributed(
    *world_sizes: int, on_device: bool = False, timeout: float = 60.0
) -> Callable[[Callable[..., None]], Any]:
    """Turn the body of a module-level test into what every rank runs, once per world size.

    Arguments from `parametrize` and fixtures reach the body pickled; a body that has an argument
    `world_size` gets it. Combines with `pytest.mark` decorators above and below: without world
    sizes one of them gives the argument `world_size`. Each value of a parameter meets two of every
    other one's, and each of these cases runs on one of the world sizes, in turn, unless pytest has
    the option `--all-cases`.

    Args:
        world_sizes: How many ranks.
        on_device: Whether some cases run once more in workers that have the device of
            `tests.device`, each in one of `DEVICE_MODES`, in turn. There `device()`, `rank_input`
            and the models of `Twins`, `make_net` and `seeded` are the device's.
        timeout: Of each call, in seconds.
    """

    def decorate(body: Callable[..., None]) -> Any:
        signature = inspect.signature(body)
        parameters = dict(signature.parameters)
        is_size_wanted = "world_size" in parameters

        @functools.wraps(body)
        def test(world_size: int, device_mode: str = ON_CPU, **kwargs: Any) -> None:
            __tracebackhide__ = True
            if is_size_wanted:
                kwargs["world_size"] = world_size
            if device_mode == ON_CPU:
                run_ranks(world_size, body, timeout=timeout, **kwargs)
            else:
                run_ranks_on_device(device_mode, world_size, body, timeout=timeout, **kwargs)

        for name in ("world_size", *(["device_mode"] if on_device else [])):
            added = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            parameters.setdefault(name, added)
        test.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]  # read by inspect
        test.rank_body = body  # type: ignore[attr-defined]  # read by _resolve
        test.has_several_sizes = len(world_sizes) > 1  # type: ignore[attr-defined]  # by conftest
        decorated: Any = test
        if world_sizes:
            decorated = pytest.mark.parametrize("world_size", world_sizes)(decorated)
        if on_device:
            modes = [pytest.param(mode, marks=pytest.mark.device) for mode in DEVICE_MODES]
            decorated = pytest.mark.parametrize("device_mode", [ON_CPU, *modes])(decorated)
        return decorated

    return decorate


def needs_torch(version: str, why: str) -> pytest.MarkDecorator:
    """Skip on an older torch, where torch itself can't do what the test is about."""
    here, needed = (tuple(map(int, v.split(".")[:2])) for v in (torch.__version__, version))
    return pytest.mark.skipif(here < needed, reason=f"needs torch {version}: {why}")


def seed_the_host_alone() -> None:
    """Leave devices that are not there out of `torch.manual_seed`, for good.

    For each kind of them torch keeps the stack, as text: of the suite's CPU time that took 13 %.
    """
    if not torch.accelerator.is_available():
        torch.manual_seed = torch.random.manual_seed = _seed_the_host


_seed_everything = torch.manual_seed


def _seed_the_host(seed: int) -> torch.Generator:
    # A function of Python: torch's compiler sets attributes of it.
    if torch.accelerator.is_available():  # a device that was loaded since
        return _seed_everything(seed)
    return torch.default_generator.manual_seed(seed)


def configure_workers(pytest_args: Sequence[str]) -> None:
    """Give the pytest arguments with which workers started from now on read the configuration."""
    _pools.pytest_args = tuple(pytest_args)


def worker_pids(world_size: int) -> list[int]:
    """Return the process ids of the live pool of `world_size` ranks, empty if there is none."""
    return _pools.pids(_PoolKey(world_size))


def shut_down_workers() -> None:
    """Let every worker leave, and wait until it has; the next `run_ranks` starts anew."""
    _pools.close()


# ---------------------------------------------------------------------------------------------
# The parent's side
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """One function call as it travels: the function by name, the arguments pickled."""

    module: str
    qualname: str
    payload: bytes
    device_mode: str = ""  # of the device's streams, where the worker has the device

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> _Call:
        module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
        try:
            if module == "__main__" or _resolve(str(module), str(qualname)) is not fn:
                raise AttributeError
        except (ImportError, AttributeError):
            raise ValueError(
                f"expected a module-level function, which the workers import by name; got {fn!r}: "
                "move it to the top level of its module and pass what it closes over as arguments"
            ) from None
        return cls(str(module), str(qualname), pickle.dumps((args, kwargs or {})))

    @property
    def name(self) -> str:
        return f"{self.module}.{self.qualname}"


@dataclass(frozen=True)
class _Answer:
    """What one rank says to one call: the function's value, or the text of its error."""

    value: Any = None
    error: str | None = None


_BOOTSTRAP = f"""\
import gc, json, sys
gc.disable()  # until all is imported: a sixth of the time
spec = json.loads(sys.argv[1])
sys.path[:] = spec["path"]
from {__name__} import _server_main
_server_main(spec)
"""


class _Worker:
    """One worker process, the pipe to it, and the file that takes its output and its stacks."""

    def __init__(self, log_path: Path, server: ForkServer) -> None:
        self._log_path = log_path
        self._log_offset = 0
        self.connection, theirs = Pipe()
        with theirs, log_path.open("wb") as log:
            self.process = server.fork(theirs.fileno(), log.fileno(), START_TIMEOUT_S)

    def send(self, call: _Call) -> None:
        self._log_offset = self._log_path.stat().st_size
        with suppress(BrokenPipeError):  # a dead worker is reported by receive()
            self.connection.send_bytes(pickle.dumps(call))

    def receive(self) -> _Answer:
        try:
            answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.wait()
            answer = _Answer(error=f"the worker died with exit status {self.process.returncode}")
        if answer.error is None:
            return answer
        return _Answer(error=f"{answer.error}{self._output()}")

    def request_stack(self) -> None:
        self.process.send_signal(signal.SIGUSR1)

    def stack(self, reason: str) -> _Answer:
        return _Answer(error=f"{reason}{self._output()}")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()

    def _output(self) -> str:
        """Return what the worker has written since the last call, its stack included."""
        with self._log_path.open("rb") as log:
            log.seek(self._log_offset)
            text = log.read().decode(errors="replace").strip()
        return f"\n--- its output ---\n{text}" if text else ""


class _Pool:
    """The workers of one world size.

    [Note: One round]
    A round sends one call to every rank and collects one answer from each until a deadline. No
    rank is sent the next call before all have answered, so rounds also order the ranks: set-up,
    test function, closing barrier and farewell are rounds like any other.
    """

    def __init__(self, servers: Sequence[ForkServer]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._workers: list[_Worker] = []
        try:
            for rank, server in enumerate(servers):
                self._workers.append(_Worker(self._directory / f"rank{rank}.log", server))
        except BaseException:
            self.kill()
            raise

    def join(self, *, has_device: bool) -> None:
        """Make all of them the ranks of the default group."""
        path = str(self._directory / "address")
        self.round(_Call.of(_join_group, (self.pids, path, has_device)), START_TIMEOUT_S)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    @property
    def is_alive(self) -> bool:
        return all(worker.process.poll() is None for worker in self._workers)

    def round(self, call: _Call, timeout: float, *, name: str = "") -> list[Any]:
        """Return every rank's value of `call`; raise `RankError` if one has none in time."""
        __tracebackhide__ = True
        started = time.monotonic()
        for worker in self._workers:
            worker.send(call)
        answers = self._collect(started + timeout)
        ranks = range(len(self._workers))
        if missing := [rank for rank in ranks if rank not in answers]:
            reason = f"no answer after {time.monotonic() - started:.1f} s"
            if any(answer.error for answer in answers.values()):
                reason += f", {GRACE_S} s after another rank had failed"
            answers |= self._collect_stacks(missing, reason)
        errors = {rank: a.error for rank, a in answers.items() if a.error is not None}
        if errors:
            raise RankError(errors, name=name or call.name, world_size=len(ranks))
        return [answers[rank].value for rank in ranks]

    def close(self) -> None:
        """Let the workers leave together, then make sure that they have."""
        for worker in self._workers:
            worker.send(_Call.of(_leave))
        deadline = time.monotonic() + GROUP_TIMEOUT_S
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _collect(self, deadline: float) -> dict[int, _Answer]:
        answers: dict[int, _Answer] = {}
        pending = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        while pending and (left_s := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), timeout=left_s):
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                answers[rank] = self._workers[rank].receive()
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _collect_stacks(self, ranks: list[int], reason: str) -> dict[int, _Answer]:
        for rank in ranks:
            self._workers[rank].request_stack()
        time.sleep(DUMP_S)
        return {rank: self._workers[rank].stack(reason) for rank in ranks}


class _PoolKey(NamedTuple):
    """What the tests of one pool have in common."""

    world_size: int
    has_device: bool = False  # `torch.accelerator` is one for each process, and stays


class _Pools:
    """The session's pools, each started when it is first needed."""

    def __init__(self) -> None:
        self.pytest_args: tuple[str, ...] = ()
        self._pools: dict[_PoolKey, _Pool] = {}
        self._servers: list[ForkServer] = []  # rank by rank, in turn

    def get(self, key: _PoolKey) -> _Pool:
        pool = self._pools.get(key)
        if pool is None or not pool.is_alive:
            self.discard(key)
            pool = self._pools[key] = _Pool(self.start_servers(key.world_size))
            try:
                pool.join(has_device=key.has_device)
            except BaseException:
                self.discard(key)
                raise
        return pool

    def start_servers(self, num_servers: int) -> list[ForkServer]:
        """Return the servers of the first ranks, started where they do not run."""
        while len(self._servers) < min(num_servers, NUM_SERVERS):
            self._servers.append(ForkServer())
        for server in self._servers[:num_servers]:
            spec = {
                "path": sys.path,
                "pytest_args": self.pytest_args,
                "coverage": os.environ.get(_COVERAGE),
                "modules": _PRELOADED if "composable_shard" in sys.modules else (),
            }
            server.start(_BOOTSTRAP, spec, _worker_environment())
        return [self._servers[rank % NUM_SERVERS] for rank in range(num_servers)]

    def pids(self, key: _PoolKey) -> list[int]:
        pool = self._pools.get(key)
        return [] if pool is None else pool.pids

    def discard(self, key: _PoolKey) -> None:
        if pool := self._pools.pop(key, None):
            pool.kill()

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()
        while self._servers:
            self._servers.pop().kill()


_pools = _Pools()


def _worker_environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop(_COVERAGE, None)  # measuring starts in the forks
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"  # what a killed worker printed is in its report
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Otherwise gloo looks up the host name, which not every machine can resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


# ---------------------------------------------------------------------------------------------
# The workers' side
# ---------------------------------------------------------------------------------------------


def _server_main(spec: dict[str, Any]) -> NoReturn:
    """Import what workers need, fork them, and serve calls in them."""
    _die_with_parent(spec["parent"])
    _share_cores()
    for module in spec["modules"]:
        importlib.import_module(module)
    # Inside pytest, because that gives the configured filters and test modules with rewritten
    # asserts. Exceptions nobody can catch stay ours: see _Unraisable.
    plugins = ("faulthandler", "unraisableexception", "threadexception", "cacheprovider")
    args = ["-s", "--noconftest", *(f"-pno:{plugin}" for plugin in plugins), *spec["pytest_args"]]
    pytest.main(args, plugins=[_ServePlugin(spec)])
    os._exit(1)


class _ServePlugin:
    """Makes pytest serve calls, with its configuration read, where it would run tests."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> NoReturn:
        server = os.getpid()
        gc.collect()
        gc.freeze()  # or every full collection in a fork would go through, and copy, all of torch
        gc.set_threshold(10_000, 20, 20)  # tests that count what is freed collect by themselves
        gc.enable()
        connection = Connection(fork_server.serve(socket.socket(fileno=self._spec["fd"])))
        _die_with_parent(server)
        if self._spec["coverage"]:
            os.environ[_COVERAGE] = self._spec["coverage"]
            importlib.import_module("coverage").process_startup()
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        torch.set_num_threads(1)
        seed_the_host_alone()
        while True:
            try:
                call = pickle.loads(connection.recv_bytes())
            except EOFError:
                os._exit(1)
            connection.send_bytes(_answer(call, config))


def _answer(call: _Call, config: pytest.Config) -> bytes:
    """Run the call; return the pickled answer, which is an error if the value has no pickle."""
    try:
        with warnings.catch_warnings(), _Unraisable() as unraisable:
            _apply_filters(config)
            torch.manual_seed(0)
            random.seed(0)
            args, kwargs = pickle.loads(call.payload)
            poison = poisoned() if os.environ.get(SWITCH) == "1" else nullcontext()
            with poison, _undoing((*args, *kwargs.values())), _late_streams(call.device_mode):
                value = _resolve(call.module, call.qualname)(*args, **kwargs)
            unraisable.check()
            return pickle.dumps(_Answer(value=value))
    except BaseException:  # SystemExit and pytest's outcomes too: the parent waits for an answer
        return pickle.dumps(_Answer(error=traceback.format_exc()))


@contextmanager
def _undoing(arguments: Iterable[Any]) -> Iterator[None]:
    """Undo what copies of the fixture `monkeypatch` have set in this process."""
    try:
        yield
    finally:
        for argument in arguments:
            if isinstance(argument, pytest.MonkeyPatch):
                argument.undo()


@contextmanager
def _late_streams(mode: str) -> Iterator[None]:
    """Make the device's streams late; raise at the end what they have met, and races."""
    if not mode:
        yield
        return
    accelerator.configure(mode, delay_us=DELAY_US)  # type: ignore[arg-type]  # a Mode
    try:
        with device():  # for what the body makes without naming a device
            yield
        accelerator.synchronize()
        accelerator.check_races()
    finally:
        accelerator.configure("none")


class _Unraisable:
    """Turns exceptions of finalizers and engine threads, which only print, into errors."""

    def __init__(self) -> None:
        self._seen: list[BaseException | None] = []
        self._hook = sys.unraisablehook

    def __enter__(self) -> _Unraisable:
        sys.unraisablehook = self._record
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook

    def _record(self, unraisable: Any) -> None:
        self._hook(unraisable)
        self._seen.append(unraisable.exc_value)

    def check(self) -> None:
        if self._seen:
            raise AssertionError(f"{len(self._seen)} unraisable exceptions") from self._seen[0]


def _apply_filters(config: pytest.Config) -> None:
    # pytest has no public way to apply its filters; this one has been the same since 6.2.
    from _pytest.config import apply_warning_filters  # noqa: PLC0415 -- private: workers only

    command_line = config.getoption("pythonwarnings") or []
    apply_warning_filters(config.getini("filterwarnings"), command_line)


def _resolve(module: str, qualname: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return getattr(found, "rank_body", found)


def _die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies; elsewhere the closed pipe must do."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _share_cores() -> None:
    """Ask Linux that this process and its forks do not interrupt each other when they wake up.

    Beside more ranks than cores, a thread of gloo that woke up would often interrupt the one that
    holds the lock of their connection, and would then ask for the lock in a loop: up to a quarter
    of the processor time of a test on three ranks.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _share_gloo_device() -> None:
    """Let all groups of this process use one device of gloo.

    Each has a thread that wakes up 100 times a second, whether or not there is anything to do, and
    nobody can safely destroy groups: ten pools of twenty groups keep a core busy by a tenth.
    """
    gloo = dist.ProcessGroupGloo
    original_init, device = gloo.__init__, gloo.create_default_device()

    # torch 2.15 passes enable_reconfigure too, which is False.
    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        options = gloo._Options()
        options._devices, options._timeout = [device], timeout
        original_init(self, store, rank, size, options)

    gloo.__init__ = init


def _join_group(pids: list[int], path: str, has_device: bool) -> None:
    world_size, rank = len(pids), pids.index(os.getpid())
    file = dist.FileStore(path, world_size)
    # Asking a file takes each group that is made 5 ms more, because its readers poll.
    if rank == 0:
        store = dist.TCPStore(_HOST, 0, world_size, is_master=True, wait_for_workers=False)
        file.set("port", str(store.port))
    else:
        store = dist.TCPStore(_HOST, int(file.get("port")), world_size, is_master=False)
    _share_gloo_device()
    if has_device:
        accelerator.load()
        accelerator.detect_races()
    dist.init_process_group(
        accelerator.BACKENDS if has_device else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )


def _set_environment(pids: list[int], environments: Sequence[dict[str, str]]) -> None:
    os.environ.update(environments[pids.index(os.getpid())])


def _end_call() -> tuple[int, int]:
    """Check that no rank is a collective ahead; return how many groups were made, and are known."""
    dist.barrier()
    return dist.distributed_c10d.get_pg_count(), len(dist.distributed_c10d._world.pg_names)


def _leave() -> NoReturn:
    """Leave without the interpreter's exit, in which gloo's threads abort now and then."""
    with suppress(RuntimeError):
        dist.barrier()
    coverage = sys.modules.get("coverage")
    if coverage and (measuring := coverage.Coverage.current()):
        measuring.stop()
        measuring.save()
    os._exit(0)


# ---------------------------------------------------------------------------------------------
# Memory and equality
# ---------------------------------------------------------------------------------------------


@dataclass
class MemoryCount:
    """CPU tensor bytes of a `peak_bytes` scope, relative to its entry; known once it is left."""

    peak: int = 0  # the most that was held at any moment
    current: int = 0  # held at the end
    allocated: int = 0  # all allocations together, freed or not
    num_allocations: int = 0


@contextmanager
def peak_bytes() -> Iterator[MemoryCount]:
    """Count the bytes of the CPU tensor storages allocated inside the scope, exactly.

    Counts what this thread allocates, inside operators, autograd and `UntypedStorage.resize_`
    too, and what gloo's threads allocate on its behalf. Freeing a storage that is older than the
    scope subtracts nothing. Scopes do not nest, and no other profiler may run. No collective may
    be in flight at the end: gloo's threads and the profiler would race, and corrupt the heap.
    """
    memory = MemoryCount()
    activities = [ProfilerActivity.CPU]
    # With acc_events it would make objects of all events at once: a fifth of some files' CPU time.
    profiler = profile(activities=activities, profile_memory=True)
    with warnings.catch_warnings():  # torch 2.11 warns of that
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        profiler.start()
    try:
        yield memory
    finally:
        profiler.stop()
    sizes: dict[int, int] = {}
    for address, size in _cpu_allocations(profiler):
        if size > 0:
            sizes[address] = size
            memory.allocated += size
            memory.num_allocations += 1
            memory.current += size
            memory.peak = max(memory.peak, memory.current)
        else:
            # By address, because the profiler remembers sizes from earlier scopes: it can report
            # the free of a storage that was allocated outside at an address it knew once.
            memory.current -= sizes.pop(address, 0)


def _cpu_allocations(profiler: profile) -> Iterable[tuple[int, int]]:
    """Return (address, size) in order of time; a negative size frees."""
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    found = []
    pending = list(results.experimental_event_tree())
    order = itertools.count()
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        fields = event.extra_fields
        if event.tag == _EventType.Allocation and fields.device.type == "cpu":
            found.append((event.start_time_ns, next(order), fields.ptr, fields.alloc_size))
    return [(address, size) for _, _, address, size in sorted(found)]


def still_alive(
    references: Sequence[weakref.ref[Any]], storages: Sequence[StorageWeakRef]
) -> list[str]:
    """Return what has not been freed, once gloo's threads have had time to drop its tensors."""
    deadline = time.monotonic() + 10
    while True:
        alive = [type(each()).__name__ for each in references if each() is not None]
        alive += ["UntypedStorage" for storage in storages if not storage.expired()]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.01)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    """Assert the same shape, dtype, device and exactly equal values, where NaN equals NaN."""
    __tracebackhide__ = True
    if type(actual) is type(expected) is torch.Tensor and _is_equal(actual, expected):
        return  # in a tenth of the time
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    kinds = [(each.dtype, each.device, each.layout) for each in (one, other)]
    return kinds[0] == kinds[1] and torch.equal(one, other)


def assert_within(
    actual: torch.Tensor, expected: torch.Tensor, what: str, *, atol: float, rtol: float = 0.0
) -> None:
    """Assert the same shape, dtype and device, and values that differ by a tolerance at most."""
    __tracebackhide__ = True
    is_plain = type(actual) is type(expected) is torch.Tensor and actual.is_floating_point()
    kinds = [(each.shape, each.dtype, each.device, each.layout) for each in (actual, expected)]
    if is_plain and kinds[0] == kinds[1]:
        difference = (actual.detach() - expected.detach()).abs()
        if bool((difference <= atol + rtol * expected.detach().abs()).all()):
            return  # in a thirtieth of the time
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )


def run_benchmark(name: str, options: Sequence[str]) -> dict[str, Any]:
    """Run a benchmark that ends with a line of JSON, in a process of its own; return that."""
    [(code, output)] = run_processes([{}], _run_benchmark_here, name, list(options), timeout=110)
    assert code == 0, output
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def _run_benchmark_here(name: str, options: list[str]) -> tuple[int, str]:
    sys.argv = [name, *options, "--json"]
    with redirect_stdout(io.StringIO()) as output, warnings.catch_warnings():
        warnings.simplefilter("default")
        code = importlib.import_module(f"benchmarks.{name}").main()
    return code, output.getvalue()
