"""As a program: compile kernels for a GPU on any machine, and print the resources that each takes.

It runs in a separate process, in which kernels are not interpreted. Its arguments are names of `FORMS`; without any
it compiles all of them. A kernel is not compiled if the record next to this file has its key: then Triton would take
the same result from its cache. The key names the source of the kernel with its place in the file,
all that it calls, its arguments, the compiler, and how numbers are read from the result. After a change of kernels
`python -m support.kernels.compiled --keep` writes the record; with an old one everything is compiled, and nothing else
differs. Leaves out: what is allowed (`tests/optimized/test_compiled.py`).
"""

# ruff: noqa: E402 (what is imported asks for the device)

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

torch.cuda.is_available = lambda: True  # decides that kernels are native; nothing is launched

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compiler
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import jit

from instep.kit import barrier_overlaps
from instep.run import few_multiprocessors
from instep_optimized.kernels.attention import dispatch as attend_file
from instep_optimized.kernels.attention import expand_latents as latents_file
from instep_optimized.kernels.convs import bf16_prompts as prompt_file
from instep_optimized.kernels.convs import bf16_short_windows as words_file
from instep_optimized.kernels.convs import causal_conv as conv_file
from instep_optimized.kernels.gdn_prefill import chunk16_fp32 as precise_file
from instep_optimized.kernels.gdn_prefill import chunk64 as narrow_file
from instep_optimized.kernels.gdn_prefill import chunk64_launches_gluon as blocks_file
from instep_optimized.kernels.gdn_windows import launches_gluon as staged_file
from instep_optimized.kernels.gdn_windows import token_by_token as tokens_file
from instep_optimized.kernels.products import few_rows as slim_file
from instep_optimized.kernels.products import grouped_experts as grouped_file
from instep_optimized.kernels.products import moe as experts_file
from instep_optimized.kernels.rowwise import gdn_inputs as gates_file
from instep_optimized.kernels.rowwise import norms as norms_file
from instep_optimized.kernels.rowwise import pointwise as pointwise_file
from instep_optimized.kernels.rowwise import qk_norm_and_rotary as turns_file
from instep_optimized.kernels.rowwise.gdn_inputs import WIDE, RuleInputs, results
from instep_optimized.memory_addresses import Address, Chance, Pages, Part, Ring, SplitUpdates, Updates
from instep_optimized.ops.fused import stored
from instep_optimized.ops.op_protocols import ExpertWeights, GdnInputs
from instep_reference.contract.place_names import Place
from instep_speed.gate import gpu_operations
from support.kernels.reused_barriers import NUMBERS, exchanged, forgotten, summed
from support.kernels.tensor_core_overlap import made_beside
from support.kernels.warp_groups import HALF, MANY, STEPS, halves, handed, told

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
H, HV, K, V = 2, 4, 128, 128
RESERVED = 1024  # further bytes of shared memory of every program
TARGET = GPUTarget("cuda", 90, 32)
BACKEND: Any = compiler.make_backend(TARGET)
RECORD = Path(__file__).with_suffix(".json")

Found = dict[str, Any]
known: dict[str, Found] = {}  # by key: what the record has
seen: dict[str, Found] = {}  # the results of this process


def compiled(
    kernel: Any, grid: Any, *arguments: Any, warps: int, stages: int | None = None, registers: int | None = None,
    num_ctas: int = 1, **constants: Any,
) -> None:  # fmt: skip
    """Triton's own binder makes the signature, as for a launch."""
    options: Found = {"num_warps": warps, "num_ctas": num_ctas, "maxnreg": registers, "enable_fp_fusion": False}
    assert not (bad := compared_with_none(kernel, arguments)), f"Triton 3.6 compares no tuple that has None: {bad}"
    options |= {} if stages is None else {"num_stages": stages}
    bound, specialized, _ = binder(kernel)(*arguments, **constants)
    _, *signature = kernel._pack_args(BACKEND, options, bound, specialized, None)
    source: Any = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *signature)
    key = key_of(source, options)
    if (found := seen.get(key) or known.get(key)) is None:
        found = taken(triton.compile(source, target=TARGET, options=options))
    seen[key] = {"kernel": kernel.__name__, **found}
    print(json.dumps({"key": key, **seen[key]}))


