"""Tests of composable_shard.options."""
