"""What a worker of `ranks.py` is and does: it joins a group, and answers calls until it leaves."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from tests.common import device as accelerator
from tests.harness import fork_server
from tests.harness.poison import SWITCH, poisoned

GROUP_TIMEOUT_S = 20  # a collective that some rank does not join raises after this long
_HOST = "127.0.0.1"
COVERAGE = "COVERAGE_PROCESS_START"
DELAY_US = 200


@dataclass(frozen=True)
class Call:
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
    ) -> Call:
        module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
        try:
            if module == "__main__" or resolve(str(module), str(qualname)) is not fn:
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
class Answer:
    """What one rank says to one call: the function's value, or the text of its error."""

    value: Any = None
    error: str | None = None


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


def server_main(spec: dict[str, Any]) -> NoReturn:
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
            os.environ[COVERAGE] = self._spec["coverage"]
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


def _answer(call: Call, config: pytest.Config) -> bytes:
    """Run the call; return the pickled answer, which is an error if the value has no pickle."""
    try:
        with warnings.catch_warnings(), _Unraisable() as unraisable:
            _apply_filters(config)
            torch.manual_seed(0)
            random.seed(0)
            args, kwargs = pickle.loads(call.payload)
            poison = poisoned() if os.environ.get(SWITCH) == "1" else nullcontext()
            with poison, _undoing((*args, *kwargs.values())), _late_streams(call.device_mode):
                value = resolve(call.module, call.qualname)(*args, **kwargs)
            unraisable.check()
            return pickle.dumps(Answer(value=value))
    except BaseException:  # SystemExit and pytest's outcomes too: the parent waits for an answer
        return pickle.dumps(Answer(error=traceback.format_exc()))


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
        with torch.device(accelerator.NAME):  # for what the body makes without naming a device
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


def resolve(module: str, qualname: str) -> Callable[..., Any]:
    """Return the function of a name; of a test on ranks, its body."""
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


def join_group(pids: list[int], path: str, has_device: bool) -> None:
    """Join the default group of all workers of a pool."""
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


def set_environment(pids: list[int], environments: Sequence[dict[str, str]]) -> None:
    """Set the variables of this worker."""
    os.environ.update(environments[pids.index(os.getpid())])


def end_call() -> tuple[int, int]:
    """Check that no rank is a collective ahead; return how many groups were made, and are known."""
    dist.barrier()
    return dist.distributed_c10d.get_pg_count(), len(dist.distributed_c10d._world.pg_names)


def leave() -> NoReturn:
    """Leave without the interpreter's exit, in which gloo's threads abort now and then."""
    with suppress(RuntimeError):
        dist.barrier()
    coverage = sys.modules.get("coverage")
    if coverage and (measuring := coverage.Coverage.current()):
        measuring.stop()
        measuring.save()
    os._exit(0)