def compared_with_none(kernel: Any, arguments: tuple[Any, ...]) -> set[str]:
    """Name the arguments that are tuples with None in them and that the kernel itself compares with None."""
    tuples = {name for name, x in zip(kernel.arg_names, arguments, strict=False)
              if isinstance(x, tuple) and any(one is None for one in x)}  # fmt: skip
    tests = (node for node in ast.walk(ast.parse(kernel.src)) if isinstance(node, ast.Compare))
    return tuples & {node.left.id for node in tests if isinstance(node.left, ast.Name)
                     and isinstance(node.ops[0], ast.Is | ast.IsNot)}  # fmt: skip


def binder(kernel: Any) -> Callable[..., Any]:
    """Return a function that binds the arguments of a launch, which may start early, and specializes them."""
    bind: Any = jit.create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    return partial(bind, EARLY=True) if "EARLY" in kernel.arg_names else bind


def varied(
    kernel: Any, grid: Any, *arguments: Any, warps: int = 4, stages: int = 1, registers: int | None = None,
    **constants: Any,
) -> None:
    """In place of `launch`: count the variants that Triton would compile if one integer were 0, 1 or 16.

    It counts for the integers that Triton is told not to specialize. No kernel is compiled.
    """
    bind = binder(kernel)
    bound = bind(*arguments, **constants)[0]
    if integers := [name for name in kernel.arg_names if name in kernel.do_not_specialize]:
        print(json.dumps({"kernel": kernel.__name__, "variants": {
            name: len({str(bind(**{**bound, name: number})[1]) for number in (0, 1, 16)}) for name in integers
        }}))  # fmt: skip


def key_of(source: Any, options: Mapping[str, Any]) -> str:
    """Under which Triton keeps what it compiles, and how it is read"""
    all_options = BACKEND.parse_options({**options, **source.parse_options()})
    told = compiler.get_cache_key(source, BACKEND, all_options, env_vars=compiler.get_cache_invalidating_env_vars())
    return sha256(f"{told} {inspect.getsource(taken)} {inspect.getsource(barrier_overlaps)}".encode()).hexdigest()[:32]


def taken(made: Any) -> Found:
    """By a compiled kernel"""
    ptx = made.asm["ptx"]
    usage, code = cuobjdump("-res-usage", made), cuobjdump("-sass", made) if "wgmma" in ptx else ""
    own = max(0, int(usage.split("SHARED:")[1].split()[0]) - RESERVED)  # what PTX itself names
    return {
        "usage": usage[usage.index("REG:") :].strip(), "shared": made.metadata.shared + own,
        "copies": ptx.count("cp.async.c"),
        "waits": code.count("WARPGROUP.DEPBAR") - ptx.count("wgmma.wait_group"),
        "beside": made_beside(code), "over_barriers": barrier_overlaps.over_barriers(made),
        "sums": sums_of(made.asm.get("ttgir", "")) if made.metadata.name == "_window" else [],
    }


def sums_of(text: str) -> list[str]:
    """The layouts of the floating-point tensors that a kernel sums: they are the order of its sums."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)", text, re.MULTILINE))
    found = re.findall(r"^ *}\) : \(tensor<\S*xf32, (.*?)>[,)]", text, re.MULTILINE)
    return sorted({layouts[name] for one in found for name in re.findall(r"#blocked\d*", one)})


def cuobjdump(what: str, made: Any) -> str:
    """The output of this tool for a compiled kernel"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        return subprocess.run([TOOLS / "cuobjdump", what, file.name], capture_output=True, text=True, check=True).stdout


def staged_alone(kernel: Any, *given: Any, **named: Any) -> None:
    """In place of `launch`."""
    if "stag" in kernel.__name__:
        compiled(kernel, *given, **named)


