"""CUDA graphs: a body of op calls is recorded once per (key, bucket) and replayed on buffers of its own.

Leaves out: the bodies (the engine's core has them). `runner.py` keeps keys, buckets and inputs; `cuda.py` records for
real; `recorded.py` does the same on a CPU, call by call, so that what goes stale is found without a GPU.
"""

from .recorded import Emulator, LooseCall
from .runner import Recorder, Recording, Runner, buckets

__all__ = ["Emulator", "LooseCall", "Recorder", "Recording", "Runner", "buckets"]
