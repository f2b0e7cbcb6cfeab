"""What runs the tests: workers, forks, fake groups, grids. Read `helpers.py` first."""
