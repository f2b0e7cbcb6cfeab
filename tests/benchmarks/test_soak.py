"""Nothing grows: what a process holds after 16 steps of all kinds is what it held before.

`python -m benchmarks.drills soak` does 2,500 steps with every strategy, and counts resident memory
too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.drills import soak
from composable_shard import ShardingStrategy
from tests.harness.ranks import distributed

pytestmark = pytest.mark.long


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD])
@distributed(2)
def test_grows_nothing_over_steps_errors_and_checkpoints(
    strategy: ShardingStrategy, tmp_path: Path
) -> None:
    """Grows: tensors, descriptors and threads, exactly; two rounds of the soak's program."""
    trainer = soak.Trainer(strategy, tmp_path, every=1)
    trainer.run(0, 8)
    before = soak.count()
    trainer.run(8, 16)
    after = soak.count()
    for name in ("tensors", "descriptors", "threads"):
        assert after[name] == before[name], f"{name}: {before[name]} -> {after[name]}"