def handshakes() -> None:
    """The kernels of `warp_groups.py`, which are for racecheck."""
    x = torch.zeros(2 * HALF * STEPS)
    compiled(halves, None, x, x, HALF, warps=4)
    compiled(told, None, x, x, x.long(), HALF, STEPS, warps=4)
    compiled(handed, None, x, x, x, MANY, warps=4)


def over_barriers() -> None:
    """The kernels of `reused_barriers.py`, and those of them in which nothing lies over a barrier"""
    numbers = torch.zeros(1, dtype=torch.int32)
    for kept, ended in ((True, False), (False, True), (False, False)):
        compiled(forgotten, None, numbers, 1, kept, NUMBERS, ended, warps=4)
    for uses in (2, 1, 0):
        compiled(summed, None, numbers, uses, warps=4)
    compiled(exchanged, None, numbers, warps=4)


def attention(launch: Any = staged_alone) -> None:
    """Prompts of few and many rows, windows of few and many positions, decodes, trees; pages of a part of a step, whole
    steps.

    Then windows and decodes over numbers of 8 bits. Each page is followed by a red zone, as in the pools of an engine.
    In the last launch of each width the size of the zone is no multiple of 16 bytes.
    """
    attend_file.launch = launch
    attend_file.staged.hopper = lambda _: True
    attend_file.multiprocessors = lambda _: 132  # type: ignore[assignment]
    wide, narrow = torch.bfloat16, torch.float8_e4m3fn
    forms = ((16, 1, 130, 16, 0, 2, wide), (64, 4, 600, 16, 0, 2, wide), (64, 40, 4, 16, 0, 2, wide),
             (64, 40, 1, 16, 0, 2, wide), (64, 40, 4, 4, 0, 2, wide), (64, 40, 8, 16, 8, 2, wide),
             (64, 2, 8, 16, 8, 2, wide), (64, 1, 8, 16, 8, 2, wide), (64, 40, 4, 16, 0, 2, narrow),
             (16, 40, 1, 16, 0, 2, narrow),
             (64, 40, 4, 16, 0, 1, narrow), (64, 40, 4, 16, 0, 4, narrow), (16, 40, 1, 16, 0, 4, narrow),
             (64, 40, 4, 8, 0, 2, narrow))  # fmt: skip
    for size, requests, rows, zone, nodes, heads, dtype in forms:
        span, many = size * heads * 256, torch.zeros(requests, dtype=torch.int64)
        pool = torch.zeros(16 * requests, span + zone, dtype=dtype)[:, :span].unflatten(1, (size, heads, 256))
        scales = torch.zeros(16 * requests, size, heads, 1) if dtype is narrow else None
        pages = Pages(pool, pool, torch.zeros(requests, 16, dtype=torch.int64), many, many, many, many, rows,
                      torch.zeros(requests * rows, dtype=torch.int64) if nodes else None, nodes, scales, scales,
                      requests == 1)  # fmt: skip
        query = torch.zeros(requests * rows, 16, 256, dtype=torch.bfloat16)
        attend_file.attend(query=query, pages=pages, to=Place("trunk", 0, "attended"))


def prompts(launch: Any = compiled) -> None:
    """The delta rule of prompts. One group of warps carries bf16 states, two carry fp32; long prompts overlap it.

    Then all in one launch.
    """
    for dtype, chains, most in ((torch.bfloat16, None, 4), (torch.float32, 2, 4), (torch.bfloat16, None, 4096)):
        prompt(dtype, most, launch=launch, chains=chains)
    prompt(torch.bfloat16, 4096, launch=launch, fused=True)


def many_heads() -> None:
    """Prompts with three value heads to a key head"""
    prompt(torch.bfloat16, 4, 3)


def few_registers() -> None:
    """Prompts in one launch, in which those who carry have fewer registers than their products need"""
    kept, blocks_file.FUSED = blocks_file.FUSED, blocks_file.FUSED | {"CARRY_REGISTERS": 152}
    prompt(torch.bfloat16, 4096, fused=True)
    blocks_file.FUSED = kept


def prompt_channels() -> None:
    """Prompts with a decay per key channel"""
    narrow_file.launch = lambda *given, **named: None  # what prepares the blocks: `channel_prompt`
    prompt(torch.bfloat16, 4, 1, channels=(K,))


