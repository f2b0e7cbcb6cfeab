"""Settings of tests that hypothesis draws examples for."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def examples(number: int) -> settings:
    """Return settings for so many examples, with no limit of the time that any of them takes.

    A busy machine stops a process for longer than the limits of hypothesis.
    """
    return settings(
        max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
