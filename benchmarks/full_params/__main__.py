"""Runs a case: hand_over, unshard."""

import sys

from benchmarks.cases import run_case

CASES = ["hand_over", "unshard"]

if __name__ == "__main__":
    sys.exit(run_case("benchmarks.full_params", CASES))