def prompt(
    dtype: torch.dtype, most: int, group: int = 2, launch: Any = compiled, channels: tuple[int, ...] = (), **how: Any
) -> None:
    """Two requests. most: rows of the longer one; group: value heads per key head; channels: further axis of decays"""
    blocks_file.launch = launch
    blocks_file.multiprocessors = lambda _: 132  # type: ignore[assignment]
    pool = Address(torch.zeros(3, group * H, V, K).transpose(2, 3), torch.zeros(2, dtype=torch.int64))
    spans, fresh = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)
    q, v = torch.zeros(8, H, K, dtype=dtype), torch.zeros(8, group * H, V, dtype=dtype)
    gate = torch.zeros(8, group * H)
    part = Part("chunk", spans, spans, most, pool, fresh, pool)
    inputs = GdnInputs(q, q, v, torch.zeros(8, group * H, *channels), gate)
    blocks_file.blocks_staged(inputs, part, v.bfloat16(), 8, **how)


def products() -> None:
    """Every shape of products of few rows, with columns and K that are no whole tiles; and with fp32 results, where it
    has such."""
    slim_file.staged.launch = compiled
    for (rows, gated), known in slim_file.STAGED.items():
        for _, shape in known:
            x, weight = (torch.zeros(n, 520, dtype=torch.bfloat16) for n in (rows, 1000 * (1 + gated)))
            whole = shape | {"MT": rows, "cut": 2 * shape["pair"]}
            for to in (x.dtype, *[torch.float32] * (not gated and not shape["pair"])):
                slim_file.staged.product(x, weight, gated, x.new_empty(rows, 1000, dtype=to), whole)


def windows(launch: Any = staged_alone) -> None:
    """Every shape of a launch over windows and decodes with their norms and gates; the first of each without, too.

    A `verify` is a window with its conv.
    """

    def ints() -> torch.Tensor:
        return torch.zeros(2, dtype=torch.int64)

    staged_file.launch = launch
    kept = Updates(torch.zeros(3, 8, H, K), torch.zeros(3, 8, HV), torch.zeros(3, 8, HV, V))
    ring = Ring(kept, ints(), ints(), ints(), ints())
    q, v, gate = torch.zeros(8, H, K), torch.zeros(8, HV, V), torch.zeros(8, HV)
    made = GdnInputs(q, q, v, gate, gate)
    raw, rule = GdnInputs(*(x.bfloat16() for x in made)), staged_file.Rule(torch.zeros(HV), torch.zeros(HV), K**-0.5)
    channels = 2 * H * K + HV * V
    x, weight = torch.zeros(8, channels, dtype=torch.bfloat16), torch.zeros(channels, 4, dtype=torch.bfloat16)
    past, kept_windows = (Address(torch.zeros(*units, channels, 3, dtype=torch.bfloat16), ints())
                          for units in ((3,), (3, 8)))  # fmt: skip
    words = staged_file.words_of(x, raw.log_decay, raw.beta, H, K)
    for form, sizes in staged_file.SHAPES.items():
        for size, known in sizes.items() if form != "channels" else ():
            dtype = {4: torch.float32, 2: torch.bfloat16}[size]
            pool = Address(torch.zeros(3, HV, V, K, dtype=dtype).transpose(2, 3), ints())
            fields: dict[str, Any] = {"store": pool} if form == "decode" else {"ring": ring, "settled": pool}
            rows = 4 if form in ("window", "verify") else 1
            part = Part("window", ints(), ints(), rows, pool, torch.zeros(2, dtype=torch.bool),
                        **fields)  # fmt: skip
            core = v.bfloat16()
            assert staged_file.fits(made, part, core) and staged_file.form(part) == {"verify": "window"}.get(form, form)
            if form == "verify":
                takes_a_conv(x, weight, replace(part, read=past, per_row=kept_windows, ring=None, settled=None), part)
            for number, (_, shape) in enumerate(known):
                conv = (weight, past, kept_windows) if form == "verify" else None
                staged_file.staged(words if conv else raw, part, core, shape, rule=rule, conv=conv)
                if conv is None and size == 4 and number == 0:
                    staged_file.staged(made, part, core, shape)


