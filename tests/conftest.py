"""Session rules: no test hangs, no skip goes unnoticed, no worker outlives pytest."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from types import FrameType
from typing import TextIO

import pytest
import torch

from tests import helpers, house
from tests.fake_group import fake_group

NEEDS_GPU = "needs a CUDA GPU"
ALLOWED_SKIPS = frozenset({NEEDS_GPU})
DEADLINE_S = 120.0
# Files of which a test takes seconds. The others are about as long as they have tests.
SLOW_FILES = (
    "test_tutorials",
    "test_harness",
    "test_checkpoint_kills",
    "test_checkpoint_resume",
    "test_fuzz_claims",
    "test_lockstep",
    "test_checkpoint_damage",
    "test_strategy_costs",
    "test_interchange",
    "test_parity",
)
BACKSTOP_S = 30.0  # after the deadline: for a test that is stuck where no signal handler runs

_stderr = pytest.StashKey[TextIO]()


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A group of four ranks of which only this one exists."""
    with fake_group(4):
        yield


def pytest_configure(config: pytest.Config) -> None:
    # While a test runs, pytest captures descriptor 2; the backstop must write past that.
    config.stash[_stderr] = os.fdopen(os.dup(2), "w")
    args = [f"--rootdir={config.rootpath}"]
    args += [f"-c{config.inipath}"] if config.inipath else []
    args += [f"-W{option}" for option in config.getoption("pythonwarnings") or ()]
    helpers.configure_workers(args)


def pytest_unconfigure(config: pytest.Config) -> None:
    helpers.shut_down_workers()
    config.stash[_stderr].close()


LARGE_GRID = 24  # cases of one test; `make test` runs all of them


def _thin(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return every second case of large grids, and all others: what CI has the time for."""
    grids = Counter(item.nodeid.partition("[")[0] for item in items)
    seen: Counter[str] = Counter()
    kept = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        if grids[name] <= LARGE_GRID or seen[name] % 2:
            kept.append(item)
    return kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("CI"):
        kept = _thin(items)
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept
    num_tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.stem not in SLOW_FILES, -num_tests[item.path]))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NEEDS_GPU))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that has not ended by its deadline, fixtures included."""
    marker = item.get_closest_marker("deadline")
    deadline_s: float = marker.args[0] if marker else DEADLINE_S

    def fail(signum: int, frame: FrameType | None) -> None:
        pytest.fail(f"{item.nodeid} has not ended after {deadline_s} s")

    faulthandler.dump_traceback_later(
        deadline_s + BACKSTOP_S, exit=True, file=item.config.stash[_stderr]
    )
    previous = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") and _unknown_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if os.environ.get("CI"):
        for skip in _unknown_skips(config):
            terminalreporter.write_line(f"SKIP NOT ALLOWED IN CI: {skip}", red=True)
        for report in terminalreporter.stats.get("passed", []):
            if table := dict(report.user_properties).get(house.TABLE):
                terminalreporter.section(house.TABLE)
                terminalreporter.write_line(table)


def _unknown_skips(config: pytest.Config) -> list[str]:
    """Return the skips of this session, as `test: reason`, that `ALLOWED_SKIPS` does not name."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    unknown = []
    for report in reporter.stats.get("skipped", []) if reporter else []:
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if reason not in ALLOWED_SKIPS:
            unknown.append(f"{report.nodeid}: {reason}")
    return unknown
