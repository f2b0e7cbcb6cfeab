"""Run the programs: `python -m tests.ecosystem [name ...]`."""

import sys

from tests.ecosystem.programs import run_all

if __name__ == "__main__":
    run_all(sys.argv[1:])
