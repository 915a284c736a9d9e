"""Find shared memory of a compiled Triton or Gluon kernel that overlaps a barrier: `over_barriers(kernel) == []`.

The compiler's allocator reuses memory after its last use. But a word that was initialised as a barrier stays a barrier:
when a GPU preempts a program for another process's time slice and resumes it, it restores the words of the program's
barriers, and overwrites data that was put there in the meantime. Racecheck and memcheck do not see this, nor does a run
without another process. So no data may share memory with a barrier. Every barrier must also be used: if no code waits
for it, or no group of warps receives it, the compiler may reuse its memory after the next change of the kernel. In PTX
`mbarrier.invalidate` ends a barrier, so a barrier that the kernel invalidates is not checked.

If a kernel initialises barriers in inline PTX, all its memory of 64-bit numbers counts as barriers. Triton 3.6 does not
report how much memory the compiler itself uses (for example, to change a layout), and 8 bytes are assumed; 3.9 reports
it. Leaves out: whether the kernel uses a barrier correctly, which racecheck and the results show.
"""

import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from instep_reference.contract.errors import BadInput, Unsupported

PTX = 86  # the pass needs a version; every version with barriers gives the same places
_TYPE = r"<((?:\d+x)+)([a-z]+\d+\w*)[,>]"
_MEMORY = re.compile(r"(%\w+) = ttg\.local_alloc .*memdesc" + _TYPE)
_AT, _SAID = re.compile(r"allocation\.offset = (\d+) "), re.compile(r"allocation\.size = (\d+) ")
_OP = re.compile(r"^\s*(?:%[\w:]+ = )?\"?(\w+\.\w+)")
_VIEW = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
_GROUPS = "ttg.warp_specialize("


class Span(NamedTuple):
    """A range of bytes in shared memory, and its owner: a name in the source, or an operation of the compiler."""

    begin: int
    end: int
    name: str
    kind: str = ""


def over_barriers(kernel: Any) -> list[str]:
    """List the memory that overlaps barriers of a compiled kernel, and the barriers that are not used.

    kernel: the return value of a launch `kernel[grid](...)` or of `triton.compile`. Nothing runs, and no GPU is needed.
    ->  lines such as "%full: %scales", with the names of the source. Raises `BadInput` for any other object, and
    `Unsupported` if this version of Triton does not give the places.
    """
    asm = getattr(kernel, "asm", None)
    target = getattr(getattr(kernel, "metadata", None), "target", None)
    if not isinstance(asm, Mapping) or "ttgir" not in asm or getattr(target, "backend", "") != "cuda":
        raise BadInput(
            "kernel", found=type(kernel).__name__, expected="a kernel that Triton compiled for a CUDA device",
            hint="an interpreted launch returns none",
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
    lack, has = "no code waits for it", {_root(name, text) for name in re.findall(r"wait_barrier (%\w+)", text)}
    if groups := [line.split(_GROUPS)[1].split(")")[0] for line in text.splitlines() if _GROUPS in line]:
        lack, has = "no group has it", set(re.findall(r"%\w+", " ".join(groups)))
    return found + [f"{one.name}: {lack}" for one in barriers if one.name in made - has]


def _placed(ttgir: str, target: Any) -> str:
    """The text of a kernel with all places in shared memory, from the compiler's own allocator."""
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
        raise Unsupported(f"Triton {triton.__version__} does not give the places of shared memory: {other}") from None
    return str(module)


def _spans(text: str) -> Iterator[Span]:
    programs = next(iter(re.findall(r'"ttg\.num-ctas" = (\d+)', text)), "1")  # of a cluster
    op = ""
    for line in text.splitlines():
        op = named[1] if (named := _OP.match(line)) else op  # the memory of a reduction is in its last line, `}) {..`
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
    """The memory that a view shows."""
    views = dict(_VIEW.findall(text))
    while name in views:
        name = views[name]
    return name


def _size(shape: str, kind: str) -> int:
    """Bytes. shape: as in `2x64x`; kind: as in `bf16` and `f8E5M2`"""
    bits = int(re.sub(r"^[a-z]+(\d+).*", r"\1", kind))
    return math.prod(map(int, shape[:-1].split("x"))) * bits // 8
