"""Print the figures: `python -m tests.house`."""

import sys

from tests.house.figures import main

if __name__ == "__main__":
    sys.exit(main())