def channels() -> None:
    """A decay per key channel: every shape of windows and decodes, windows without explicit layouts, and prompts."""

    def ints() -> torch.Tensor:
        return torch.zeros(2, dtype=torch.int64)

    for file in (staged_file, tokens_file, narrow_file, precise_file):
        file.launch = partial(compiled, stages=1)  # type: ignore[attr-defined]
    kept = Updates(torch.zeros(3, 8, HV, K), torch.zeros(3, 8, HV, K), torch.zeros(3, 8, HV, V))
    k, v = torch.zeros(8, HV, K), torch.zeros(8, HV, V)
    inputs, ring = GdnInputs(k, k, v, k, torch.zeros(8, HV)), Ring(kept, ints(), ints(), ints(), ints())
    for size, dtype in ((4, torch.float32), (2, torch.bfloat16)):
        pool = Address(torch.zeros(3, HV, V, K, dtype=dtype).transpose(2, 3), ints())
        for form in ("window", "kept", "decode"):
            fields: dict[str, Any] = {"store": pool} if form == "decode" else {"ring": ring, "settled": pool}
            part = Part("window", ints(), ints(), 4 if form == "window" else 1, pool, ints().bool(), **fields)
            assert staged_file.fits(inputs, part, v.bfloat16())
            for _, shape in staged_file.shapes("channels" if form == "window" else form, size):
                staged_file.staged(inputs, part, v.bfloat16(), shape)
        tokens_file.window(inputs, part, v.bfloat16())
        part = Part("chunk", ints(), ints(), 4, pool, ints().bool(), pool)
        for run in (narrow_file.blocks, precise_file.chunk):
            run(inputs, part, v.bfloat16(), 8)


def latents() -> None:
    """Attention over latents at the sizes of Kimi-Linear: a prompt, and a window over latents of 8 bits."""
    for file in (attend_file, latents_file):
        file.launch = partial(compiled, warps=4, stages=1)  # type: ignore[assignment]
    attend_file.multiprocessors = lambda _: 132  # type: ignore[assignment]
    ints, up = torch.zeros(2, dtype=torch.int64), torch.zeros(32 * 256, 512, dtype=torch.bfloat16)
    for rows, dtype in ((130, torch.bfloat16), (4, torch.float8_e4m3fn)):
        keys, values = (torch.zeros(32, 64, 1, width, dtype=dtype) for width in (64, 512))
        scales = torch.zeros(32, 64, 1, 1) if dtype.itemsize == 1 else None
        pages = Pages(keys, values, torch.zeros(2, 16, dtype=torch.int64), ints, ints, ints, ints, rows,
                      key_scales=scales, value_scales=scales)  # fmt: skip
        query = torch.zeros(2 * rows, 32, 192, dtype=torch.bfloat16)
        latents_file.attend_latents(query=query, pages=pages, up=up, to=Place("trunk", 0, "attended"))


def turned_latents() -> None:
    """Rows of Ling: latents and queries that turn, a gate per head, and a safe gate next to one without a bound."""

    def launch(kernel: Any, *given: Any, **named: Any) -> None:
        if kernel.__name__ != "_gdn_inputs":  # that of GDN
            compiled(kernel, *given, **{"warps": 4, "stages": 1, **named})

    for file in (turns_file, pointwise_file, gates_file):
        file.launch = launch  # type: ignore[attr-defined]
    for dtype in (torch.bfloat16, torch.float32):
        rows = torch.zeros(8, 32 * 193 + 512 + 64, dtype=dtype)
        projected = rows[:, : 32 * 193].view(8, 32, 193)
        turns_file.latent_inputs(
            projected=projected, key_raw=rows[:, None, 32 * 193 :], positions=torch.zeros(8, dtype=torch.int64),
            norm=torch.zeros(512, dtype=dtype), eps=1e-6, rotary_dim=64, theta=6e6,
            to=(Place("trunk", 0, "query"), Place("trunk", 0, "key"), Place("trunk", 0, "value")))
        pointwise_file.output_gate(attended=torch.zeros(8, 32, 128, dtype=dtype), projected=projected,
                                   to=Place("trunk", 0, "opened"))  # fmt: skip
        for bound in (None, -5.0):
            gates_file.gdn_inputs(
                mixed=torch.zeros(8, 3 * HV * K, dtype=dtype), a=torch.zeros(8, HV, K, dtype=dtype),
                b=torch.zeros(8, HV, dtype=dtype), A_log=torch.zeros(HV), dt_bias=torch.zeros(HV, K), key_heads=HV,
                key_dim=K, to=(Place("trunk", 0, "q"),) * 5, decay_bound=bound)


