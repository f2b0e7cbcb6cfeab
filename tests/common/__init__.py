"""What tests and benchmarks share. It imports nothing of either."""
