"""Runs a case: step, device, estimate, padding."""

import sys

from benchmarks.cases import run_case

CASES = ["step", "device", "estimate", "padding"]

if __name__ == "__main__":
    sys.exit(run_case("benchmarks.memory", CASES))