def routers() -> None:
    """The choice by sigmoid in groups, a shared expert without a gate, clamps; at the sizes of Kimi-Linear."""

    def launch(kernel: Any, *given: Any, **named: Any) -> None:
        if kernel.__name__ not in ("_moe_score", "_moe_sort", "_moe_down", "_moe_mix"):  # those are as with a softmax
            compiled(kernel, *given, **{"warps": 4, "stages": 1, **named})

    for file in (grouped_file, experts_file, pointwise_file):
        file.launch = launch  # type: ignore[attr-defined]
    wide, inner, count = 2304, 1024, 256

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    weights = ExpertWeights(
        empty(count, wide), empty(count, 2 * inner, wide), empty(count, wide, inner), empty(2 * inner, wide),
        empty(wide, inner), None, torch.zeros(count), groups=8, groups_per_token=4, limit=7.0,
        shared_limit=5.0)  # fmt: skip

    def clamped_mlp(x: torch.Tensor, limit: float, **_: Any) -> torch.Tensor:
        pointwise_file.silu_mul(empty(4, 2 * inner), limit)
        return x

    dense: Any = SimpleNamespace(clamped_mlp=clamped_mlp)
    grouped_file.grouped(empty(4, wide), weights, 8, True)
    experts_file.mix(empty(4, wide), weights, 8, True, dense, Place("trunk", 0, "mlp"))


def split_rings() -> None:
    """Windows over a ring of updates, and over one whose keys and updates have two parts of 16 bits."""
    tokens_file.launch = compiled  # type: ignore[assignment]

    def ints() -> torch.Tensor:
        return torch.zeros(2, dtype=torch.int64)

    wide = Updates(torch.zeros(3, 8, H, K), torch.zeros(3, 8, HV), torch.zeros(3, 8, HV, V))
    k, update = wide.k.bfloat16(), wide.update.bfloat16()
    q, v, gate = torch.zeros(8, H, K), torch.zeros(8, HV, V), torch.zeros(8, HV)
    pool = Address(torch.zeros(3, HV, V, K).transpose(2, 3), ints())
    for kept in (wide, SplitUpdates(k, wide.decay, update, k.clone(), update.clone())):
        part = Part("window", ints(), ints(), 4, pool, torch.zeros(2, dtype=torch.bool), settled=pool,
                    ring=Ring(kept, ints(), ints(), ints(), ints()))  # fmt: skip
        tokens_file.window(GdnInputs(q, q, v, gate, gate), part, v.bfloat16())


