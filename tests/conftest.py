"""Session rules: no test hangs, no skip goes unnoticed, no worker outlives pytest."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import pytest
import torch

from composable_shard import ShardingStrategy
from tests.harness import ranks, workers
from tests.harness.fake_group import fake_group
from tests.harness.pairs import GridRows, two_of_each
from tests.house.figures import TABLE

NEEDS_GPU = "needs a CUDA GPU"
CLAIM = re.compile(r"test_c\d+_")  # docs/architecture.md lists them
# Of the tests of tools, where `make ecosystem` could not install them.
TOOLS = (
    "accelerate",
    "bitsandbytes",
    "lightning",
    "peft",
    "ray",
    "torchft",
    "transformers",
    "trl",
)
ALLOWED_SKIPS = frozenset({NEEDS_GPU, *(f"needs {tool}" for tool in TOOLS)})
DEADLINE_S = 120.0
NUM_DEVICE_CASES = 1
# Files of which a test takes seconds, the longest first. The others are about as long as they have
# tests.
SLOW_FILES = (
    "test_ecosystem",
    "test_install",
    "test_options",
    "test_lightning",
    "test_torchft",
    "test_lockstep",
    "test_tutorials",
    "test_checkpoint_kills",
    "test_harness",
    "test_composition",
    "test_fsdp2",
    "test_interchange",
    "test_scale",
    "test_strategy_costs",
    "test_rank_kills",
    "test_comm_hooks",
    "test_shared_writes",
    "test_checkpoint_resume",
    "test_extensions",
    "test_checkpoint_damage",
    "test_partial_units",
    "test_training",
    "test_reduction_order",
    "test_fuzz_claims",
    "test_checkpoint",
)
OPPOSITE = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
BACKSTOP_S = 30.0  # after the deadline: for a test that is stuck where no signal handler runs

_stderr = pytest.StashKey[TextIO]()
_cases = pytest.StashKey[tuple[int, int]]()  # that are run, and that there are
_CASES = "cases"  # what a worker of pytest-xdist tells


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
    ranks.configure_workers(args)
    workers.seed_the_host_alone()
    torch.set_num_threads(1)  # small tensors, and a busy machine: threads would wait for each other


def pytest_unconfigure(config: pytest.Config) -> None:
    ranks.shut_down_workers()
    config.stash[_stderr].close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run each combination of parameters, on each world size of its test",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    num_all = len(items)
    if not config.getoption("all_cases"):
        if os.environ.get("CI"):
            items[:] = [each for each in items if not each.get_closest_marker("long")]
        items[:] = _with_two_of_each(items)
        if os.environ.get("CI"):
            items[:] = _with_opposite_strategies(items)
        items[:] = _with_modes_in_turn(_with_one_size_each(items))
    config.stash[_cases] = len(items), num_all
    num_tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (_turn_of(item), -num_tests[item.path]))
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


def _turn_of(item: pytest.Item) -> int:
    name = item.path.stem
    return SLOW_FILES.index(name) if name in SLOW_FILES else len(SLOW_FILES)


def _with_two_of_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep of a grid that runs on ranks what lets each value meet two of each other parameter's.

    All cases of the claims: a program may go wrong under one strategy alone. `.ci/run`, which must
    end in time, keeps one of each, and two of the claims' values.
    """
    is_ci = bool(os.environ.get("CI"))
    grids: dict[object, dict[tuple[object, ...], list[pytest.Function]]] = {}
    for item in items:
        is_kept = CLAIM.match(item.name) and not is_ci
        if isinstance(item, pytest.Function) and hasattr(item.obj, "rank_body") and not is_kept:
            case = tuple(_values_of(item).items())
            grids.setdefault(item.obj, {}).setdefault(case, []).append(item)
    left_out: set[pytest.Item] = set()
    for test, grid in grids.items():
        cases = list(grid)
        is_claim = CLAIM.match(test.__name__)
        num_met = 1 if is_ci and not is_claim else 2
        if len(cases[0]) > 1:
            kept = {cases[index] for index in two_of_each([dict(case) for case in cases], num_met)}
            left_out.update(item for case in grid if case not in kept for item in grid[case])
    return [item for item in items if item not in left_out]


