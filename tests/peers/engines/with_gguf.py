"""Runs a script with a GGUF file of a checkpoint as its argument.

    PYTHONPATH=tests python -m peers.engines.with_gguf SCRIPT DIR

Leaves out: what is in the file (`gguf_writer.py`).
"""

import runpy
import sys
import tempfile
from pathlib import Path

from .gguf_writer import write

script, directory = sys.argv[1:3]
with tempfile.TemporaryDirectory() as folder:
    write(Path(directory), file := Path(folder, "model.gguf"))
    sys.argv = [script, str(file)]
    runpy.run_path(script, run_name="__main__")
