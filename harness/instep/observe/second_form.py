"""The second form of the delta rule over a prefill chunk, which widens an allowance only while it is the same rule.

An engine may compute a prompt in chunks or token by token. Both are correct, so T2 takes the error of either form for a
yardstick. A second form that is another rule would loosen T2, and nobody would be told. So it must stand near to the
first one on the numbers at hand, in fp64 and in the width alike:

    A sum over T tokens of K products is off by at most T K half units of its largest element, if every rounding adds
    up; ten times that is granted for what is made on the way (decays, the triangular system).

In fp64 that is 1e-10 for a long chunk, so another rule shows. In fp32 it is wide, as every bound is that takes all
roundings to add up; what overflows there, or is multiplied in 16 bits, stands beyond it.
Leaves out: a form that is declared, whose products are narrower on purpose (`products.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instep_reference import gdn
from instep_reference.chunked import recur_in_chunks

CHUNKS = (16, 64)  # tokens to a chunk
GRANTED = 10.0  # times what T K roundings add up to


class AnotherRule(Exception):
    """The reference's two forms of the delta rule part: nothing that is judged by them would be worth anything."""


def in_chunks(inputs: Sequence[torch.Tensor], base: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """core [1, T, HV, V] and the state [1, HV, K, V] after it, for every chunk size.

    Shapes:  inputs q, k, v, log_decay, erase, write of one request, as `gdn.recur` takes them; base [HV, K, V]
    """
    return [_chunked(inputs, base, chunk) for chunk in CHUNKS]


def must_be_one_rule(
    inputs: Sequence[torch.Tensor], base: torch.Tensor, forms: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Hold both widths of the form to the rule token by token; inputs: the reference's own, of unit keys and gates of
    at most 1, with which rounding does not grow. Numbers that nearly overflow prove nothing."""
    wide, width = [x.double() for x in inputs], torch.finfo(inputs[0].dtype)
    q, k, v, log_decay, erase, write = wide
    token = gdn.recur(q, k, v, log_decay=log_decay, erase=erase, write=write, state=base.to(q)[None])
    right, terms = (token.out, token.state), q.shape[1] * q.shape[3]
    if all(bool((x.abs() < width.max / terms).all()) for x in right):
        for chunk, form in zip(CHUNKS, forms, strict=True):
            _must_agree(chunk, form, right, width, terms)
            _must_agree(chunk, _chunked(wide, base, chunk), right, torch.finfo(q.dtype), terms)


def _chunked(inputs: Sequence[torch.Tensor], base: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, log_decay, erase, write = inputs
    return recur_in_chunks(q, k, v, log_decay, erase, write, base.to(k)[None], chunk)


def _must_agree(
    chunk: int, form: Sequence[torch.Tensor], right: Sequence[torch.Tensor], width: torch.finfo, terms: int
) -> None:
    """core and state in chunks, and token by token in fp64."""
    most = GRANTED * terms * width.eps / 2
    for name, x, o in zip(("core", "state"), form, right, strict=True):
        apart = float((x.to(o) - o).abs().max() / o.abs().max().clamp_min(width.tiny))
        if not apart <= most:
            raise AnotherRule(
                f"the reference's two forms of the delta rule differ: in chunks of {chunk} the {name} is off by "
                f"{apart:.1e} in {width.dtype}, but rounding explains at most {most:.1e}"
            )
