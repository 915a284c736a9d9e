"""CUDA graphs: a body of op calls is recorded once per (key, bucket) and replayed on separate buffers.

`runner.py` keeps keys, buckets and inputs. `cuda.py` records real graphs. `emulator.py` emulates them on a CPU, call by
call, so that a test finds stale data without a GPU. `capture.py` captures all graphs of an engine. Leaves out: the
bodies (`round.py`).
"""

from .emulator import Emulator, LooseCall
from .runner import Recorder, Recording, Runner, buckets

__all__ = ["Emulator", "LooseCall", "Recorder", "Recording", "Runner", "buckets"]
