"""The benchmarks for one GPU, as far as they run without one."""

from __future__ import annotations

import pytest
import torch

from benchmarks.step_time import gpu as gpu_step_time
from benchmarks.step_time import gpu_graph
from tests.common.gpu_steps import overlap


@pytest.mark.parametrize("benchmark", [gpu_step_time, gpu_graph])
def test_without_a_gpu_a_benchmark_says_so(
    benchmark: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And ends well."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    benchmark.main([])  # type: ignore[attr-defined]
    assert capsys.readouterr().out == "needs a CUDA GPU: skipped\n"


def test_overlap_is_the_part_of_side_streams_beside_compute() -> None:
    """Ranges of one stream may touch or overlap; the busiest stream is compute."""
    compute = [(7, 0, 10), (7, 10, 20), (7, 30, 40)]
    side = [(1, 15, 25), (1, 20, 35), (2, 50, 60)]  # 10 of 30
    assert overlap([*side, *compute]) == pytest.approx(10 / 30)
    assert overlap(compute) == 0.0
    assert overlap([]) == 0.0
