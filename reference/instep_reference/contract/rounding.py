"""What a subject may declare about its products: a format per form of an op. The words, and their checks.

Storage dtypes are declared apart, by component (`rounds` of an op set). Leaves out: how the yardstick uses both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import BadInput

# The forms of ops that multiply. A declaration for one form says nothing about another form.
FORMS: dict[str, str] = {
    "linear": "projections of a layer, and the draft head's `fc`",
    "conv": "taps times inputs of the short convolution",
    "gdn.window": "the delta rule token by token: decode, verify, and tokens that are run again",
    "gdn.chunk": "the delta rule over a prefill chunk, in blocks of tokens",
    "attend": "query times keys, shares times values",
    "mlp": "the three products of a dense MLP",
    "moe": "the products of experts; the router and the shared gate stay fp32",
    "lm_head": "rows times the output matrix",
}

# Formats of operands; sums are fp32 in all of them. 3xtf32: each operand is a sum of two tf32 numbers, and the product
# of the two smaller ones is left out.
FORMATS: tuple[str, ...] = ("ieee", "3xtf32", "tf32", "fp16", "bf16")


@dataclass(frozen=True)
class Product:
    """Every operand of every product of a form is rounded to `format`; the sum is fp32.

    block   only for the form gdn.chunk: how many tokens the kernel takes at once
    """

    format: str
    block: int | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise BadInput("Product.format", found=repr(self.format), expected=f"one of {', '.join(FORMATS)}")
        if self.block is not None and (not isinstance(self.block, int) or self.block < 1):
            raise BadInput("Product.block", found=repr(self.block), expected="a number of tokens, at least 1")

    def __str__(self) -> str:
        return self.format if self.block is None else f"{self.format} in blocks of {self.block}"


def checked(products: Mapping[str, Product]) -> dict[str, Product]:
    """Check a declaration and return it: every form must be known, and `gdn.chunk` and only it must name its block."""
    for form, product in products.items():
        if form not in FORMS:
            raise BadInput("products", found=repr(form), expected=f"forms of ops: {', '.join(FORMS)}")
        if not isinstance(product, Product):
            raise BadInput(f"products[{form!r}]", found=repr(product), expected='a Product, such as Product("tf32")')
        if (product.block is not None) != (form == "gdn.chunk"):
            expected = "the block of the kernel, such as block=64" if product.block is None else "no block"
            raise BadInput(f"products[{form!r}]", found=str(product), expected=expected)
    return dict(products)
