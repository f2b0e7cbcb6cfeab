"""Runs a case: gloo, loop, compiled, gpu, gpu_graph."""

import sys

from benchmarks.cases import run_case

CASES = ["gloo", "loop", "compiled", "gpu", "gpu_graph"]

if __name__ == "__main__":
    sys.exit(run_case("benchmarks.step_time", CASES))
