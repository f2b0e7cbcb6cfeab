"""Build the device before the tests, so that no test's deadline includes it."""

from tests.common.device import build

if missing := build.why_unavailable():
    print(f"The tests on the device are left out: {missing}")
