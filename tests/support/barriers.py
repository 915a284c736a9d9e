"""Barriers in shared memory whose words a compiled kernel may use for something else while they still count.

The compiler's allocator reuses memory behind its last use. But a word that was made a barrier stays one: where a device
takes a program off a multiprocessor, for another process's slice of time, and puts it back, it writes the words of its
barriers again, over whatever stands there by then. So in a kernel of several groups of warps each barrier is given to a
group, which keeps its memory to the end. Leaves out: barriers that only PTX names, unless their memory has 64-bit
numbers, as all here have; what the compiler needs for itself before groups begin, which is before barriers do.
"""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from typing import Any

from triton._C.libtriton import ir, nvidia, passes

_BYTES = {"i64": 8, "i32": 4, "f32": 4, "bf16": 2, "f16": 2, "i16": 2, "i8": 1, "i1": 1, "f8E4M3FN": 1}
_TYPE = r"<((?:\d+x)+)(\w+)[,>]"
_MEMORY = re.compile(r"(%\w+) = ttg\.local_alloc .*allocation\.offset = (\d+) .*memdesc" + _TYPE)
_SCRATCH = re.compile(r"= \"?(\w+\.\w+)\W.*allocation\.offset = (\d+) ")
_SAID = re.compile(r"allocation\.size = (\d+) ")  # by a Triton that is newer than 3.6
_GROUPS = "ttg.warp_specialize("


def placed(ttgir: str, backend: Any) -> str:
    """The text of a kernel with the place of everything in shared memory, by the compiler's own allocator"""
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        Path(file.name).write_text(ttgir)
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 86)
    manager.run(module, "placed")
    return str(module)


def reused(ttgir: str, backend: Any) -> list[str]:
    """Barriers of a kernel whose memory something else may have, and what"""
    if "init_barrier" not in ttgir:
        return []
    lines = placed(ttgir, backend).splitlines()
    programs = next(iter(re.findall(r'"ttg\.num-ctas" = (\d+)', ttgir)), "1")  # of a cluster
    groups = [line.split(_GROUPS)[1].split(")")[0] for line in lines if _GROUPS in line]
    barriers, others = [], []
    for line in lines:
        if memory := _MEMORY.search(line):
            name, at, shape, kind = memory[1], int(memory[2]), memory[3], memory[4]
            each = int(programs) if shape.endswith(f"x{programs}x") else 1  # of the barriers of a cluster
            (barriers if kind == "i64" else others).append((at, at + _size(shape, kind) // each, name))
        elif not groups and (scratch := _SCRATCH.search(line)):
            said = _SAID.search(line)
            tensors = [_size(*one) for one in re.findall("tensor" + _TYPE, line)]
            most = int(said[1]) if said else max([8, *tensors])  # of a number alone 8
            others.append((int(scratch[2]), int(scratch[2]) + most, scratch[1]))
    pairs = [(one, other) for at, one in enumerate(barriers) for other in [*barriers[at + 1 :], *others]]
    shared = [f"{one[2]}: {other[2]}" for one, other in pairs if one[0] < other[1] and other[0] < one[1]]
    given = re.findall(r"%\w+", " ".join(groups))
    return shared + [f"{name}: no group has it" for *_, name in barriers if groups and name not in given]


def _size(shape: str, kind: str) -> int:
    """shape: as in `2x64x`"""
    return math.prod(map(int, shape[:-1].split("x"))) * _BYTES[kind]
