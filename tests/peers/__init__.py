"""Runs of other libraries, continued: their checkpoints are fixtures that these libraries wrote."""
