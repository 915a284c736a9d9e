"""Variants of the kernels of KDA, timed next to each other on a GPU: re-runs before a verify of 4, and a prompt.

Next to the re-runs it times launches that only negate the same states: no re-run can be faster than the best of them.
A variant is an edit of a kernel's text, a shape, or constants of a launch. Before and after it is timed, a re-run must
have the bits of one-token launches, and a prompt must be as near to the kernels without explicit layouts as bf16 is.
Parts of a re-run leave work out, so their answers are wrong: they show only where time goes. A script for a GPU:
    PYTHONPATH=reference:optimized:harness:tests python tests/perf/kda_gpu.py --out kda-variants.json
With `--compile` it compiles every re-run for a GPU anywhere, and prints registers, stack and shared memory.
Leaves out: floors and peers (`instep bench --kind channel_decay`).
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

if "--compile" in sys.argv:
    torch.cuda.is_available = lambda: True  # decides that kernels are native; nothing is launched

from instep.atomic_write import write_atomically
from instep_optimized.kernels import gdn_dispatch
from instep_optimized.kernels.device.gluon_helpers import along, ask_for, gdc_launch_dependents, gdc_wait, put_state
from instep_optimized.kernels.gdn_prefill import chunk64
from instep_optimized.memory_addresses import Part
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.triton import TRITON
from instep_speed.bench.answer_check import fallen
from instep_speed.bench.bench_types import TO, Ground
from instep_speed.bench.drawn_rows import part
from instep_speed.bench.interleaved_timing import Rates, of_one, timed
from instep_speed.bench.kinds import channel_decay as kind
from support.kernels.planted import planted_kernels

BATCHES, TOKENS = (8, 64, 1), 8192
NEAR = 3e-3  # of a norm: two roundings to bf16 differ by 2^-9 sqrt(2/3) = 1.6e-3 of each number on average
JOBS = 8  # processes that compile re-runs
Edits = tuple[tuple[str, str], ...]
MODULES: dict[str, Any] = {"chunk64": chunk64, "gdn_dispatch": gdn_dispatch}
if gdn_dispatch.blocks_staged is not None:
    MODULES["chunk64_launches_gluon"] = gdn_dispatch.blocks_staged
WINDOWS: Any = gdn_dispatch.staged  # the launches with explicit layouts; None without a GPU

STAYS: Edits = (
    ("settled.per_v, state.to(DTYPE), stripe, SHAPE.lined, True)",
     "settled.per_v, state.to(DTYPE), stripe, SHAPE.lined, False)"),
)  # fmt: skip
LOADED: Edits = (("GATES_COPIED: gl.constexpr = CHANNELS and", "GATES_COPIED: gl.constexpr = False and"),)
ALL_GUESS: Edits = (("gl.program_id(1) < 2 * SHAPE.ahead:", "gl.program_id(1) < 2**30:"),)
PARTS: Mapping[str, Edits] = {
    "no token again": (("for age in range(pending):", "for age in range(pending * 0):"),),
    "no row": (("for t in range(rows):", "for t in range(rows * 0):"),),
    "no token, no row": (("for age in range(pending):", "for age in range(pending * 0):"),
                         ("for t in range(rows):", "for t in range(rows * 0):")),
    "no state stored": (("        if settle >= 0:\n", "        if settle >= 2**40:\n"),),
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A re-run. edits: of `token_by_token_gluon.py`; shape: fields of `Shape` that differ; right: whether it can be"""

    edits: Edits = ()
    shape: Mapping[str, Any] = field(default_factory=dict)
    right: bool = True


RERUNS: Mapping[str, Variant] = {
    "now": Variant(), "now, again": Variant(), **{name: Variant(edits, right=False) for name, edits in PARTS.items()},
    "stays": Variant(STAYS), "all asked for": Variant((), {"asked": 1}),
    "gates loaded": Variant(LOADED), "all guess": Variant(ALL_GUESS),
    "none leads": Variant((), {"leads": 0, "ahead": 0, "kept_first": True}),
    "none leads, gates loaded": Variant(LOADED, {"leads": 0, "ahead": 0, "kept_first": True}),
    **{f"{count} ahead": Variant((), {"leads": 0, "ahead": count, "kept_first": True}) for count in (264, 352)},
    **{f"{count} lead": Variant((), {"leads": count, "ahead": 0, "kept_first": False}) for count in (132, 264)},
}  # fmt: skip
# Constants by file and name.
PLAIN_CARRY = {"gdn_dispatch.blocks_staged": None}
PROMPTS: dict[str, Mapping[str, Any]] = {
    "now": {}, "now, again": {}, "carry: the compiler's layouts": PLAIN_CARRY,
    **{f"prepare: {channels} channels, {warps} warps": {
        "chunk64.SLICE": channels, "chunk64.PREPARE_CHANNELS": {"warps": warps}}
       for channels, warps in ((32, 4), (32, 1), (16, 1))},
}  # fmt: skip
if launches := MODULES.get("chunk64_launches_gluon"):
    PROMPTS["carry: one place for weights"] = {"chunk64_launches_gluon.CARRY": launches.CARRY | {"LAST": 1}}


