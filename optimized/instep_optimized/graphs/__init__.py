"""CUDA graphs: a body of op calls is recorded once per (key, bucket) and replayed on separate buffers.

`capture_and_replay.py` keeps keys, buckets and inputs. `cuda.py` records real graphs. `emulator.py` emulates them on a
CPU, call by call, so that a test finds stale data without a GPU. `capture_all_at_start.py` captures all graphs of an
engine. Leaves
out: the bodies (`round_for_step_count.py`).
"""

from .capture_and_replay import Recorder, Recording, Runner, buckets
from .emulator import Emulator, LooseCall

__all__ = ["Emulator", "LooseCall", "Recorder", "Recording", "Runner", "buckets"]
