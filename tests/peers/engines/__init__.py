"""Engines of other projects, as `--engine` takes them: one file each with functions `make`; entries of `make peers`.

Scripts of `docs/found/` that need a GGUF file get one by `with_gguf.py`. Leaves out: running them.
"""

from typing import Any

LED = "instep replay {trace} --engine peers.engines."
TINY = [
    f"fixtures/traces/{name}.jsonl"
    for name in ("adaptive", "peers/lengths", "faults/ragged", "faults/kept", "faults/mixed", "faults/steps")
]
SQUARE = [f"fixtures/square/{name}.jsonl" for name in ("rounds", "lengths", "kept", "copies")]  # with K = V
NEEDS = {
    "transformers": ["transformers==5.23.0"],
    "mlx-lm": ["mlx-lm==0.32.2", "mlx==0.32.4", "mlx-cpu==0.32.4"],
    "xllamacpp": ["xllamacpp==2026.10.11549", "gguf==0.19.0"],
}
MODULES = {"transformers": ["transformers"], "mlx-lm": ["mlx_lm", "mlx.core"], "xllamacpp": ["xllamacpp", "gguf"]}


def _entry(name: str, package: str, command: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "package": package, "version": NEEDS[package][0].partition("==")[2], "door": "engine",
        "command": command, "needs": NEEDS[package], "modules": MODULES[package], **more,
    }  # fmt: skip


def _script(name: str, package: str, file: str, expected: str) -> dict[str, Any]:
    """A script of docs/found, which ends with 1 and a sentence where it finds what it is about.

    since: of llama.cpp 2026.6.9713, 8.10229, 9.11063 and 10.11549 were tried.
    """
    run = f"docs/found/{file}.py"
    command = f"python -m peers.engines.with_gguf {run} fixtures/square" if package == "xllamacpp" else f"python {run}"
    since = {"llamacpp_rollback_in_a_batch": "2026.8.10229"}.get(file, "2026.6.9713" if package == "xllamacpp" else "")
    return _entry(name, package, command, door="script", expected=f"diverged; {expected}", since=since)


def _llama(name: str, make: str, traces: list[str], expected: str = "agree") -> dict[str, Any]:
    return _entry(name, "xllamacpp", f"{LED}llamacpp_engine:{make}", traces=traces, expected=expected)


ENTRIES = [
    _entry("a copy of the cache before each window", "transformers", f"{LED}transformers_engine:make", traces=TINY),
    _entry(
        "DynamicCache.crop after each window", "transformers", f"{LED}transformers_engine:cropping", traces=TINY[:2],
        expected="diverged; recurrent state; holds the state after",
    ),
    _script("DynamicCache.crop", "transformers", "transformers_crop", "a recurrent state that is off by 1."),
    _script("a hybrid as assistant", "transformers", "transformers_assistant", "the next draft are off by 0."),
    _script("left padding", "transformers", "transformers_left_padding", "with padding by 0."),
    _entry("norm weights as its loader makes them", "mlx-lm", f"{LED}mlx_engine:make", traces=TINY[:1],
           expected="diverged; conv window; relative error; T3"),
    _entry("from a file in fp32; batches", "mlx-lm", f"{LED}mlx_engine:stored_wide", traces=TINY),
    _script("norm weights", "mlx-lm", "mlx_norm_weights", "1 + w is off by 0.00"),
    _llama("llama_memory_seq_rm within a window", "make", SQUARE),
    _llama("the same, with rows after the final norm", "with_rows", SQUARE),
    _llama("a window with prompts that continue", "make", ["fixtures/square/beside.jsonl"],
           "diverged; commit, request; layer 0 conv window"),
    _llama("llama_memory_seq_rm of a whole window", "again", SQUARE[:2],
           "diverged; recurrent state; lacks the tokens of the previous step"),
    _llama("a window wider than n_ubatch, with rows", "cut", SQUARE[1:2], "diverged; conv window"),
    _llama("a window wider than n_ubatch", "narrow", SQUARE[1:2], "dies; SIGABRT; GGML_ASSERT"),
    _llama("llama_memory_seq_cp after a rollback", "copied", SQUARE[3:],
           "diverged; comes back different from what was saved"),
    _script("a rollback after a batch of several", "xllamacpp", "llamacpp_rollback_in_a_batch", "seq_rm says True"),
    _script("a rollback as long as the last decode", "xllamacpp", "llamacpp_rollback_too_far", "true, and off by"),
    _script("a rollback over a cut by n_ubatch", "xllamacpp", "llamacpp_window_cut", "seq_rm says True"),
    _script("a copy after a rollback", "xllamacpp", "llamacpp_copy_after_rollback", "off by 0.00, the copy by"),
    _script("a rollback after a load", "xllamacpp", "llamacpp_rollback_after_load", "seq_rm says True"),
]
