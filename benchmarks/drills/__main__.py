"""Runs a case: checkpoint_kills, rank_kills, cut_link, soak."""

import sys

from benchmarks.cases import run_case

CASES = ["checkpoint_kills", "rank_kills", "cut_link", "soak"]

if __name__ == "__main__":
    sys.exit(run_case("benchmarks.drills", CASES))
