"""`python -m peers.live.cases`: the configurations of released SGLangs that are run and judged, as a table.

A case is one engine process: its arguments, its waves of requests, and the expected verdict. Leaves out: running it
(`run.py`), and the judgement (`judge.py`).
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import TOP

RIGHT, WRONG, DIES, UNJUDGED = "right", "wrong: ", "dies: ", "not judged: "
SUFFIX = [10, 84, 104, 101]  # follows a former answer in a prompt that continues it
LONG = (66, 67, 68, 69)  # numbers of the prompts that are long enough for a prefix cache


class Request(NamedTuple):
    """One request. Those whose name begins with w are recorded.

    prompt   number of its prompt;  tokens: length of its answer
    after    the request comes when the wave's first answer has this many tokens
    again    tokens of the prompt's answer in the wave before, which continue the prompt; None: the prompt alone
    """

    name: str
    prompt: int
    tokens: int
    after: int = 0
    again: int | None = None


Wave = tuple[Request, ...]


def at_once(count: int, tokens: int, recorded: int = 6, short: int | None = None) -> Wave:
    """Requests that come together; those that are not recorded may have shorter answers."""
    return tuple(
        Request(f"w{number:02}", number, tokens) if number < recorded else
        Request(f"x{number:02}", number, short or tokens) for number in range(count)
    )  # fmt: skip


SIX = at_once(6, 64)
TWICE = (tuple(Request(f"w{number}", number, 40) for number in LONG),
         tuple(Request(f"w{number}b", number, 40, again=40) for number in LONG))  # fmt: skip
GROWING = (
    Request("w00", 0, 120), Request("w01", 1, 80), Request("x05", 5, 40),
    *(Request(f"{'w' if number == 2 else 'x'}{number:02}", number, 24, after=24) for number in (2, 6, 7, 8, 9, 10)),
    *(Request(f"x{number}", number, 20, after=70) for number in (14, 15, 16, 17, 18, 19, 20)),
)  # fmt: skip
STAGGERED = (Request("w00", 0, 64), *(Request(f"w{number}", number, 40, after=6 * place)
                                      for place, number in enumerate(LONG, 1)))  # fmt: skip
SHRINKING = (Request("w00", 0, 64), Request("x03", 3, 14), Request("w01", 1, 64), Request("x04", 4, 14),
             Request("w02", 2, 64), Request("x05", 5, 14))  # fmt: skip
EVERYTHING = (  # the plain reference of all requests above, and of those that continue an answer
    at_once(66, 120, recorded=3) + tuple(Request(f"x{number}", number, 90) for number in LONG),
    tuple(Request(f"x{number}b", number, 40, again=40) for number in LONG),
)


def switching(*steps: int, down: float, up: float) -> dict[str, Any]:
    """Parameters of one slot of an adaptive file that change the step count within 64 tokens."""
    return {"candidate_steps": list(steps), "up_hysteresis": up, "down_hysteresis": down, "ema_alpha": 0.6,
            "update_interval": 2, "warmup_batches": 2}  # fmt: skip


TO_ONE = {"1": switching(1, 3, down=2.0, up=1.9)}
FAST = {"1": switching(1, 3, 7, down=0.75, up=0.0)}
WITH_NONE = {"1": switching(0, 1, 3, 7, down=2.5, up=-1.0)}
FROM_NONE = {"1": {"candidate_steps": [3]}, "5": {"candidate_steps": [0]}}  # 0 steps while five or more run


@dataclass(frozen=True)
class Case:
    """One engine process.

    release, what  the release, and what is tried, for the table
    steps     draft tokens a round at the start; 0: no speculation
    adaptive  the file of step counts; {}: the release's default table; None: the count is fixed
    options   more arguments of the engine, in the names of 0.5.14
    environment  variables of its process
    record    options of the recorder
    expected  "right"; or "wrong: ", "dies: " or "not judged: ", and words of the finding or the reason
    """

    name: str
    release: str
    what: str
    waves: tuple[Wave, ...] = (SIX,)
    steps: int = 3
    adaptive: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    expected: str = RIGHT


OVERLAP = {"disable_overlap_schedule": False}
RADIX = {"disable_radix_cache": False, "max_mamba_cache_size": 96}
BUFFERED = {**RADIX, "mamba_radix_cache_strategy": "extra_buffer", "mamba_track_interval": 64}
RING = {"enable_linear_replayssm_spec": True}
WHOLE = {"layers": (), "every": 8}  # states of all layers
TWELVE = {"max_running_requests": 12, "max_mamba_cache_size": 32, "cuda_graph_bs_decode": [1, 2, 4, 8, 16]}
MANY = {"max_running_requests": 48, "max_mamba_cache_size": 64, "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 48]}
FORTY = at_once(40, 96, recorded=3, short=16)
PINNING = ("0.5.12", "0.5.13", "0.5.14", "0.5.16", "0.5.17")  # releases that pin torch 2.11
NEWER = ("0.5.18", "0.5.20", "0.5.23")
TREES = UNJUDGED + "trees of drafts are not recorded"

CASES = (
    Case("switch-12", "0.5.12", "adaptive [1, 3] from 3", adaptive=TO_ONE, record=WHOLE,
         expected=WRONG + "holds the state of request"),
    Case("switch-13", "0.5.13", "adaptive [1, 3] from 3", adaptive=TO_ONE, record=WHOLE),
    Case("rise-16", "0.5.16", "ring, adaptive 0 -> 3, overlap", (SHRINKING,), adaptive=FROM_NONE,
         options=OVERLAP | RING, record=WHOLE, expected=WRONG + "entries in place of the window's last"),
    Case("rise-17", "0.5.17", "ring, adaptive 0 -> 3, overlap", (SHRINKING,), adaptive=FROM_NONE,
         options=OVERLAP | RING, record=WHOLE),
    Case("zero-16", "0.5.16", "adaptive 0 -> 3, overlap", (SHRINKING,), adaptive=FROM_NONE, options=OVERLAP),
    Case("ring-radix-16", "0.5.16", "ring, radix cache, prefix hits", TWICE, options=RADIX | RING, record=WHOLE,
         expected=WRONG + "with the conv window of"),
    *(Case(f"plain-{release[-2:]}", release, "no speculation", EVERYTHING, steps=0, options=MANY,
           record={"every": 32}) for release in (*PINNING, *NEWER)),
    Case("fixed-12", "0.5.12", "3 steps"),
    Case("wide-12", "0.5.12", "adaptive [1, 3, 7] from 3", adaptive=FAST,
         expected=WRONG + "holds the window of request"),
    Case("overlap-12", "0.5.12", "3 steps, overlap", options=OVERLAP, environment={"SGLANG_ENABLE_SPEC_V2": "1"}),
    Case("fixed-13", "0.5.13", "3 steps"),
    Case("fast-13", "0.5.13", "adaptive [1, 3, 7] from 3", adaptive=FAST),
    Case("default-13", "0.5.13", "default adaptive table from 3, 12 requests", (at_once(12, 48, recorded=3),),
         adaptive={}, options=TWELVE),
    Case("overlap-13", "0.5.13", "adaptive [1, 3, 7] from 3, overlap", adaptive=FAST, options=OVERLAP),
    Case("retract-13", "0.5.13", "adaptive [1, 3, 7] from 3, a KV pool of 480 tokens", (at_once(6, 90),),
         adaptive=FAST, options={"max_total_tokens": 480}),
    Case("radix-13", "0.5.13", "adaptive [1, 3, 7] from 3, radix cache with extra buffer, prefix hits", TWICE,
         adaptive=FAST, options=BUFFERED),
    Case("chunked-13", "0.5.13", "3 steps, prefill chunks of 64", (STAGGERED,), options={"chunked_prefill_size": 64}),
    Case("fixed-14", "0.5.14", "3 steps, overlap", options=OVERLAP),
    Case("zero-14", "0.5.14", "adaptive 0 -> 3, overlap", (SHRINKING,), adaptive=FROM_NONE, options=OVERLAP),
    Case("radix-14", "0.5.14", "adaptive [1, 3, 7] from 3, radix cache with extra buffer, prefix hits", TWICE,
         adaptive=FAST, options=BUFFERED),
    Case("bf16-14", "0.5.14", "3 steps, bf16 states", options={"mamba_ssm_dtype": "bfloat16"}),
    Case("mixed-14", "0.5.14", "no speculation, prefill chunks of 64 in mixed batches", (STAGGERED,), steps=0,
         options={"chunked_prefill_size": 64, "enable_mixed_chunk": True}),
    Case("large-14", "0.5.14", "3 steps, a batch larger than every graph", options={"cuda_graph_bs_decode": [1, 2, 4]}),
    Case("tree-14", "0.5.14", "trees of 8 nodes", options={"speculative_eagle_topk": 4,
         "speculative_num_draft_tokens": 8}, expected=TREES),
    Case("ngram-14", "0.5.14", "n-grams, windows of 4", options={"speculative_algorithm": "NGRAM",
         "speculative_ngram_max_bfs_breadth": 1}),
    Case("fixed-16", "0.5.16", "3 steps, overlap", options=OVERLAP),
    Case("default-16", "0.5.16", "default adaptive table from 7, overlap, 40 -> 3 requests", (FORTY,), steps=7,
         adaptive={}, options=MANY | OVERLAP),
    Case("grow-16", "0.5.16", "adaptive [0, 1, 3, 7] from 7, overlap, requests that come later", (GROWING,), steps=7,
         adaptive=WITH_NONE, options=TWELVE | OVERLAP, record={"every": 0}),
    Case("bf16-16", "0.5.16", "adaptive [1, 3, 7] from 7, bf16 states, overlap", steps=7, adaptive=FAST,
         options=OVERLAP | {"mamba_ssm_dtype": "bfloat16"}),
    Case("radix-16", "0.5.16", "3 steps, radix cache, prefix hits", TWICE, options=RADIX),
    Case("ring-16", "0.5.16", "ring, 3 steps", options=RING),
    Case("large-16", "0.5.16", "3 steps, a batch larger than every graph", options={"cuda_graph_bs_decode": [1, 2, 4]}),
    Case("tree-16", "0.5.16", "trees of 8 nodes", options={"speculative_eagle_topk": 4,
         "speculative_num_draft_tokens": 8}, expected=TREES),
    Case("ngram-16", "0.5.16", "n-grams, windows of 4", options={"speculative_algorithm": "NGRAM",
         "speculative_ngram_max_bfs_breadth": 1}),
    Case("full-16", "0.5.16", "3 steps, overlap, a batch as large as the largest graph", (at_once(8, 64),),
         options=OVERLAP, expected=DIES + "must match"),
    Case("start-16", "0.5.16", "adaptive [1, 3, 7] from 3: a count above the initial one", adaptive=FAST,
         expected=DIES + "shared logits buffer"),
    *(Case(f"fixed-{release[-2:]}", release, "3 steps, overlap", options=OVERLAP)
      for release in ("0.5.17", *NEWER)),
    *(Case(f"ring-radix-{release[-2:]}", release, "ring, radix cache, prefix hits", TWICE, options=RADIX | RING,
           expected=RIGHT if release in ("0.5.17", "0.5.18") else WRONG + "from the state of")
      for release in ("0.5.17", *NEWER)),
    Case("rise-18", "0.5.18", "ring, adaptive 0 -> 3, overlap", (SHRINKING,), adaptive=FROM_NONE,
         options=OVERLAP | RING, record=WHOLE),
    *(Case(f"rise-{release[-2:]}", release, "ring, adaptive 0 -> 3, overlap", (SHRINKING,), adaptive=FROM_NONE,
           options=OVERLAP | RING, record=WHOLE, expected=WRONG + "tokens were accepted")
      for release in ("0.5.20", "0.5.23")),
    Case("zero-23", "0.5.23", "adaptive 0 -> 3, overlap", (SHRINKING,), adaptive=FROM_NONE, options=OVERLAP),
)  # fmt: skip

# Names of arguments in other releases than 0.5.14.
BEFORE_14 = {"cuda_graph_bs_decode": "cuda_graph_bs", "mamba_radix_cache_strategy": "mamba_scheduler_strategy"}
RENAMED = {"0.5.12": BEFORE_14, "0.5.13": BEFORE_14,
           "0.5.16": {"enable_linear_replayssm_spec": "enable_gdn_replayssm_spec"}}  # fmt: skip


def arguments(case: Case, files: Path, own: Path, port: int) -> dict[str, Any]:
    """The engine's arguments. files: of the bundle; own: a folder for the file of step counts."""
    found: dict[str, Any] = dict(
        model_path=str(files / "model"), skip_tokenizer_init=True, dtype="bfloat16", mem_fraction_static=0.5,
        max_total_tokens=16384, attention_backend="triton", sampling_backend="pytorch", grammar_backend="none",
        mm_attention_backend="sdpa", enable_multimodal=False, disable_radix_cache=True, max_running_requests=8,
        cuda_graph_bs_decode=[1, 2, 4, 8], context_length=2048, max_mamba_cache_size=16, random_seed=0,
        disable_overlap_schedule=True, log_level="info", disable_custom_all_reduce=True, skip_server_warmup=True,
        mamba_ssm_dtype="float32", port=port, watchdog_timeout=120,
    )  # fmt: skip
    # The prefill graph of a text-only model dies on its positions, which have three axes.
    old = RENAMED.get(case.release) is BEFORE_14
    found |= {"disable_piecewise_cuda_graph": True} if old else {"cuda_graph_backend_prefill": "disabled"}
    if case.steps:
        found |= dict(speculative_algorithm="EAGLE", speculative_num_steps=case.steps, speculative_eagle_topk=1,
                      speculative_num_draft_tokens=case.steps + 1, speculative_draft_model_path=str(files / "draft"))
    found |= case.options
    if found.get("speculative_algorithm") == "NGRAM":
        for name in ("speculative_num_steps", "speculative_eagle_topk", "speculative_draft_model_path"):
            del found[name]
    if case.adaptive is not None:
        found["speculative_adaptive"] = True
    if case.adaptive:
        file = own / "adaptive.json"
        flat = case.release == "0.5.12"  # later releases have a slot for each batch size
        file.write_text(json.dumps(case.adaptive["1"] if flat else case.adaptive))
        found["speculative_adaptive_config"] = str(file)
    renamed = RENAMED.get(case.release, {})
    return {renamed.get(name, name): value for name, value in found.items()}


def prompts() -> list[list[int]]:
    """66 short prompts and four long ones, as bytes of the texts that `fixtures/tiny` has."""
    given = json.loads((TOP / "fixtures" / "tiny" / "prompts.json").read_text())
    texts = [one["text"].encode() for one in given if 10 <= len(one["text"].encode()) <= 400]
    all_of_it = b"".join(texts)
    short = [*texts[:6], *(all_of_it[at : at + 25 + at % 36] for at in range(0, 60 * 29, 29))]
    long = [all_of_it[begin : begin + length] for begin, length in ((40, 200), (300, 330), (700, 291), (1100, 150))]
    return [list(one) for one in (*short, *long)]


def by_name(names: str | None) -> list[Case]:
    """The cases of names with commas; None: all."""
    if names is None:
        return list(CASES)
    known = {case.name: case for case in CASES}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise SystemExit(f"no case {', '.join(unknown)}; `python -m peers.live.cases` lists them")
    return [known[name] for name in names.split(",")]


def main() -> int:
    for case in CASES:
        print(f"{case.name:14} {case.release:7} {case.what}: {case.expected}")
    print(f"{len(CASES)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
