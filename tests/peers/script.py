"""`python -m peers.script docs/found/NAME.py`: a script that imports a peer's package, with that package out of a
wheel.

`python -m peers.script pytest FILE` runs a module in the same way. A script needs only the package that it names;
this is for where the package is unpacked and not installed, so that what the package itself needs is not there.
Leaves out: the rest.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .kernels import sources

if __name__ == "__main__":
    for package in ("sglang", "vllm"):
        if any((Path(place) / package).is_dir() for place in sys.path):
            getattr(sources, package)()
    sys.argv = sys.argv[1:]
    run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
    run(sys.argv[0], run_name="__main__")
