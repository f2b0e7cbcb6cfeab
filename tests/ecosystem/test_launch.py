"""A script that `accelerate launch` starts with a config file, beside FSDP2 in the same tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.common.trainers import as_torchrun_starts, forget_accelerators
from tests.ecosystem.launched import train_in_tools
from tests.ecosystem.programs import needs
from tests.harness.ranks import run_ranks

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
machine_rank: 0
main_process_port: 0
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


# What the file says, as `accelerate launch` passes it to the script.
SETTINGS = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def train_by_settings(folder: Path) -> dict[str, Any]:
    """Do what the script does, by torch's FSDP2."""
    with as_torchrun_starts(), patch.dict(os.environ, SETTINGS):
        forget_accelerators()
        return train_in_tools(folder)


@needs("accelerate", "transformers")
@pytest.mark.deadline(300.0)
def test_accelerate_launch_shards_by_its_config_file(tmp_path: Path) -> None:
    """A script with one call at its top, of a loop and of a Trainer: as FSDP2, started really."""
    config, script = tmp_path / "config.yaml", Path(__file__).parent / "launched.py"
    config.write_text(CONFIG)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    started = subprocess.run(
        [*launcher, script, tmp_path],
        env={
            **{name: value for name, value in os.environ.items() if "BYTECODE" not in name},
            "PYTHONPATH": str(script.parents[2]),
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert started.returncode == 0, started.stderr
    ours = json.loads((tmp_path / "told.json").read_text())
    theirs = run_ranks(2, train_by_settings, tmp_path / "theirs", timeout=100)[0]
    classes = (theirs.pop("class"), ours.pop("class"))
    assert classes == ("torch.distributed.fsdp", "composable_shard.fsdp2")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert ours["loop"][-1] == ours["loop"][-2]
