"""`python -m peers.live.serve`: run a packed SGLang under `instep attach`, and print where the recording is.

Six requests at once, greedy, with MTP speculation whose step count changes from 3 to 1. The release 0.5.12 is wrong
there, from the first commit after the change on. Leaves out: the audit, which needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[3]
TOKENS = 64
SWITCHES = {"candidate_steps": [1, 3], "up_hysteresis": 1.9, "down_hysteresis": 2.0, "ema_alpha": 0.6,
            "update_interval": 2, "warmup_batches": 2}  # fmt: skip
QUIET = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_ENABLE_JIT_DEEPGEMM": "false",
}  # fmt: skip


def unpacked(bundle: Path, into: Path) -> Path:
    """The folder of a bundle's files; an archive is unpacked once."""
    if not (into / "release").exists():
        into.mkdir(parents=True, exist_ok=True)
        with tarfile.open(bundle / "bundle.tar.xz") as archive:
            archive.extractall(into, filter="data")
    return into


def environment(files: Path) -> dict[str, str]:
    """Variables of the engine's process: the packed packages come first, then what is there."""
    path = [str(files / part) for part in ("stubs", "engine", "kernels", "site")]
    path += [str(TOP / root) for root in ("harness", "reference", "optimized", "tests")]
    libraries = [str(files / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(path), "LD_LIBRARY_PATH": os.pathsep.join(libraries)}


def prompts() -> list[list[int]]:
    given = json.loads((TOP / "fixtures" / "tiny" / "prompts.json").read_text())
    texts = [list(one["text"].encode()) for one in given]
    return [one for one in texts if 10 <= len(one) <= 400][:6]


def arguments(files: Path, steps: str, port: int) -> dict[str, Any]:
    """The engine's arguments. steps: "adaptive", "fixed" or "none"."""
    release, model = (files / "release").read_text(), str(files / "model")
    found: dict[str, Any] = dict(
        model_path=model, skip_tokenizer_init=True, dtype="bfloat16", mem_fraction_static=0.5, max_total_tokens=16384,
        attention_backend="triton", sampling_backend="pytorch", grammar_backend="none", mm_attention_backend="sdpa",
        enable_multimodal=False, disable_radix_cache=True, max_running_requests=8, cuda_graph_max_bs=8,
        context_length=2048, max_mamba_cache_size=16, disable_overlap_schedule=True, random_seed=0, log_level="info",
        disable_custom_all_reduce=True, skip_server_warmup=True, mamba_ssm_dtype="float32", port=port,
        disable_piecewise_cuda_graph=True, watchdog_timeout=120,
    )  # fmt: skip
    if steps != "none":
        found |= dict(speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_eagle_topk=1,
                      speculative_num_draft_tokens=4, speculative_draft_model_path=str(draft(files)))
    if steps == "adaptive":
        flat = release == "0.5.12"  # later releases have a slot for each batch size
        file = files / "adaptive.json"
        file.write_text(json.dumps(SWITCHES if flat else dict.fromkeys(("1", "8"), SWITCHES)))
        found |= dict(speculative_adaptive=True, speculative_adaptive_config=str(file))
    return found


def draft(files: Path) -> Path:
    """A copy of the model's directory, since 0.5.12 edits the cached config of a draft model."""
    copy = files / "draft"
    if not copy.exists():
        copy.mkdir()
        for file in (files / "model").iterdir():
            os.link(file, copy / file.name)
    return copy


def generate(files: Path, steps: str, port: int, answers: Path) -> None:
    """Run the engine in this process and its children, and write the answers as JSON lines."""
    import sglang  # type: ignore[import-not-found]

    engine = sglang.Engine(**arguments(files, steps, port))
    given = prompts()
    found = engine.generate(input_ids=given, sampling_params={"temperature": 0, "max_new_tokens": TOKENS,
                                                              "ignore_eos": True})  # fmt: skip
    with open(answers, "w") as lines:
        for prompt, one in zip(given, found, strict=True):
            lines.write(json.dumps({"prompt": prompt, "tokens": list(one["output_ids"])}) + "\n")
            print(bytes(one["output_ids"])[:60], flush=True)
    engine.shutdown()


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers.live.serve", description="Record a packed SGLang with instep attach.")
    parser.add_argument("bundle", type=Path, help="the folder that peers.live.bundle made")
    parser.add_argument("out", type=Path, help="a folder for the recording and the answers")
    parser.add_argument("--steps", choices=("adaptive", "fixed", "none"), default="adaptive")
    parser.add_argument("--port", type=int, default=31000)
    parser.add_argument("--every", type=int, default=1, help="record the states of every n-th event")
    parser.add_argument("--engine", action="store_true", help="run the engine itself: for the process that is recorded")
    options = parser.parse_args(given)
    files = unpacked(options.bundle, options.bundle / "files")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.engine:
        generate(files, options.steps, options.port, options.out / "answers.jsonl")
        return 0
    draft(files)
    own = [sys.executable, "-m", "peers.live.serve", str(options.bundle), str(options.out), "--engine",
           "--steps", options.steps, "--port", str(options.port)]  # fmt: skip
    attach = [sys.executable, "-m", "instep", "attach", "sglang", "--folder", str(options.out / "recording"),
              "--state-layers", "all", "--every", str(options.every), "--", *own]  # fmt: skip
    return subprocess.run(attach, env=environment(files)).returncode


if __name__ == "__main__":
    sys.exit(main())