def outer_products() -> None:
    """Layers of Nemotron 3 Super: conv with a bias, steps, windows, prompts, skips, norms; experts over latents."""
    for file in (conv_file, gates_file, tokens_file, norms_file, pointwise_file, grouped_file, experts_file):
        file.launch = lambda kernel, *given, **named: compiled(kernel, *given, **{"warps": 4, "stages": 1, **named})
    groups, heads, state, width, dtype = 8, 128, 128, 64, torch.bfloat16

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def ints() -> torch.Tensor:
        return torch.zeros(2, dtype=torch.int64)

    channels, at = heads * width + 2 * groups * state, Place("trunk", 0, "core")
    past, fresh = Address(empty(3, channels, 3), ints()), torch.zeros(2, dtype=torch.bool)
    mixed = conv_file.biased_conv(x=empty(8, channels), weight=empty(channels, 4), bias=empty(channels), parts=(
        Part("window", ints(), ints(), 4, past, fresh, past),), to=at)  # fmt: skip
    inputs = gates_file.selective_inputs(
        mixed=mixed, a=empty(8, heads), A_log=torch.zeros(heads), dt_bias=torch.zeros(heads), key_heads=groups,
        key_dim=state, to=(at,) * 5)  # fmt: skip
    kept = Updates(torch.zeros(3, 8, groups, state), torch.zeros(3, 8, heads), torch.zeros(3, 8, heads, width))
    pool, core = Address(torch.zeros(3, heads, width, state).transpose(2, 3), ints()), empty(8, heads, width)
    ring = Ring(kept, ints(), ints(), ints(), ints())
    for part in (Part("window", ints(), ints(), 4, pool, fresh, settled=pool, ring=ring),
                 Part("chunk", ints(), ints(), 4096, pool, fresh, pool)):  # fmt: skip
        tokens_file.window(inputs, part, core, delta=False)
    pointwise_file.add_skip(core=core, v=inputs.v, weight=torch.zeros(heads), to=at)
    norms_file.gated_group_norm(core=core, z=core, weight=torch.zeros(heads * width), eps=1e-5, groups=groups, to=at)
    pointwise_file.square(empty(8, 2688))
    rows, latents, count, inner = empty(4, 4096), empty(4, 1024), 512, 2688
    weights = ExpertWeights(empty(count, 4096), empty(count, inner, 1024), empty(count, 1024, inner), None, None, None,
                            torch.zeros(count), scale=5.0, gated=False)  # fmt: skip
    grouped_file.grouped(rows, weights, 22, True, latents)
    experts_file.mix(rows, weights, 22, True, SimpleNamespace(), at, latents)


def takes_a_conv(x: torch.Tensor, weight: torch.Tensor, window: Part, part: Part) -> None:
    """Call `fits_conv` for a verify, and for others that differ from it in one property"""
    kept, wider = window.per_row, torch.zeros(8, x.shape[1] + 4, dtype=torch.bfloat16)
    assert kept is not None
    alike = replace(window, **{name: getattr(part, name) for name in ("begin", "count", "fresh")},
                    read=replace(window.read, units=part.read.units))  # fmt: skip
    fits, rows = staged_file.fits_conv, staged_file.VERIFIES
    assert fits(x, weight, alike, part, rows.start) and fits(wider[:, 4:], weight, alike, part, rows.stop - 1)
    assert not fits(x, weight, alike, part, rows.start - 1) and not fits(x, weight, alike, part, rows.stop)
    for other in (wider[:, 1:-3], wider[:, 2:-2], x.half(), torch.zeros(8, x.shape[1] + 2, dtype=x.dtype)[:, :-2]):
        assert not fits(other, weight, alike, part, rows.start)
    assert not fits(x, weight.float(), alike, part, rows.start)
    for changed in (
        {"begin": part.begin.clone()}, {"read": replace(alike.read, units=part.read.units.clone())}, {"most": 3},
        {"store": window.read}, {"per_row": None}, {"parents": torch.zeros(2, 4, dtype=torch.int64)},
        {"per_row": replace(kept, pool=kept.pool[:, 0])}, {"per_row": replace(kept, pool=window.read.pool[:, None])},
    ):
        assert not fits(x, weight, replace(alike, **changed), part, rows.start), changed
    assert not fits(x, weight, alike, replace(part, ring=None), rows.start)


