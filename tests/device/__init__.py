"""Tests of this library on the device without hardware of `tests/common/device`."""
