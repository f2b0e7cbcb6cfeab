"""Runs a case: counts, overlap, latency, even, uneven, slow_links."""

import sys

from benchmarks.cases import run_case

CASES = ["counts", "overlap", "latency", "even", "uneven", "slow_links"]

if __name__ == "__main__":
    sys.exit(run_case("benchmarks.communication", CASES))
