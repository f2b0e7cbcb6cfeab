"""Runs a case: train, step, muon, clip."""

import sys

from benchmarks.cases import run_case

CASES = ["train", "step", "muon", "clip"]

if __name__ == "__main__":
    sys.exit(run_case("benchmarks.optimizers", CASES))
