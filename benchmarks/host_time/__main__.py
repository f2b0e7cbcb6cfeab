"""Runs a case: units, device, lockstep, optimizer."""

import sys

from benchmarks.cases import run_case

CASES = ["units", "device", "lockstep", "optimizer"]

if __name__ == "__main__":
    sys.exit(run_case("benchmarks.host_time", CASES))
