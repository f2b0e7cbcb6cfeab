"""What a reader of the package has to hold, counted. Read `figures.py` first."""
