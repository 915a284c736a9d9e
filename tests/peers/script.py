"""`python -m peers.script docs/found/NAME.py`: run a script with a peer's package from an unpacked wheel.

`python -m peers.script pytest FILE` runs a module in the same way. The package is not installed, so its own
dependencies are missing; a script needs only the package that it names.
"""

import runpy
import sys
from pathlib import Path

from instep.adapters import stubbed_imports

if __name__ == "__main__":
    for package in ("sglang", "vllm"):
        if any((Path(place) / package).is_dir() for place in sys.path):
            getattr(stubbed_imports, package)()
    sys.argv = sys.argv[1:]
    run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
    run(sys.argv[0], run_name="__main__")