def _with_opposite_strategies(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep of tests on ranks over the strategies alone the two that differ in each of their facts.

    Code reads the facts and compares no strategies: each fact meets the test with both its values.
    Grids and claims run under the others.
    """
    grids: dict[object, list[pytest.Function]] = {}
    for item in items:
        is_claim = CLAIM.match(item.name) or item.path.stem == "test_strategies"
        if isinstance(item, pytest.Function) and hasattr(item.obj, "rank_body") and not is_claim:
            grids.setdefault(item.obj, []).append(item)
    left_out: set[pytest.Item] = set()
    for grid in grids.values():
        cases = [item.callspec.params for item in grid if hasattr(item, "callspec")]
        names = {name for case in cases for name in case} - {"world_size", "device_mode"}
        values = [case.get("strategy") for case in cases]
        if names == {"strategy"} and all(each in values for each in ShardingStrategy):
            others = [item for item in grid if item.callspec.params["strategy"] not in OPPOSITE]
            left_out.update(others)
    return [item for item in items if item not in left_out]


def _values_of(item: pytest.Function) -> dict[str, object]:
    """Return the value of each parameter, by its identity, without world sizes in turn.

    Several parameters of one list of cases, unlike those of a grid, count as one.
    """
    values: dict[str, object] = {}
    for mark in item.iter_markers("parametrize"):
        names, rows = mark.args[:2]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        row = {name: id(item.callspec.params[name]) for name in names}
        if isinstance(rows, GridRows):
            values.update(row)
        elif names == ["device_mode"] or (names == ["world_size"] and item.obj.has_several_sizes):
            continue  # in turn
        else:
            values[",".join(names)] = tuple(row.values())
    return values


def _with_one_size_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep one world size for each case of the tests that are given several.

    A case is a combination of the other parameters. Cases take turns, such that their values meet
    as many sizes as they can; a test with fewer cases than sizes still runs on all sizes.
    """
    grids: dict[object, dict[tuple[int, ...], list[pytest.Function]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and getattr(item.obj, "has_several_sizes", False):
            others = {**item.callspec.params, "world_size": None}
            case = tuple(id(value) for value in others.values())
            grids.setdefault(item.obj, {}).setdefault(case, []).append(item)
    left_out: set[pytest.Item] = set()
    for grid in grids.values():
        cases = list(grid.values())
        left_out.update(item for sizes in cases for item in sizes)
        met: set[tuple[str, int, int]] = set()
        for turn in range(max(len(cases), *map(len, cases))):
            sizes = cases[turn % len(cases)]
            in_turn = sizes[turn % len(sizes) :] + sizes[: turn % len(sizes)]
            kept = max(in_turn, key=lambda item: len(_meetings(item) - met))
            met |= _meetings(kept)
            left_out.discard(kept)
    return [item for item in items if item not in left_out]


def _with_modes_in_turn(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep of what runs on the device too up to `NUM_DEVICE_CASES` of each test, in one mode each.

    The modes take turns in a file; the cases of a test are spread evenly.
    """
    grids: dict[object, dict[tuple[int, ...], list[pytest.Item]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("device"):
            others = {**item.callspec.params, "device_mode": None}
            if item.obj.has_several_sizes:
                others["world_size"] = None
            case = tuple(id(value) for value in others.values())
            grids.setdefault(item.obj, {}).setdefault(case, []).append(item)
    left_out = {item for grid in grids.values() for modes in grid.values() for item in modes}
    turns: Counter[Path] = Counter()
    for grid in grids.values():
        cases = list(grid.values())
        num_kept = min(len(cases), NUM_DEVICE_CASES)
        for index in range(num_kept):
            modes = cases[index * len(cases) // num_kept]
            left_out.remove(modes[turns[modes[0].path] % len(modes)])
            turns[modes[0].path] += 1
    return [item for item in items if item not in left_out]


def _meetings(item: pytest.Function) -> set[tuple[str, int, int]]:
    """Return which values meet which world size in a case."""
    size = item.callspec.params["world_size"]
    return {(name, id(value), size) for name, value in item.callspec.params.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take what a worker has collected; all collect the same."""
    if found := getattr(node, "workeroutput", {}).get(_CASES):
        node.config.stash[_cases] = tuple(found)


def pytest_sessionfinish(session: pytest.Session) -> None:
    config: Any = session.config
    if hasattr(config, "workeroutput") and _cases in config.stash:
        config.workeroutput[_CASES] = config.stash[_cases]
    if os.environ.get("CI") and _unknown_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    kept, num_all = config.stash.get(_cases, (0, 0))
    if kept < num_all:
        terminalreporter.write_line(f"{kept:,} of {num_all:,} cases (--all-cases runs all)")
    if os.environ.get("CI"):
        for skip in _unknown_skips(config):
            terminalreporter.write_line(f"SKIP NOT ALLOWED IN CI: {skip}", red=True)
        for report in terminalreporter.stats.get("passed", []):
            if table := dict(report.user_properties).get(TABLE):
                terminalreporter.section(TABLE)
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
