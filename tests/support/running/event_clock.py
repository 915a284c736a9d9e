"""A clock for campaigns that advances by one per event, so that no machine is too slow for it.

Leaves out: what a campaign does when its time is over.
"""

from itertools import count
from types import SimpleNamespace

import pytest

from instep.campaign.fuzz import campaign


def count_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the times of campaigns (`seconds`, `shrink_s`) are numbers of events."""
    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=count().__next__))
