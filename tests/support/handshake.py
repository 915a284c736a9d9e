"""As a program: a kernel with one further group of warps and no shared memory of its own, for racecheck.

The compiler hands arguments to a group of warps through shared memory and named barriers. What racecheck names here
would be that, and no mistake of a kernel. On one H100 (Triton 3.6.0) it named nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _half(x, out, size, SIDE: gl.constexpr):
    at = SIDE * size + gl.arange(0, 128, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.store(out + at, gl.load(x + at) + 1.0)


@gluon.jit
def halves(x, out, size):
    gl.warp_specialize([(_half, (x, out, size, 0)), (_half, (x, out, size, 1))], [4], [120])


def main() -> None:
    x = torch.arange(256, dtype=torch.float32, device="cuda")
    out = torch.zeros_like(x)
    halves[(1,)](x, out, 128, num_warps=4)
    assert torch.equal(out, x + 1)
    print("both halves are right")


if __name__ == "__main__":
    main()
