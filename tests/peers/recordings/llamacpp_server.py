"""llama.cpp's server in the package `xllamacpp`: four slots, fp32 weights and KV, greedy, requests over HTTP.

    PYTHONPATH=tests python -m peers.recordings.llamacpp_server fixtures/square --drafts 7

Ends with the exit code of the audit. The answers of a server can depend on when its requests come, so the recording is
repeated. Leaves out: the judgement (`judged.py`).
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from ..engines import gguf_writer
from .judged import Asked, judged

SLOTS, ROOM = 4, 1024  # tokens of a slot


def serve(file: Path, drafts: int, checkpoints: int | None) -> Any:
    """A server that listens; drafts: by the MTP head, 0 without it; checkpoints: of a slot, None as the server has."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = str(file), SLOTS, SLOTS * ROOM
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup, params.verbosity = False, -1
    if checkpoints is not None:
        params.n_ctx_checkpoints = checkpoints
    if drafts:
        params.load_mtp, params.speculative.draft.n_max = True, drafts
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
    return xllamacpp.Server(params)


class Asking:
    """Asks a server, as many requests at once as it has slots; counts drafts."""

    def __init__(self, address: str) -> None:
        self.address, self.drafts, self.accepted = address, 0, 0

    def __call__(self, wanted: Sequence[Asked]) -> list[list[int]]:
        with ThreadPoolExecutor(SLOTS) as pool:
            answers = list(pool.map(self._one, wanted))
        self.drafts += sum(one["timings"].get("draft_n", 0) for one in answers)
        self.accepted += sum(one["timings"].get("draft_n_accepted", 0) for one in answers)
        return [one["tokens"] for one in answers]

    def _one(self, one: Asked) -> Any:
        body = {"prompt": one.prompt, "n_predict": one.count, "temperature": 0, "top_k": 1, "ignore_eos": True,
                "return_tokens": True}  # fmt: skip
        request = Request(f"{self.address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers.recordings.llamacpp_server")
    parser.add_argument("model", type=Path)
    parser.add_argument("--drafts", type=int, default=0, help="per window, by the MTP head; 0: none")
    parser.add_argument("--checkpoints", type=int, help="n_ctx_checkpoints; left out: the server's own")
    parser.add_argument("--times", type=int, default=8, help="recordings")
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        gguf_writer.write(options.model, file := Path(folder, "model.gguf"))
        server = serve(file, options.drafts, options.checkpoints)
        asking = Asking(server.listening_address)
        code = judged(asking, options.times, options.model, "float32")
    if options.drafts and not asking.drafts:
        print("the server drafted nothing")
        return 3
    return int(code)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the server's threads do not end by themselves
