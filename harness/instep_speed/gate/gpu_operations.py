"""GPU operations for the clocks: wait for the device, hold it while work is launched, make it compute longer.

Leaves out: the clocks (`clock.py`), and statistics.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from statistics import median

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

HELD_S = 0.02  # maximum seconds of a hold; launching an event of graphs takes a twentieth of it
TRIES = 10


class Card:
    """A GPU and its current stream.

    Between `hold` and `release` the device waits, while the host launches one piece of work. So the work then runs
    without a gap in which the device waits for the host. The time that it takes is the device's own.
    """

    def __init__(self, device: str) -> None:
        self._device, event = torch.device(device), torch.cuda.Event
        if self._device.index:  # launches and events use the current device; the process serves one arm
            torch.cuda.set_device(self._device)
        self._begun, self._ended = (event(enable_timing=True) for _ in range(2))
        self._go = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._word = self._go.numpy()  # writing to it launches nothing
        self._since = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._launch: float | None = None
        self._part = 0.0
        self._of_nothing(dragged=True)  # compiles both kernels

    def wait(self) -> None:
        """Wait until everything that was launched has ended."""
        torch.cuda.synchronize(self._device)

    def hold(self, drag: float = 0.0) -> None:
        """Hold the device: later launches start when `release` is called, or after HELD_S.

        drag: part of the work's time by which the device computes longer. Launching anything after the work takes a
        good part of that, and is subtracted. The first drag measures how much; the constructor does not, because other
        arms may be starting on the same device then.
        """
        if drag and self._launch is None:
            self._launch = self._of_a_drag()
        self._part = drag
        self._word[0] = 0
        _hold[(1,)](self._go, self._since, int(HELD_S * 1e9), num_warps=1)
        self._begun.record()

    def release(self) -> float | None:
        """Seconds from the end of the hold to the end of the launched work. None: the hold ended too early."""
        if self._part:
            self._drag(self._part, self._launch or 0.0)
        self._ended.record()
        late = self._begun.query()
        self._word[0] = 1
        self.wait()
        return None if late else 1e-3 * float(self._begun.elapsed_time(self._ended))

    def _drag(self, part: float, launch: float) -> None:
        _drag[(1,)](self._since, part, int(launch * 1e9), num_warps=1)

    def _of_a_drag(self) -> float:
        """Seconds by which a drag of nothing ends later than nothing."""
        plain, dragged = ([self._of_nothing(dragged) or 0.0 for _ in range(TRIES)] for dragged in (False, True))
        return max(0.0, median(dragged) - median(plain))

    def _of_nothing(self, dragged: bool) -> float | None:
        self.hold()
        if dragged:
            self._drag(0.0, 0.0)
        return self.release()


@triton.jit
def _hold(go, since, longest):
    """Spin until the host writes the word; store the time in nanoseconds of the device's clock."""
    now = globaltimer()
    until = now + longest
    while (tl.load(go, volatile=True) == 0) & (now < until):
        now = globaltimer()
    tl.store(since, now)


@triton.jit(do_not_specialize=["launch"])  # otherwise its first true value would be compiled while the device is held
def _drag(since, part, launch):
    """Spin for a part of the time since then, less what it took to launch this."""
    now = globaltimer()
    until = now + ((now - tl.load(since)).to(tl.float32) * part).to(tl.int64) - launch
    while now < until:
        now = globaltimer()
