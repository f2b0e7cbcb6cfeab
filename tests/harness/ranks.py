"""Functions run on every rank of a worker pool.

A worker is a Python process that starts once per world size and session, joins a gloo group, and
then runs the functions it is sent, so a test pays for a round trip, not for a spawn. It is a fork
of a server that has imported torch: see [Note: Neighbours have different servers]. Everything the
parent asks of the workers, their set-up included, is one kind of *round*: the same call to every
rank, one answer from every rank, one deadline. See [Note: One round].
What a worker does is in `workers.py`.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.common import device as accelerator
from tests.common.device import build
from tests.harness import workers
from tests.harness.fork_server import ForkServer
from tests.harness.workers import (
    COVERAGE,
    GROUP_TIMEOUT_S,
    Answer,
    Call,
    end_call,
    join_group,
    leave,
    set_environment,
)

START_TIMEOUT_S = 90  # importing torch in every worker of a busy machine
GRACE_S = 3  # what the other ranks still get once one has failed
DUMP_S = 1  # writing the stacks of the hanging ranks
_PRELOADED = ("composable_shard", "torch._dynamo")  # the latter is what optimizers import
NUM_SERVERS = 2  # a neighbour has another one
MAX_NUM_GROUPS = 100  # made by one pool: each has two threads, and connections
ON_CPU = "cpu"
DEVICE_MODES = ("slow_side", "slow_compute", "random")  # how late the device's streams are


class RankError(AssertionError):
    """Some ranks of a `run_ranks` call failed; `errors` maps each of them to its full report."""

    def __init__(self, errors: dict[int, str], *, name: str, world_size: int) -> None:
        self.errors = errors
        reports = [f"----- rank {rank} -----\n{errors[rank]}" for rank in sorted(errors)]
        title = f"{name} failed on {len(errors)} of {world_size} ranks"
        super().__init__("\n".join([title, *reports]))


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
    return _run_on(_PoolKey(world_size), Call.of(fn, args, kwargs), timeout)


def run_ranks_on_device(
    mode: str, world_size: int, fn: Callable[..., Any], /, *args: Any, timeout: float, **kwargs: Any
) -> list[Any]:
    """As `run_ranks`, where ranks have the device of `tests.common.device`, whose streams are late.

    The default group has a backend for the device too, and `device()` is the device. Freed memory
    is filled with NaN. An error that a stream meets after `fn` has returned is an error of `fn`.
    The test is skipped, by the name of what is missing, where the device can't be built.
    """
    __tracebackhide__ = True
    if missing := build.why_unavailable():
        pytest.skip(missing)
    call = replace(Call.of(fn, args, kwargs), device_mode=mode)
    return _run_on(_PoolKey(world_size, has_device=True), call, timeout)


def _run_on(key: _PoolKey, call: Call, timeout: float) -> list[Any]:
    __tracebackhide__ = True
    pool = _pools.get(key)
    try:
        results = pool.round(call, timeout)
        # A second round, so that a rank whose peer raised does not wait in this barrier.
        closing = f"the barrier after {call.name}"
        made, known = zip(*pool.round(Call.of(end_call), timeout, name=closing), strict=True)
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
    call = Call.of(fn, args)
    pool = _Pool(_pools.start_servers(len(environments)))
    try:
        pool.round(Call.of(set_environment, (pool.pids, environments)), START_TIMEOUT_S)
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
            `tests.common.device`, each in one of `DEVICE_MODES`, in turn. There `device()`,
            `rank_input` and the models of `Twins`, `make_net` and `seeded` are the device's.
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
        test.rank_body = body  # type: ignore[attr-defined]  # read by resolve
        test.has_several_sizes = len(world_sizes) > 1  # type: ignore[attr-defined]  # by conftest
        decorated: Any = test
        if world_sizes:
            decorated = pytest.mark.parametrize("world_size", world_sizes)(decorated)
        if on_device:
            modes = [pytest.param(mode, marks=pytest.mark.device) for mode in DEVICE_MODES]
            decorated = pytest.mark.parametrize("device_mode", [ON_CPU, *modes])(decorated)
        return decorated

    return decorate


def configure_workers(pytest_args: Sequence[str]) -> None:
    """Give the pytest arguments with which workers started from now on read the configuration."""
    _pools.pytest_args = tuple(pytest_args)


def worker_pids(world_size: int) -> list[int]:
    """Return the process ids of the live pool of `world_size` ranks, empty if there is none."""
    return _pools.pids(_PoolKey(world_size))


def shut_down_workers() -> None:
    """Let every worker leave, and wait until it has; the next `run_ranks` starts anew."""
    _pools.close()


_BOOTSTRAP = f"""\
import gc, json, sys
gc.disable()  # until all is imported: a sixth of the time
spec = json.loads(sys.argv[1])
sys.path[:] = spec["path"]
from {workers.__name__} import server_main
server_main(spec)
"""


class _Worker:
    """One worker process, the pipe to it, and the file that takes its output and its stacks."""

    def __init__(self, log_path: Path, server: ForkServer) -> None:
        self._log_path = log_path
        self._log_offset = 0
        self.connection, theirs = Pipe()
        with theirs, log_path.open("wb") as log:
            self.process = server.fork(theirs.fileno(), log.fileno(), START_TIMEOUT_S)

    def send(self, call: Call) -> None:
        self._log_offset = self._log_path.stat().st_size
        with suppress(BrokenPipeError):  # a dead worker is reported by receive()
            self.connection.send_bytes(pickle.dumps(call))

    def receive(self) -> Answer:
        try:
            answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.wait()
            answer = Answer(error=f"the worker died with exit status {self.process.returncode}")
        if answer.error is None:
            return answer
        return Answer(error=f"{answer.error}{self._output()}")

    def request_stack(self) -> None:
        self.process.send_signal(signal.SIGUSR1)

    def stack(self, reason: str) -> Answer:
        return Answer(error=f"{reason}{self._output()}")

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
        self.round(Call.of(join_group, (self.pids, path, has_device)), START_TIMEOUT_S)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    @property
    def is_alive(self) -> bool:
        return all(worker.process.poll() is None for worker in self._workers)

    def round(self, call: Call, timeout: float, *, name: str = "") -> list[Any]:
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
            worker.send(Call.of(leave))
        deadline = time.monotonic() + GROUP_TIMEOUT_S
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _collect(self, deadline: float) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        pending = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        while pending and (left_s := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), timeout=left_s):
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                answers[rank] = self._workers[rank].receive()
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _collect_stacks(self, ranks: list[int], reason: str) -> dict[int, Answer]:
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
                "coverage": os.environ.get(COVERAGE),
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
    environment.pop(COVERAGE, None)  # measuring starts in the forks
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"  # what a killed worker printed is in its report
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Otherwise gloo looks up the host name, which not every machine can resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
