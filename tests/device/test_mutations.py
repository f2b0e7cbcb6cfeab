"""Each wait of the library is left out in turn: the device finds a race in some program."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from composable_shard.flat_param import storage
from tests.common import device
from tests.device.mutations import REFERENCES, Site, find_sites, left_out
from tests.device.programs import PROGRAMS
from tests.device.running import on_device

MODULES = (
    "comm.devices",
    "comm.groups",
    "comm.launches",
    "flat_param.local_shard",
    "flat_param.storage",
    "flat_param.full_values",
    "flat_param.gradient_reduction",
    "flat_param.gradients",
    "flat_param.two_stages",
    "flat_param.host_gradient",
    "flat_param.grad_pieces",
    "flat_param.extended_gathers",
    "flat_param.memory",
    "optim.clipping",
    "optim.grad_scaler",
    "tensor.flat_shard",
    "tensor.write_guard",
)

_NO_STREAMS = "a device without side streams alone: those wait where they start"

# What finds each wait's removal: by the beginning of `Site.of`, the longest one that fits.
FOUND_BY = {
    "StreamPoint": "step",
    "Streams.point_after": "step_of_large_units",
    "_Call": "step",
    "_Point": "step",
    "_await_dropped": "dropped_in_backward",
    "StreamCopies.copy_to_device": "writes_on_host",
    "StreamCopies.copy_to_host": "step_on_host",
    "StreamCopies.wait_on_device": "rounds_on_host",
    "StreamCopies.wait_on_host": "step_on_host",
    "StreamCopies.is_done": "rounds_on_host",
    "Then.wait": "step_with_int8_gathers",
    "LocalShard.to_device": "writes_on_host",
    "ShardGroup.copy_to_replicas": "step_with_replicas",
    "LocalShard.gather_into": "state_dicts",
    "FullValues._start_on_stream": "step",
    "FullValues.wait": "step",
    "FullValues.write_back": "writeback_at_once",
    "FlatReduction.start: self._read": "step_with_16_bit_sums",
    "FlatReduction.start: stream.wait_stream": "step",
    "TwoStageReduction._end_on_stream": "step_with_replicas",
    "TwoStageReduction.end_first_stage": "step_with_replicas",
    "TwoStageReduction._end": "step_without_shards",
    "TwoStageReduction.finish": "step_with_replicas",
    "FlatReduction.finish": "step",
    "FlatReduction.abandon: torch.accelerator": "failed_backward",
    "FlatReduction.drop": "failed_backward",
    "OffloadedGradients._end_earlier_uses": "rounds_on_host",
    "HostGradient.copy: self._copies": "rounds_on_host",
    "HostGradient.copy: self._in_flight": "step_on_host",
    "HostGradient.reuse_sources": "rounds_on_host",
    "HostGradient.wait": "step_on_host",
    "HostGradient.collect": "step_on_host",
    "ShardedGradScaler._unscale_grads_": "scaled_step",
    "WriteGuard.note_write": "writes_on_host",
    "WriteGuard.wait_for_reads": "writes_on_host",
    "FlatShard.gathered": "whole_parameters",
}

# Waits that no program here needs, and why they are there.
UNFOUND = {
    "abandon": _NO_STREAMS,
    "FlatReduction.abandon: self._scatter": _NO_STREAMS,
    "TwoStageReduction.abandon: collectives": _NO_STREAMS,
    "TwoStageReduction.abandon: super": "as of one stage, for which a program is found",
    "FlatGradients._give_up": "an error or interrupt before the wait, at a chosen line alone",
    "FullValues._abandon": "an error or interrupt while a gather is issued, at a chosen line alone",
    "FullValues.wait: collectives.abandon": "an interrupt of the wait, at a chosen line alone",
    "Codec.start": "an error or interrupt between two gathers of a class, at a chosen line alone",
    "FullValues.free": _NO_STREAMS,
    "LocalShard.write_slice": "a scope has waited, by copies that block (test_offload.py)",
    "LocalShard.write_edited": "a background save reads the shard",
    "LocalShard.copy_to_replicas: self.guard": "a background save reads the shard",
    "WriteGuard.set_handed_out": "a background save reads the shard",
    "FullValues.gather: self.wait()": "without it the state refuses: GATHERING to GATHERING",
    "FullValues.gather: self.wait() (2)": "graphs of gradients keep values; no stream is concerned",
    "FullValues.is_readable": "without it a kept parameter's shard is read",
    "FullValues.keep_edits: self.wait()": "one rank holds all values: no gather runs",
    "TwoStageReduction._issue_all_reduce": "a mesh whose ranks have no common group: eight ranks",
    "FlatGradients.issue": "a reduction put off until its unit is gathered again; no program is "
    "known: what a call gathers ahead and skips is freed at its end",
    "HostGradient.drop": "the next backward waits for what is left; this one gives memory back",
}


def _sites(module: str) -> list[Site]:
    return [site for site in REFERENCES if site.module == module] + find_sites(module)


def _look_up(site: Site, table: dict[str, str]) -> str | None:
    """Return what the table says of a wait, by the longest beginning that it has."""
    found = max((key for key in table if site.of.startswith(key)), key=len, default=None)
    return None if found is None else table[found]


def _program_of(site: Site) -> str | None:
    """Return the program that finds the wait's removal, None for one of the others."""
    keys = [key for key in (*FOUND_BY, *UNFOUND) if site.of.startswith(key)]
    assert keys, f"no program for {site}: add one that needs it, or take it out"
    return FOUND_BY.get(max(keys, key=len))


@on_device(num_ranks=4)
def test_programs_have_no_races() -> None:
    """As they are."""
    for name, run in PROGRAMS.items():
        run()
        device.synchronize()
        assert device.take_races() == [], name


@on_device(num_ranks=4)
def _all_are_found(module: str) -> None:
    # The device's threads would raise where they read what was freed too early: a race, too.
    storage.refuse_reads = None
    for site in _sites(module):
        if (program := _program_of(site)) is None:
            continue
        # Errors are of wrong values; what counts is below.
        with left_out(site), suppress(RuntimeError):
            PROGRAMS[program]()
            device.synchronize()
        num_races = torch.tensor([len(device.take_races())])
        dist.all_reduce(num_races)
        assert num_races.item() > 0, f"{program} does without {site}"


@pytest.mark.long
@pytest.mark.parametrize("module", MODULES)
def test_each_wait_is_found(module: str) -> None:
    """By a program with a race when it is left out."""
    _all_are_found(module=module)


def test_the_table_is_up_to_date() -> None:
    """WAITS.md tells all waits; write it anew with `python -m tests.device.test_mutations`."""
    assert _TABLE.read_text() == _table()
    sites = [site for module in MODULES for site in _sites(module)]
    for key in (*FOUND_BY, *UNFOUND):
        assert any(site.of.startswith(key) for site in sites), f"no wait {key}"


_TABLE = Path(__file__).with_name("WAITS.md")


def _table() -> str:
    lines = [
        "# The library's waits, and what finds them missing\n",
        "Each is left out in turn (`test_mutations.py`), and the race detector finds a race in the",
        "program of `programs.py` that is named here. What no program needs has a reason.\n",
        "| wait | found by |",
        "|---|---|",
    ]
    for module in MODULES:
        for site in _sites(module):
            program = _program_of(site)
            found = f"`{program}`" if program else f"none: {_look_up(site, UNFOUND)}"
            lines.append(f"| `{module}`: `{site.of}` | {found} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    _TABLE.write_text(_table())
