"""The machine on which a speed was measured: everything about it that changes a speed.

A value that cannot be read here is None. Leaves out: serial numbers and names of hosts.
"""

from __future__ import annotations

import os
from pathlib import Path

from instep.report.machine import machine


def fingerprint(device: str) -> dict[str, str | None]:
    """Versions and device, the processor's name, how many cores may be used, and how busy they were."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 0)
    return {
        **machine(device), "processor": _processor(), "cores": str(len(usable)),
        "load": None if load is None else f"{load[0]:.1f} in the last minute",
    }


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
