"""The same seed draws the same runs, in every process.

Hypothesis mixes into its integers the constants of all local modules that are imported by then. A run would depend on
whether instep is installed or a checkout, and in a test on the tests before it. Leaves out: what is drawn
(`draw_events.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

PROVIDERS: Any = providers  # what is changed here is no public name of Hypothesis


@contextmanager
def by_seed_alone() -> Iterator[None]:
    """Within the block Hypothesis draws without the constants of modules. Its own list of odd numbers stays."""
    before = PROVIDERS._get_local_constants
    PROVIDERS._get_local_constants = Constants
    PROVIDERS.CONSTANTS_CACHE.cache.clear()  # it holds the constants themselves
    try:
        yield
    finally:
        PROVIDERS._get_local_constants = before
        PROVIDERS.CONSTANTS_CACHE.cache.clear()
