"""What a compiled Triton or Gluon kernel has in shared memory over a barrier: `over_barriers(kernel) == []`.

The compiler's allocator reuses memory behind its last use. But a word that was made a barrier stays one: where a device
takes a program off a multiprocessor, for another process's slice of time, and puts it back, it writes the words of its
barriers again, over whatever stands there by then. Racecheck and memcheck do not see it, nor does a run alone. So
nothing may have the memory of a barrier, and each is used: one that nobody waits for, or that no group of warps has, is
free for what the next change of the kernel brings. `mbarrier.invalidate` ends a barrier, as PTX has it: one that a
kernel invalidates anywhere is left alone.

Where a kernel makes barriers in PTX of its own, all its memory of 64-bit numbers is taken for barriers. Where a Triton
does not say how much memory the compiler takes for itself, as to change a layout, 8 bytes are counted: 3.6 does not,
3.9 does. Leaves out: whether a barrier is used rightly, which racecheck and the bits say.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from instep_reference.contract.errors import BadInput, Unsupported

PTX = 86  # the pass asks for a version; what it places hangs on none that has barriers
_TYPE = r"<((?:\d+x)+)([a-z]+\d+\w*)[,>]"
_MEMORY = re.compile(r"(%\w+) = ttg\.local_alloc .*memdesc" + _TYPE)
_AT, _SAID = re.compile(r"allocation\.offset = (\d+) "), re.compile(r"allocation\.size = (\d+) ")
_OP = re.compile(r"^\s*(?:%[\w:]+ = )?\"?(\w+\.\w+)")
_VIEW = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
_GROUPS = "ttg.warp_specialize("


class Span(NamedTuple):
    """Bytes of shared memory, and what has them: of a source's name, or an operation of the compiler."""

    begin: int
    end: int
    name: str
    kind: str = ""


def over_barriers(kernel: Any) -> list[str]:
    """What lies over barriers of a compiled kernel, and which of them nobody uses: nothing, and none, if it is empty.

    kernel: what a launch `kernel[grid](...)` gives, or `triton.compile`. Nothing runs, and no GPU is needed.  ->  lines
    such as "%full: %scales", by the names of the source. A `BadInput` says what is no such kernel, `Unsupported` that
    this Triton cannot be asked.
    """
    asm = getattr(kernel, "asm", None)
    target = getattr(getattr(kernel, "metadata", None), "target", None)
    if not isinstance(asm, Mapping) or "ttgir" not in asm or getattr(target, "backend", "") != "cuda":
        raise BadInput(
            "kernel", found=type(kernel).__name__, expected="a kernel that Triton compiled for a CUDA device",
            hint="an interpreted launch gives none",
        )  # fmt: skip
    ttgir, in_ptx = asm["ttgir"], "mbarrier.init" in asm["ttgir"]
    if "init_barrier" not in ttgir and not in_ptx:
        return []
    text = _placed(ttgir, target)
    made = {_root(name, text) for name in re.findall(r"init_barrier (%\w+)", text)}
    ended = {_root(name, text) for name in re.findall(r"inval_barrier (%\w+)", text)}
    barriers, others = list[Span](), list[Span]()
    for one in _spans(text):
        if one.name not in ended:
            (barriers if one.name in made or (in_ptx and one.kind == "i64") else others).append(one)
    pairs = [(one, other) for at, one in enumerate(barriers) for other in [*barriers[at + 1 :], *others]]
    found = [f"{one.name}: {other.name}" for one, other in pairs if one.begin < other.end and other.begin < one.end]
    lack, has = "nobody waits for it", {_root(name, text) for name in re.findall(r"wait_barrier (%\w+)", text)}
    if groups := [line.split(_GROUPS)[1].split(")")[0] for line in text.splitlines() if _GROUPS in line]:
        lack, has = "no group has it", set(re.findall(r"%\w+", " ".join(groups)))
    return found + [f"{one.name}: {lack}" for one in barriers if one.name in made - has]


def _placed(ttgir: str, target: Any) -> str:
    """The text of a kernel with the place of everything in shared memory, by the compiler's own allocator"""
    import triton
    from triton.compiler.compiler import make_backend

    try:
        from triton._C.libtriton import ir, nvidia, passes

        context = ir.context()
        ir.load_dialects(context)
        make_backend(target).load_dialects(context)
        with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
            Path(file.name).write_text(ttgir)
            module = ir.parse_mlir_module(file.name, context)
        manager = ir.pass_manager(context)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, target.arch, PTX)
        manager.run(module, "placed")
    except (ImportError, AttributeError, TypeError, RuntimeError) as other:
        raise Unsupported(f"Triton {triton.__version__} cannot be asked where it puts what: {other}") from None
    return str(module)


def _spans(text: str) -> Iterator[Span]:
    programs = next(iter(re.findall(r'"ttg\.num-ctas" = (\d+)', text)), "1")  # of a cluster
    op = ""
    for line in text.splitlines():
        op = named[1] if (named := _OP.match(line)) else op  # what a reduction takes stands in its last line, `}) {..`
        if not (at := _AT.search(line)) or "tt.func" in line:
            continue
        begin, said = int(at[1]), _SAID.search(line)
        if memory := _MEMORY.search(line):
            name, shape, kind = memory.groups()
            each = int(programs) if shape.endswith(f"x{programs}x") else 1  # of the barriers of a cluster
            yield Span(begin, begin + _size(shape, kind) // each, name, kind)
        else:
            yield Span(begin, begin + (int(said[1]) if said else 8), op)


def _root(name: str, text: str) -> str:
    """The memory that a view is of"""
    views = dict(_VIEW.findall(text))
    while name in views:
        name = views[name]
    return name


def _size(shape: str, kind: str) -> int:
    """Bytes. shape: as in `2x64x`; kind: as in `bf16` and `f8E5M2`"""
    bits = int(re.sub(r"^[a-z]+(\d+).*", r"\1", kind))
    return math.prod(map(int, shape[:-1].split("x"))) * bits // 8
