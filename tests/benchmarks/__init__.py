"""Tests of the benchmarks and drills: no other tests import these."""
