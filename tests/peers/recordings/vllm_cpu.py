"""vLLM on a CPU, from the package `vllm-cpu`: bf16, greedy, all requests submitted at once, its own scheduler.

    PYTHONPATH=tests python -m peers.recordings.vllm_cpu fixtures/square --ngram 4

Ends with the exit code of the audit, or with 1 if vLLM raises. It has no Triton, so no prefix caching when it drafts.
Leaves out: the judgement (`judged.py`).
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .judged import Asked, judged

SLOTS, ROOM = 4, 512
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def engine(model: Path, ngram: int) -> Any:
    """vLLM over a model; ngram: the most drafts of a window, looked up in the text."""
    os.environ.update(VARIABLES)
    if declared := torch_vision():
        sys.modules.update(dict.fromkeys(("torchaudio", "torchcodec")))  # None: as if they were not there
    from vllm import LLM, ModelRegistry
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

    if declared:  # else a separate process would inspect it, without these declarations
        ModelRegistry.register_model("Qwen3_5ForCausalLM", Qwen3_5ForCausalLM)
    lookup = {"method": "ngram", "num_speculative_tokens": ngram, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    drafting = {"speculative_config": lookup, "enable_prefix_caching": False} if ngram else {}
    return LLM(str(model), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=ROOM,
               max_num_seqs=SLOTS, **drafting)  # fmt: skip


def torch_vision() -> Any:
    """Declare the operators without which a torchvision for another torch cannot be imported. No text needs them."""
    spec = find_spec("torchvision")
    for library in Path(str(spec.origin)).parent.glob("_C*.so") if spec else ():
        try:
            torch.ops.load_library(str(library))
        except OSError:
            operators = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            return operators
    return None


class Raised(Exception):
    """An exception of vLLM while it served, which is a finding."""


class Asking:
    """Hands all requests to vLLM, which batches them as it likes."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def __call__(self, wanted: Sequence[Asked]) -> list[list[int]]:
        from vllm import SamplingParams

        how = [SamplingParams(temperature=0, max_tokens=one.count, ignore_eos=True, detokenize=False) for one in wanted]
        try:
            answers = self.llm.generate([{"prompt_token_ids": one.prompt} for one in wanted], how, use_tqdm=False)
        except Exception as error:
            raise Raised(f"vLLM raises {type(error).__name__}: {error}") from error
        return [[*one.outputs[0].token_ids] for one in answers]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers.recordings.vllm_cpu")
    parser.add_argument("model", type=Path)
    parser.add_argument("--ngram", type=int, default=0, help="drafts per window, looked up in the text; 0: none")
    parser.add_argument("--times", type=int, default=2, help="recordings")
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("config.json", "model.safetensors"):  # vLLM reads every safetensors file of a folder
            shutil.copy(options.model / name, folder)
        asking = Asking(engine(Path(folder), options.ngram))
        try:
            return int(judged(asking, options.times, options.model, "bfloat16"))
        except Raised as error:
            print(error)
            return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
