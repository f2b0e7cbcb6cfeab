"""Runs a case: own, background, planning, writers, deepspeed."""

import sys

from benchmarks.cases import run_case

CASES = ["own", "background", "planning", "writers", "deepspeed"]

if __name__ == "__main__":
    sys.exit(run_case("benchmarks.checkpoints", CASES))
