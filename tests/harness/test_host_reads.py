"""Host reads of a device, from torch's warnings: the subject's are counted, the harness's are not.

Leaves out: a device. The tests issue torch's warnings themselves. On a CPU a trap replaces it
(`test_instrumentation.py`).
"""

import warnings

import pytest
import torch

from instep.watch.host_reads import Reads

MODE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"


def wait() -> None:
    warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The values that the mode was set to."""
    told = list[int]()

    def mode(number: int) -> None:
        told.append(number)
        warnings.warn(MODE, UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode)
    return told


def test_harness_reads_are_not_counted_as_the_subjects(modes: list[int]) -> None:
    reads = Reads(torch.device("cuda"))
    shown = warnings.showwarning
    with pytest.warns(UserWarning, match="something else") as given, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        with reads:
            wait()
            with reads.paused():
                wait()
                with reads.paused():
                    wait()
                wait()
            warnings.warn("something else", UserWarning, stacklevel=1)
            with reads.inside("pick"):
                wait()
    assert len(reads.found) == 2 and all("test_host_reads line" in read.reader for read in reads.found)
    assert len(given) == 1, "a warning about something else is issued again for the caller"
    assert modes == [1, 0], "torch warns whenever it is set"
    assert warnings.showwarning is shown
    with pytest.warns(UserWarning, match="synchronizing"):
        wait()
    assert len(reads.found) == 2