@dataclass(frozen=True)
class Copy:
    """A launch that negates all states in place, and does nothing else.

    rows     rows of V of a program
    asked    whether they are prefetched into the cache before the wait for the previous launch
    early    whether a launch may begin before the previous one ends
    waits    whether it then waits; a re-run has to
    """

    rows: int
    warps: int
    asked: bool = False
    early: bool = True
    waits: bool = True

    def __str__(self) -> str:
        told = {", asked for": self.asked, ", not early": not self.early, ", without the wait": not self.waits}
        return f"{self.rows} rows, {self.warps} warps" + "".join(name for name, is_so in told.items() if is_so)


COPIES = (Copy(64, 4), Copy(64, 4, early=False), Copy(64, 16), Copy(32, 8), Copy(16, 4), Copy(16, 4, asked=True),
          Copy(16, 4, early=False), Copy(16, 4, waits=False), Copy(8, 4), Copy(8, 4, waits=False), Copy(8, 2),
          Copy(4, 4))  # fmt: skip


@gluon.jit
def negated(
    pool, units, per_unit, per_head, KT: gl.constexpr, ROWS: gl.constexpr, ASKED: gl.constexpr, BEGINS: gl.constexpr,
    WAITS: gl.constexpr,
):  # fmt: skip
    """Negate states in place, as `Copy` describes. Grid (V tiles, HV, B)."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    request, head = gl.program_id(2), gl.program_id(1).to(gl.int64) * per_head
    if ASKED:
        ask_for(pool + gl.load(units + request) * per_unit + head, KT, gl.program_id(0) * ROWS, ROWS, KT)
    if BEGINS:
        if WAITS:
            gdc_wait()
        gdc_launch_dependents()
    places = pool + gl.load(units + request) * per_unit + head
    places += (gl.program_id(0) * ROWS + along(0, ROWS, LINES)) * KT + along(1, KT, LINES)
    put_state(places, -gl.load(places), True)


def copies(ground: Ground, batch: int, layers: int) -> dict[str, Callable[[], Any]]:
    """Each copy over the states of all layers, in the order of the re-runs, and torch's. Each is checked."""
    heads, units = heads_of(ground), ground.ints(range(batch, 0, -1))
    pools = [kind.pool_of(ground, batch + 1, heads).transpose(2, 3) for _ in range(layers)]
    values, keys = pools[0].shape[2:]

    def copy(one: Copy) -> None:
        for pool in pools:
            negated[(values // one.rows, heads, batch)](
                pool, units, pool.stride(0), pool.stride(1), keys, one.rows, one.asked, one.early, one.waits,
                num_warps=one.warps, launch_pdl=one.early)  # fmt: skip

    works: dict[str, Callable[[], Any]] = {"torch": lambda: [pool[1:].mul_(-1.0) for pool in pools]}
    works |= {str(one): partial(copy, one) for one in COPIES}
    for name, work in works.items():
        start = [pool.clone() for pool in pools]
        work()
        assert all(torch.equal(pool[1:], -old[1:]) for pool, old in zip(pools, start, strict=True)), name
    return works


class Forms:
    """The kernels of all variants, and which of them serves."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.made = folder, patch, dict[Edits, Any]()

    @contextlib.contextmanager
    def serving(self, one: Variant) -> Iterator[None]:
        """Every launch of a window runs this variant."""
        if WINDOWS is None:
            yield
            return
        if one.edits not in self.made:
            where = self.folder / str(len(self.made))
            where.mkdir()
            name = "gdn_windows.token_by_token_gluon"
            self.made[one.edits] = planted_kernels(name, one.edits, where, self.patch).staged_window
        chosen = WINDOWS.shape_for
        with self.patch.context() as now:
            now.setattr(WINDOWS, "staged_window", self.made[one.edits])
            now.setattr(WINDOWS, "shape_for", lambda form, size, rows: chosen(form, size, rows)._replace(
                **one.shape if form in ("window", "channels") else {}))  # fmt: skip
            yield


def reruns(ground: Ground, batch: int, forms: Forms, layers: int = 0) -> tuple[int, Callable[[Variant], Any], Any]:
    """The layers of a sample; the launches of a variant, one a layer; and the finding of a variant."""
    rows = kind.drawn(ground, batch * kind.WINDOW, heads_of(ground))
    layers = layers or ground.layers(4.0 * batch * rows.k[0].numel() * rows.v.shape[2])
    pools = [kind.pool_of(ground, batch + 1, heads_of(ground)) for _ in range(layers)]
    parts = [part(ground, "window", range(batch, 0, -1), kind.WINDOW, pool) for pool in pools]
    arm = kind._Rerun.of(ground, TRITON, rows, parts).arm("")

    def under(work: Callable[[], Any], one: Variant) -> Any:
        with forms.serving(one):
            return work()

    assert arm.work is not None
    return layers, lambda one: partial(under, arm.work, one), partial(under, arm.check)


def heads_of(ground: Ground) -> int:
    return kind.HEADS["tiny" if ground.tiny else "default"]


def prompt(ground: Ground, patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Callable[[Mapping[str, Any]], str]]:
    """The launches of a variant of a prompt, or one of its kernels; and the finding of a variant."""
    rows = kind.drawn(ground, 70 if ground.tiny else TOKENS, heads_of(ground))
    pool = kind.pool_of(ground, 2, heads_of(ground))
    start, one, launch = pool.clone(), part(ground, "chunk", [1], len(rows.v), pool), chunk64.launch

    def served(variant: Mapping[str, Any], only: str = "") -> torch.Tensor:
        with patch.context() as now:
            for name, value in variant.items():
                now.setattr(MODULES[name.partition(".")[0]], name.partition(".")[2], value)
            for file in MODULES.values() if only else ():
                now.setattr(file, "launch", lambda kernel, *given, **named: (
                    launch(kernel, *given, **named) if only in kernel.__name__ else None), raising=False)  # fmt: skip
            core: torch.Tensor = TRITON.recurrence(kind.ROW)(inputs=rows, parts=(one,), dtype=ground.dtype, to=TO)
            return core

    def answers(variant: Mapping[str, Any]) -> list[torch.Tensor]:
        pool.copy_(start)
        found = [served(variant).double(), pool.double()]
        pool.copy_(start)
        return found

    right = answers(PLAIN_CARRY)

    def finding(variant: Mapping[str, Any]) -> str:
        far = max(float((x - r).norm() / r.norm()) for x, r in zip(answers(variant), right, strict=True))
        return "" if far <= NEAR else f"off by {far:.1e} from the compiler's layouts"

    return served, finding


def findings_of(variants: Mapping[str, Any], finding: Callable[[Any], str]) -> dict[str, str]:
    """The finding of each variant. A variant that raises is one, and the others go on."""
    found = dict[str, str]()
    for name, one in variants.items():
        try:
            found[name] = finding(one)
        except Exception as raised:
            found[name] = fallen(raised)
    return found


def table(works: Mapping[str, Callable[[], Any]], findings: Mapping[str, str], units: int, device: torch.device,
          samples: int) -> dict[str, Any]:  # fmt: skip
    """Times of all that is right, and what is wrong with the rest."""
    right = {name: work for name, work in works.items() if not findings.get(name)}
    found: dict[str, Any] = {name: of_one(one, units).data() for name, one in timed(right, device, samples).items()}
    return found | {name: {"finding": said} for name, said in findings.items() if said}


def measure(
    out: Path, ground: Ground, samples: int, forms: Forms, patch: pytest.MonkeyPatch, batches: Sequence[int],
    broken: Sequence[str] | None,
) -> dict[str, Any]:
    """Every batch of re-runs, and the prompt; `out` has what was measured so far.

    broken: prompts that fail; None: no prompt is run
    """
    found = dict[str, Any]()

    def keep(name: str, lines: Mapping[str, Any]) -> None:
        found[name] = lines
        for line, one in lines.items():
            told = f"{one['us']:9.2f} [{one['lower']:.2f} {one['upper']:.2f}]" if "us" in one else str(one)
            print(f"{name:12} {line:40} {told}", flush=True)
        write_atomically({out: json.dumps(found).encode()})

    variants = RERUNS if WINDOWS else {"now": Variant()}
    for batch in batches[: None if ground.card else 1]:
        layers, work, check = reruns(ground, batch if ground.card else 2, forms)
        judged = {name: one for name, one in variants.items() if one.right}
        before = findings_of(judged, check)
        lines = table({name: work(one) for name, one in variants.items()}, before, layers, ground.device, samples)
        for name, said in findings_of(judged, check).items():
            if said and not before[name]:
                lines[name] = {"finding": f"after it was timed: {said}"}
        keep(f"rerun {batch}", lines)
        if ground.card:
            keep(f"copy {batch}", table(copies(ground, batch, layers), {}, layers, ground.device, samples))
    if broken is None:
        return found
    served, finding = prompt(ground, patch)
    prompts = {name: one for name, one in PROMPTS.items() if name not in broken}
    works = {name: partial(served, one) for name, one in prompts.items()}
    if ground.card:  # alone, the second kernel reads unwritten memory; an interpreter warns of that
        works |= {f"{name}: {only} alone": partial(served, one, only) for name, one in prompts.items()
                  for only in ("prepare", "carry") if name == "now" or only in name}  # fmt: skip
    found_wrong = findings_of(prompts, finding) | dict.fromkeys(broken, "ends its process")
    keep("prompt", table(works, found_wrong, 1, ground.device, samples))
    return found


def warm(number: int, ground: Ground, forms: Forms, patch: pytest.MonkeyPatch) -> None:
    """Compile one prompt into Triton's cache and run it, or, after the prompts, some re-runs."""
    if number < len(PROMPTS):
        served, _ = prompt(ground, patch)
        served([*PROMPTS.values()][number])
    else:
        for batch in (64, 8, 1):  # their shapes
            _, work, _ = reruns(ground, batch, forms, layers=1)
            for one in [*RERUNS.values()][number - len(PROMPTS) :: JOBS]:
                work(one)()
    torch.cuda.synchronize()


def compile_all(names: Sequence[str], forms: Forms) -> None:
    """Compile re-runs for a GPU, without one."""
    from support.kernels import compiled

    WINDOWS.launch = partial(compiled.compiled, stages=1)
    heads, wide = 4, partial(torch.zeros, dtype=torch.float32)
    k, ints = wide(8, heads, 128), torch.zeros(2, dtype=torch.int64)
    pool = compiled.Address(wide(3, heads, 128, 128).transpose(2, 3), ints)
    ring = compiled.Ring(compiled.Updates(*(wide(3, 8, heads, 128) for _ in range(3))), ints, ints, ints, ints)
    one = Part("window", ints, ints, 4, pool, ints.bool(), ring=ring, settled=pool)
    for name in names or RERUNS:
        print(json.dumps({"variant": name}))
        with forms.serving(RERUNS[name]):
            shape = WINDOWS.shape_for("channels", 4, 8 * 32 * 128)
            WINDOWS.staged(GdnInputs(k, k, k, k, wide(8, heads)), one, k.bfloat16(), shape)


def main(argv: Sequence[str]) -> int:
    words = argparse.ArgumentParser()
    words.add_argument("--out", type=Path, default=Path("kda-variants.json"))
    words.add_argument("--samples", type=int, default=30)
    words.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="requests of re-runs")
    words.add_argument("--reruns", action="store_true", help="leave the prompt out")
    words.add_argument("--warm", type=int, help="for the script itself")
    words.add_argument("--compile", nargs="*", metavar="VARIANT")
    asked = words.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        forms = Forms(Path(folder), patch)
        if asked.compile is not None:
            compile_all(asked.compile, forms)
            return 0
        card = torch.cuda.is_available()
        device = torch.device("cuda" if card else "cpu")
        past = 2 * torch.cuda.get_device_properties(device).L2_cache_size if card else 0  # as `instep bench`
        ground = Ground(device, torch.bfloat16, {}, Rates(1, 1, 1), past)
        torch.manual_seed(0)
        if asked.warm is not None:
            warm(asked.warm, ground, forms, patch)
            return 0
        broken = []
        if card:  # each prompt in a process of its own, as an illegal access ends all work on the card
            jobs = [subprocess.Popen([sys.executable, __file__, "--warm", str(number)], stderr=subprocess.DEVNULL)
                    for number in range(asked.reruns * len(PROMPTS), len(PROMPTS) + JOBS)]  # fmt: skip
            ended = [job.wait() for job in jobs]
            broken = [name for name, status in zip(PROMPTS, ended, strict=False) if status and not asked.reruns]
        found = measure(asked.out, ground, asked.samples, forms, patch, asked.batches, None if asked.reruns else broken)
    return int(any("finding" in one for lines in found.values() for one in lines.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
