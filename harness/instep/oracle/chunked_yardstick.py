"""The chunked form of the delta rule over a prefill chunk, a second yardstick that must be the same rule.

An engine may compute a prompt in chunks or token by token. Both are correct, so T2 uses the error of either form as a
yardstick. A chunked form with another rule would loosen T2 unnoticed. So the two forms must be close on the numbers at
hand, in fp64 and in the declared width:

    A sum over T tokens of K products errs by at most T K half units of its largest element if all roundings add up.
    The limit is ten times that, to cover intermediate results (decays, the triangular system).

In fp64 that is 1e-10 for a long chunk, so another rule shows. In fp32 the limit is wide, like every bound that adds up
all roundings; an overflow or a 16-bit product still exceeds it.
Leaves out: a declared form, whose products are narrower on purpose (`declared_product_rounding.py`).
"""

from collections.abc import Sequence

import torch

from instep_reference import gdn
from instep_reference.chunked_delta_rule import recur_in_chunks

CHUNKS = (16, 64)  # tokens per chunk
GRANTED = 10.0  # limit in units of T K roundings


class AnotherRule(Exception):
    """The reference's two forms of the delta rule differ, so they are useless as yardsticks."""


def in_chunks(inputs: Sequence[torch.Tensor], base: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """core [1, T, HV, V] and the final state [1, HV, K, V] for every chunk size.

    Shapes:  inputs q, k, v, log_decay, erase, write of one request, as for `gdn.recur`; base [HV, K, V]
    """
    return [_chunked(inputs, base, chunk) for chunk in CHUNKS]


def must_be_one_rule(
    inputs: Sequence[torch.Tensor], base: torch.Tensor, forms: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Compare the form in both widths with the rule token by token.

    inputs: the reference's own, with unit keys and gates of at most 1, so that rounding does not grow. Numbers that
    nearly overflow prove nothing.
    """
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
    """Compare core and state in chunks with those token by token in fp64."""
    most = GRANTED * terms * width.eps / 2
    for name, x, o in zip(("core", "state"), form, right, strict=True):
        apart = float((x.to(o) - o).abs().max() / o.abs().max().clamp_min(width.tiny))
        if not apart <= most:
            raise AnotherRule(
                f"the reference's two forms of the delta rule differ: in chunks of {chunk} the {name} is off by "
                f"{apart:.1e} in {width.dtype}, but rounding explains at most {most:.1e}"
            )
