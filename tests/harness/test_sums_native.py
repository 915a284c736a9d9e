"""`SUMS["hopper"]` describes the sums of a Hopper card's matrix instructions, bit by bit.

Leaves out: other cards, and the yardstick that uses the sums (`test_declared_products.py`).
"""

import pytest
import torch

from instep.oracle.declared_product_rounding import added
from instep_optimized import load
from instep_reference.contract.declared_rounding import SUMS
from instep_reference.contract.place_names import Place

CARD = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CARD, reason="no Hopper card here")]
HOPPER, TO, WIDTH = SUMS["hopper"], Place("trunk", 0, "logits"), 4096
assert HOPPER is not None
# The sum of one row: place of a term -> the number; the result.
ROWS: list[tuple[dict[int, float], float]] = [
    ({0: 1.0, 1: -1.0, 2: 2.0**-25}, 2.0**-25),  # 25 bits after the largest one are kept,
    ({0: 1.0, 1: -1.0, 2: 2.0**-26}, 0.0),  # the next is not, in whatever order
    ({0: 2.0**-26, 1: 1.0, 2: -1.0}, 0.0),
    ({0: 1.0, 15: 2.0**-26, 16: -1.0}, 0.0),
    ({0: 1.0, 15: -1.0, 16: 2.0**-26}, 2.0**-26),  # 16 terms are one instruction
    ({20: 1.0, 40: -1.0, 0: 2.0**-40}, 0.0),  # a sum so far is cut off as a term is
    ({0: 1.0, 1: 1.5 * 2.0**-24}, 1.0),  # nothing is rounded up,
    ({0: -1.0, 1: -1.5 * 2.0**-24}, -1.0),  # nor away from zero
    ({0: 1.0, 1: 2.0**-24, 2: 2.0**-24}, 1 + 2.0**-23),
    ({0: 1.0, 20: 2.0**-24, 36: 2.0**-24}, 1.0),
    ({0: 1.0, **dict.fromkeys(range(1, 5), 2.0**-25)}, 1 + 2.0**-23),
    ({0: 1.0, **dict.fromkeys(range(1, 9), 2.0**-26)}, 1.0),
]


@pytest.mark.parametrize("name", ["triton", "invariant"])
def test_adversarial_sums_match_the_declaration(name: str) -> None:
    x, due = torch.zeros(len(ROWS), WIDTH), torch.tensor([due for _, due in ROWS])
    for row, (terms, _) in enumerate(ROWS):
        for place, number in terms.items():
            x[row, place] = number
    weight = torch.ones(256, WIDTH)
    assert torch.equal(added(x, weight[:1].T, HOPPER)[:, 0], due)
    logits = load(name).lm_head(x=x.cuda().bfloat16(), weight=weight.cuda().bfloat16(), to=TO).cpu()
    assert torch.equal(logits, due[:, None].expand_as(logits))


@pytest.mark.parametrize("kind", ["signs", "one sign", "wide"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_instruction_chain_equals_the_declared_sum_in_bits(dtype: torch.dtype, kind: str) -> None:
    """`invariant` has one chain for every number of the result; a library may split a sum or order it otherwise."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 1024, device="cuda"), torch.randn(200, 1024, device="cuda")
    if kind == "one sign":
        x, weight = x.abs() + 0.1, weight.abs()
    if kind == "wide" and dtype == torch.bfloat16:
        x, weight = (y * (3 * torch.randn_like(y)).exp() for y in (x, weight))
    x, weight = x.to(dtype), weight.to(dtype)
    logits = load("invariant").lm_head(x=x, weight=weight, to=TO)
    assert torch.equal(logits, added(x.float(), weight.float().T, HOPPER))
