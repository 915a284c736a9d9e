"""Declarations of a subject about its rounding: a format and sums per form of an op, and storage with scales.

The storage of a component is declared separately, by its name (`rounds` of an op set): a dtype, or `Blocked`. This file
has only definitions. Leaves out: how the yardstick uses both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from .errors import BadInput
from .recurrences import RECURRENCES

# The forms of ops that multiply. A declaration for one form does not apply to another form.
FORMS: dict[str, str] = {
    "linear": "projections of a layer, and the draft head's `fc`",
    "conv": "taps times inputs of the short convolution",
    **{form: text for row in RECURRENCES.values() for form, text in zip(row.forms, (
        "the recurrence token by token: decode, verify, and tokens that are run again",
        "the recurrence over a prefill chunk, in blocks of tokens"), strict=True)},
    "attend": "query times keys, shares times values",
    "mlp": "the three products of a dense MLP",
    "moe": "the products of experts; the router and the shared gate stay fp32",
    "lm_head": "rows times the output matrix",
}

# Formats of operands. 3xtf32: each operand is a sum of two tf32 numbers, and the product
# of the two smaller ones is dropped.
FORMATS: tuple[str, ...] = ("ieee", "3xtf32", "tf32", "fp16", "bf16")
HALVES = ("fp16", "bf16")  # formats of 16 bits, in which tensors are stored

RESIDUAL, RESULTS, SUMMED = ", on residuals", ", results too", ", sums as of "  # spelling of a `Product` of that form


@dataclass(frozen=True)
class Sums:
    """Model of a matrix instruction's addition: several exact products and the sum so far are added at once.

    Every addend is truncated (towards zero) at a number of bits after the leading one of the largest addend. The
    exponent of a product is the sum of its factors' exponents, though the product may be up to 4 times larger. The
    total of these is exact, and is truncated (towards zero) to the 24 bits of fp32.
    """

    terms: int
    bits: int


# Ways to add. They have a name and no free numbers, so that an error cannot be declared away.
# fp32: every addition is rounded to nearest. hopper: wgmma and mma with bf16 or fp16 operands on an H100; found so bit
# by bit (`tests/harness/test_sums_native.py`). Public models of these instructions: Fasi et al. 2021 (V100 to A100),
# Khattak and Mikaitis (arXiv:2512.07004).
SUMS: dict[str, Sums | None] = {"fp32": None, "hopper": Sums(16, 25)}
ADDED = ("linear", "mlp", "lm_head")  # forms that are matrix products alone
REDUCED = ("linear", "mlp", "moe")  # forms whose result may be a sum over ranks


@dataclass(frozen=True)
class Product:
    """Every operand of every product of a form is rounded to `format`, and products are added as `sums` defines.

    block   only for the form gdn.chunk: number of tokens that the kernel takes at once
    residual  only for the form gdn.chunk: the inverse is applied to what a block has left to learn instead of to its
            keys and values separately, and gates to the results of products, but for decays per channel
            (`chunked_delta_rule.recur_by_products`)
    parts, stored  only for the forms linear, mlp and moe: the result of a mixer, of an MLP or of experts is the sum of
            so many partial sums, one per rank. Each is rounded to the format `stored`; they are added in fp32
    whole   only for the form moe in parts: every rank has an equal number of whole experts, in the order of the ranks,
            and a part of the shared one. Otherwise every rank has a part of each expert
    results  only for the form conv: every product is rounded to `format` itself, before it is added. A kernel that
            multiplies two tensors of 16 bits element by element does so, such as Triton's `x * w`; it adds in fp32
    narrow  the declaration is only for activations of at most 16 bits; with wider ones the form multiplies in fp32
    sums    one of SUMS. If a result or an operand is rounded to 16 bits, that error is a thousand times larger than
    that
            of any of them, and no declaration is needed
    """

    format: str
    block: int | None = None
    residual: bool = False
    narrow: bool = False
    sums: str = "fp32"
    results: bool = False
    parts: int = 1
    stored: str = "ieee"
    whole: bool = False

    def __post_init__(self) -> None:
        for name, known in (("format", FORMATS), ("sums", (*SUMS,)), ("stored", FORMATS)):
            if (said := getattr(self, name)) not in known:
                raise BadInput(f"Product.{name}", found=repr(said), expected=f"one of {', '.join(known)}")
        if self.block is not None and (not isinstance(self.block, int) or self.block < 1):
            raise BadInput("Product.block", found=repr(self.block), expected="a number of tokens, at least 1")

    def __str__(self) -> str:
        blocks = "" if self.block is None else f" in blocks of {self.block}{self.residual * RESIDUAL}"
        parts = f", {self.parts} partial sums in {self.stored}{', of whole experts' * self.whole}" * (self.parts > 1)
        return self.format + blocks + self.results * RESULTS + (SUMMED + self.sums) * (self.sums != "fp32") + parts


SCALE_BITS = 20  # of the 24 of fp32, for numbers of at most 4 bits
INTEGER_SCALE_BITS = 17  # for int8, whose numbers have 7 bits
LARGEST_INTEGER = 127  # of int8; -128 is not used, so that x and -x are stored alike
CHANCE_BITS = 24  # bits of the number that decides how a number is rounded


@dataclass(frozen=True)
class Blocked:
    """Storage as numbers of a narrow dtype, with one fp32 scale per tile of their last two axes.

        scale = max(largest |x| of the tile / largest number of dtype, smallest normal number of fp32)
        stored = x / scale, to nearest, ties to even;   read = stored * scale, a product in fp32

    In int8 the stored numbers are whole, from -127 to 127, and the largest number of the dtype is 127.

    Every store computes its scales from the numbers that it stores. A tile of zeros has the smallest scale, to avoid a
    division by 0. A scale is rounded up to `scale_bits` bits, so that its product with a stored number is exact in
    fp32. So numbers that were read are stored again as the same bytes: a state to which nothing was added does not
    change, however often it is stored.

    tile   how many numbers of the last two axes share a scale; None: all of that axis. A last tile may be narrower.
           None in place of both: there are no scales, and reading returns the stored numbers (stochastic bf16 and fp16)
    seed   only for a recurrent state: numbers are rounded stochastically instead of to nearest. Let a <= y < b, y = |x|
    /
           scale, be neighbours in `dtype`: b is stored if u < (y - a) / (b - a), else a; the sign stays.
           A y within a relative 2 ** (1 - SCALE_BITS) of the largest number of `dtype` becomes that number, as with
           rounding to nearest; so here, too, numbers that were read are stored again as the same bytes. Without scales
           a y from the largest number on, and a NaN, are stored as to nearest.
           u is a number of CHANCE_BITS bits: the upper ones of the first word of Philox4x32-10, over 2 ** CHANCE_BITS.
           Its key is the seed, of 64 bits, the lower word first; its counter is (element, tokens, layer, 0): the number
           of the element in [HV, K, V], V fastest; how many tokens are in the state; the layer of the model. No slot,
           row, request or round is in it. So a state follows from the tokens alone, wherever they run: a prefix is what
           its request would have computed, a request that moved keeps its state, and every commit strategy stores the
           same. Requests of equal length share these numbers. Within one state no number is used twice, which keeps its
           errors from adding up

    Engines round stochastically, too: fp16 states of Mamba in vLLM (35753), SGLang (26929), FlashInfer (2645) and
    TensorRT-LLM (`mamba_ssm_stochastic_rounding`); for states of a gated delta net, in fp16 and bf16, SGLang 27975
    proposed it, without speculation. They draw a seed for every call, and FlashInfer and vLLM count numbers by their
    address in the
    pool: a state depends on its slot and on earlier calls, and no two runs store the same.
    """

    dtype: torch.dtype
    tile: tuple[int | None, int | None] | None
    seed: int | None = None

    is_floating_point = True

    @property
    def shown(self) -> torch.dtype:
        """Dtype of the numbers that are read. With scales they are products, and not numbers of `dtype`."""
        return self.dtype if self.tile is None else torch.float32

    @property
    def scale_bits(self) -> int:
        return SCALE_BITS if self.dtype.is_floating_point else INTEGER_SCALE_BITS

    @property
    def nearest(self) -> "Storage":
        """Return the same storage without stochastic rounding."""
        return self.dtype if self.tile is None else replace(self, seed=None)

    def __str__(self) -> str:
        tiles = "" if self.tile is None else f" in tiles of {' x '.join(str(n or 'all') for n in self.tile)}"
        chance = "" if self.seed is None else f", stochastic with seed {self.seed}"
        return f"{str(self.dtype).removeprefix('torch.')}{tiles}{chance}"

    def grid(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of the scales of a block."""
        assert self.tile is not None, "there are scales"
        return *shape[:-2], *(1 if n is None else -(-size // n) for n, size in zip(self.tile, shape[-2:], strict=True))


Storage = torch.dtype | Blocked
STATE_ROWS = 16  # rows of V that share a scale
SCALED_STATE = Blocked(torch.float8_e4m3fn, (None, STATE_ROWS))  # [HV, K, V]
# [positions, kv_heads, head_dim]: a scale per position and head. A scale per page would grow when a larger row is added
# to a partly filled page: the bytes of committed rows would change, and their values would differ from those used
# before.
SCALED_KV = Blocked(torch.float8_e4m3fn, (1, None))

# Rounding points of the states that a tracked prefix keeps, in this order: keys of `rounds`, next to the components.
#   chunk  a forward keeps the states that its kernel left between chunks, which are narrower than the pool
#   kept   the copy itself is stored narrower. It is rounded once, when it is made, and moves as it is stored. A load
#          reads it once, rounds the result to the dtype of the pool, to nearest, and continues from that
# The request that the prefix is taken from keeps its own state. Saves and preempted requests are plain copies.
# Conv windows, KV and final rows of a prefix are plain copies.
# Mirrors: SGLang 0.5.14 and later (`mem_cache/mamba_checkpoint_pool.py` for int8; `h` of a prefill, "already rounded to
# the activation dtype", for chunks). Differs: SGLang's scale has the dtype of the running state, and is at least
# 1e-8 / 127. In fp16 that is 0, and a channel below it is lost.
CHUNK, KEPT = PREFIXES = "chunk", "kept"
# Rounding point of a ring, another key of `rounds`, whose storage is a dtype of 16 bits: keys and updates of the tokens
# of windows are kept as a high part and a low part of it, and both parts are added when the tokens are run again.
#   high = x to nearest;  low = x - high to nearest;  read = high + low, in fp32
# The decays have full width, and so have the rows of the window itself: its tokens read a state that holds unrounded
# ones. After the commit the state has the rounded ones, so it depends on which tokens were in windows, but not on when
# they are run again. Prompts and decodes are not rounded.
# Mirrors: SGLang 0.5.20 and later (`gdn_replayssm_spec_decode`), with d, normalised k and their low parts in the dtype
# of activations and g in fp32. Differs: its read-out of tokens in the ring has the high parts of their keys alone.
RING = "ring"
NAMED_APART = (*PREFIXES, RING)  # keys of `rounds` that are no components
SCALED_KEPT = Blocked(torch.int8, (1, None))  # [HV, K, V]: a scale per head and key channel


def kept_in(rounds: Mapping[str, Storage], *, forward: bool) -> tuple[Storage, ...]:
    """Return the roundings of a tracked prefix's states, in order. forward: whether a forward made it, or a commit."""
    return tuple(rounds[name] for name in (*(CHUNK,) * forward, KEPT) if name in rounds)


def by_chance(storage: Storage, seed: int) -> Blocked:
    """Return the same storage, rounded stochastically."""
    return replace(storage, seed=seed) if isinstance(storage, Blocked) else Blocked(storage, None, seed)


def scaled(storage: Storage | None) -> bool:
    """Return whether data that is stored so has scales."""
    return isinstance(storage, Blocked) and storage.tile is not None


def read_as(storage: Storage) -> torch.dtype:
    """Return the dtype of the numbers that are read from a component that is stored so."""
    return storage.shown if isinstance(storage, Blocked) else storage


def checked(products: Mapping[str, Product]) -> dict[str, Product]:
    """Check a declaration and return it. Every form must be known; chunks of a recurrence alone name their block."""
    chunks = [row.forms[1] for row in RECURRENCES.values()]
    solved = [row.forms[1] for row in RECURRENCES.values() if row.update == "delta"]
    for form, product in products.items():
        if form not in FORMS:
            raise BadInput("products", found=repr(form), expected=f"forms of ops: {', '.join(FORMS)}")
        if not isinstance(product, Product):
            raise BadInput(f"products[{form!r}]", found=repr(product), expected='a Product, such as Product("tf32")')
        if product.residual and form not in solved:
            raise BadInput(f"products[{form!r}].residual", found="True",
                           expected=f"False: only {' and '.join(solved)} have residuals")
        if product.results and (form != "conv" or product.format not in HALVES):
            raise BadInput(f"products[{form!r}].results", found=str(product),
                           expected=f"False: only conv in {' or '.join(HALVES)} rounds its results")
        if product.parts > 1 and form not in REDUCED:
            raise BadInput(f"products[{form!r}].parts", found=product.parts,
                           expected=f"1: only {', '.join(REDUCED)} end in a sum over ranks")
        if product.whole and (form != "moe" or product.parts == 1):
            raise BadInput(f"products[{form!r}].whole", found="True", expected="False: only moe in parts has experts")
        if product.sums != "fp32" and form not in ADDED:
            raise BadInput(f"products[{form!r}].sums", found=repr(product.sums),
                           expected=f"fp32: others are of {', '.join(ADDED)}")
        if (product.block is not None) != (form in chunks):
            expected = "the block of the kernel, such as block=64" if product.block is None else "no block"
            raise BadInput(f"products[{form!r}]", found=str(product), expected=expected)
    return dict(products)