def convs() -> None:
    """The conv of prompts, with its rows, and with what the delta rule consumes of them, in 16 bits and in 32"""
    prompt_file.launch = compiled  # type: ignore[assignment]
    channels, ints = 2 * H * K + HV * V, torch.zeros(2, dtype=torch.int64)
    x, weight = torch.zeros(8, channels, dtype=torch.bfloat16), torch.zeros(channels, 4, dtype=torch.bfloat16)
    past = Address(torch.zeros(3, channels, 3, dtype=torch.bfloat16), ints)
    gate, a_log = torch.zeros(8, HV, dtype=torch.bfloat16), torch.zeros(HV)
    for most in sorted({least for known in prompt_file.SHAPES.values() for least, _ in known}):
        part = Part("chunk", ints, ints, max(most // (2 * channels), 64), past, torch.zeros(2, dtype=torch.bool), past)
        assert prompt_file.fits(x, weight, part, x)
        prompt_file.walk_prompt(x, weight, part, x, 8)
        for dtypes in (stored(x.dtype), WIDE):
            found = results(x, H, K, HV, dtypes)
            prompt_file.walk_prompt(x, weight, part, None, 8, RuleInputs.of(found, gate, gate, a_log, a_log), K)


def integers() -> None:
    """The kernels whose integers change between launches, bound but not compiled."""
    attention(varied)
    windows(varied)
    prompts(varied)
    for file in (conv_file, prompt_file, words_file, precise_file, narrow_file, tokens_file):
        file.launch = varied  # type: ignore[attr-defined]
    channels, ints = 2 * H * K + HV * V, torch.zeros(2, dtype=torch.int64)
    for dtype, rows, tree in ((torch.bfloat16, 4, False), (torch.bfloat16, 64, False), (torch.float32, 4, False),
                              (torch.float32, 4, True)):  # fmt: skip
        past = Address(torch.zeros(3, channels, 3, dtype=dtype), ints)
        part = Part("window", ints, ints, rows, past, ints.bool(), None if tree else past,
                    parents=torch.zeros(2 * rows, dtype=torch.int64) if tree else None)  # fmt: skip
        x, weight = torch.zeros(2 * rows, channels, dtype=dtype), torch.zeros(channels, 4, dtype=dtype)
        conv_file.conv(x=x, weight=weight, parts=(part,), to=Place("trunk", 0, "mixed"))
    q, v, gate = torch.zeros(8, H, K), torch.zeros(8, HV, V), torch.zeros(8, HV)
    for chance in (None, Chance(7, 3)):
        pool = Address(torch.zeros(3, HV, K, V, dtype=torch.bfloat16), ints, chance=chance)
        part = Part("chunk", ints, ints, 4, pool, ints.bool(), pool, before=ints)
        for run in (tokens_file.window, precise_file.chunk, narrow_file.blocks):
            run(GdnInputs(q, q, v, gate, gate), part, v.bfloat16(), 8)


def clocks() -> None:
    """The kernels with which the gate holds a device back and drags it."""
    go, since = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    compiled(gpu_operations._hold, None, go, since, int(gpu_operations.HELD_S * 1e9), warps=1)
    compiled(gpu_operations._drag, None, since, 0.08, 2000, warps=1)


def spins() -> None:
    """The kernel of `--stress squeeze`."""
    go = torch.zeros(1, dtype=torch.int32)
    compiled(few_multiprocessors._spin, None, go, go, 4, 500_000_000, 100_000, warps=few_multiprocessors.WARPS)


FORMS = {"attend": attention, "channels": channels, "clocks": clocks, "convs": convs, "few_registers": few_registers,
         "forgotten": over_barriers, "handshake": handshakes, "integers": integers, "latents": latents,
         "many_heads": many_heads, "outer_products": outer_products, "products": products,
         "prompt_channels": prompt_channels, "prompts": prompts,
         "routers": routers, "spins": spins, "split_rings": split_rings, "turned_latents": turned_latents,
         "windows": windows}  # fmt: skip

if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("forms", nargs="*")
    words.add_argument("--record", type=Path, default=RECORD)
    words.add_argument("--keep", action="store_true", help="write the record")
    asked = words.parse_args()
    if asked.keep and asked.forms:
        words.error("--keep: the record has all forms")
    known.update(json.loads(asked.record.read_text()) if asked.record.is_file() else {})
    for form in asked.forms or FORMS:
        print(json.dumps({"form": form}))
        FORMS[form]()
    if asked.keep:
        lines = (f"{json.dumps(key)}: {json.dumps(seen[key])}" for key in seen)
        asked.record.write_text("{\n" + ",\n".join(lines) + "\n}\n")
