"""What runs the tests: ranks, memory counts, assertions, fake groups, grids. First `ranks.py`."""
