"""Programs of the tools that users come with; marked "ecosystem". Read `programs.py` first."""
