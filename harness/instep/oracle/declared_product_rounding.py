"""Products as a subject declares them: in a run of the reference, every operand of a declared form is rounded.

The derivation, which holds for every tier with a yardstick (T2, T2d, T3, and the relations within tolerance):

    A kernel that multiplies in a format rounds each operand of each product to it, and sums in fp32. The size of that
    error depends on the numbers and on the formula: a chunk kernel rounds intermediate results (w, u, v_new, the
    state between blocks), and each is the operand of a next product. So there is no bound in closed form. The yardstick
    does the same: it is the reference in fp32 with every operand rounded, for `gdn.chunk` in the published block form
    (`chunked_delta_rule.recur_by_products`) of the declared block. The factor and the ulps of `tier_allowances.py`
    stay.

    nearest, or cut    bf16 and fp16 operands are converted, to nearest. tf32 operands are often not converted at all:
                       the instruction ignores their lower 13 bits, which cuts them off (PTX ISA, `mma` with .tf32).
                       Both are correct, so draws of T2 are of both kinds, in turn; T3 begins
                       with one that cuts.
    3xtf32             x = hi + lo, both tf32; hi hi' + hi lo' + lo hi' is computed, and lo lo' is dropped.
    results            a kernel that multiplies two 16-bit tensors element by element rounds each product, too. A conv
                       with 16-bit rows and taps has exact operands. Its W rounded products then err about as much as
                       the rounding of their sum into storage, which every yardstick has.
    inverse            a kernel may form a block's inverse by substitution, or merge two of smaller blocks by products.
                       If the tokens of a block are alike, roundings are alike, too. Their sum then depends on this
                       form: by a factor of up to 10 in one text (`test_declared_rounding.py`). Draws of T2 and T2d, and
                       redraws of T3, are of both forms; T3 begins with substitution, long runs take the larger error.
    decays of          a decay per channel is between the factors of a product, so it scales operands: exp(G_i - M) k_i
    channels           and exp(M - G_j) k_j, for some M. An operand errs by the same share of itself at most for any M,
                       but M decides by which share. In a block of few channels and tokens one such error is most of the
                       sum. A yardstick that rounds beta k, or scales by another M, errs as much on average, but in some
                       blocks by less than a third: in 3000 heads of 8 x 8 numbers and 3 tokens, 14 results with beta k,
                       and 6 with another M. So the yardstick of the form on residuals scales as declared
                       (`chunked_delta_rule._pairs_by_products`), and none of these results is left
                       (`tests/optimized/test_channel_decays.py`). Other forms scale as FLA's kernel.
    stochastic         for the standard error of T2d, and in redraws of T3, every operand is rounded stochastically, as
                       stored numbers are.
    partial sums       an engine of n ranks stores n partial sums of a mixer's and of an MLP's last product, and adds
                       them in fp32. The yardstick splits the product into the same n parts, in the order of the ranks,
                       and rounds each. A partial sum may be larger than the total, so no rounding of the total covers
                       its error. Partial sums in fp32 are one order of the sum, which every yardstick draws.
                       Experts: a rank adds its parts of all experts of a row before it stores the sum. So the products
                       of a mixture keep the ranks on a further axis, in front, up to the place `mlp`, where each
                       rank's sum is rounded once (`added_up`).
    sums               a matrix instruction sums differently from fp32 (`Sums`). Its sums are evaluated as declared,
                       in fp64, one instruction after the other. Errors of cut sums have one sign, so they grow with
                       the number of instructions and not with its root: no draw of rounded sums shows them. The
                       order of the terms is that of memory; others, and splits of a sum, are within the factor.

The op that computes is known from the last place, because the reference shows its places in a fixed order. A form that
is not declared is left alone, so a declaration for prefill chunks allows nothing for decode and verify.
Leaves out: the declarations and their source (`subject/declared_rounding.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
from torch._C._functorch import is_batchedtensor

from instep_optimized.ops.watch_op_calls import tensors_of
from instep_reference import gdn
from instep_reference.chunked_delta_rule import merged, recur_by_products, substituted
from instep_reference.contract.declared_rounding import SUMS, Product, Sums
from instep_reference.contract.place_names import Place
from instep_reference.contract.recurrences import Recurrence
from instep_reference.weights import MoeWeights, Weights

NONE: Mapping[str, Product] = MappingProxyType({})
FOLDED = ("q", "k", "v", "log_decay", "beta")  # the inputs of the delta rule, in this order
FOLDED_WHOLE = (*FOLDED[:-1], "write")  # those of a recurrence without it, whose tokens write all of their value

# The last place -> the form of the op that multiplies next; after places that are not listed, none does.
RULE = "recurrence"  # of the model; `Operands.chunk` chooses one of its forms
NEXT = {
    "normed": "linear", "qkv": "linear", "z": "linear", "b": "linear", "a": "conv", "beta": RULE, "write": RULE,
    "gated": "linear",
    "z_low": "linear", "a_low": "linear", "key_raw": "linear", "query": "linear",  # KDA, latent attention
    "projected": "linear", "key": "linear", "value": "attend", "attended": "linear", "opened": "linear",
    "joined": "linear",
    "post_normed": "mlp", "final": "lm_head",
}
FIRST = "lm_head"  # for a piece that begins with a product, before any place
BITS = {"tf32": 11, "3xtf32": 11, "bf16": 8, "fp16": 11}  # of a mantissa, the leading one included
STORED = {"bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST = 1 << 20  # numbers of a weight whose squares are cached
AT_ONCE = 1 << 24  # products of cut sums that are held at once
FP32_BITS, NOTHING = 24, 400  # bits of a mantissa; no product of two fp32 numbers has an exponent below -NOTHING
CUTS = ("tf32", "3xtf32")  # formats whose operands may be cut off
MULTIPLY = {"conv": ("mul",)}  # torch's names for the products of a form; for all others:
MATRICES = ("matmul", "einsum")

Round = Callable[[torch.Tensor], torch.Tensor]


class Operands:
    """Rounds the operands of the op that runs. It sees every place (`seen`).

    chunk   whether the delta rule now runs over a prefill chunk
    cut     whether this draw cuts operands off; one value per draw if draws are the first axis of the operands
    by_substitution  whether this draw inverts a block by substitution alone (`chunked_delta_rule.substituted`)
    chance  the generator of stochastic rounding, for draws that do not share their roundings
    """

    def __init__(
        self, products: Mapping[str, Product], weights: Weights, *, chunk: bool = False,
        chance: torch.Generator | None = None, squares: "Squares | None" = None,
    ) -> None:
        self.products, self.chunk, self.chance, self._squares = products, chunk, chance, squares
        self.config, self.forms = weights.config, weights.config.recurrence.forms
        self.cut: torch.Tensor | bool = False
        self.by_substitution: torch.Tensor | bool = False
        self.form: str | None = FIRST
        draft = () if weights.draft is None else weights.draft.layers
        experts = [layer.mlp for layer in (*weights.layers, *draft) if isinstance(layer.mlp, MoeWeights)]
        self._wide = [_memory(x) for mlp in experts for x in (mlp.router, mlp.shared_gate) if x is not None]
        # The matrices whose results are added over ranks. Value: the number of a routed expert; None for all others.
        self._by_row = dict[int, int | None]()
        for layer in (*weights.layers, *draft) if any(product.parts > 1 for product in products.values()) else ():
            mlp, mixer = layer.mlp, layer.mixer
            assert mixer is not None, "layers on ranks have a mixer; a `StateOracle` loads no MLP"
            experts_of = mlp.experts if isinstance(mlp, MoeWeights) else ()
            down = mlp.shared.down if isinstance(mlp, MoeWeights) else mlp.down if mlp is not None else None
            self._by_row |= {x.data_ptr(): None for x in (mixer.out, down) if x is not None}
            self._by_row |= {one.down.data_ptr(): number for number, one in enumerate(experts_of)}

    def begin(self, cut: torch.Tensor | bool = False, by_substitution: torch.Tensor | bool = False) -> None:
        """Start a new draw of a piece."""
        self.form, self.cut, self.by_substitution = FIRST, cut, by_substitution

    def begin_draw(self, number: torch.Tensor | int) -> None:
        """Start a new draw of several: four in turn cover all kinds."""
        if self.products:  # nothing else is cut off or inverted
            self.begin(number % 2 == 1, number // 2 % 2 == 1)
        else:
            self.begin()

    def seen(self, place: Place) -> None:
        form = NEXT.get(place.component)
        if place.component == "qkv" and not self.config.recurrence.has_state:
            form = "conv"  # of a layer whose conv is the only op between its gates
        elif form == RULE:
            form = self.forms[self.chunk]
        elif form == "mlp" and self._experts(place):
            form = "moe"
        self.form = form

    def multiply(self, func: Callable[..., Any], name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """The function as torch calls it, on rounded operands if it is a product of a declared form."""
        product = None if self.form is None else self.products.get(self.form)
        if product is None or name not in MULTIPLY.get(self.form or "", MATRICES):
            return func(*args, **given)
        if product.parts > 1 and not is_batchedtensor(args[-1]) and args[-1].data_ptr() in self._by_row:
            return self._in_parts(func, name, args, given, product)
        return self._product(func, args, given, product)

    def _in_parts(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], given: Mapping[str, Any], product: Product
    ) -> torch.Tensor:
        """The sum of the partial sums of all ranks, each rounded as it is stored; of an expert, these partial sums."""
        assert name == "matmul", "rows times a matrix"
        expert = self._by_row[args[-1].data_ptr()]
        if product.whole and expert is not None:
            whole = self._product(func, args, given, product)
            rank = expert // (self.config.experts // product.parts)
            return torch.stack([whole if part == rank else torch.zeros_like(whole) for part in range(product.parts)])
        left, right = (torch.tensor_split(x, product.parts, axis) for x, axis in zip(args, (-1, 0), strict=True))
        parts = [self._product(func, pair, given, product) for pair in zip(left, right, strict=True)]
        return torch.stack(parts) if self.form == "moe" else self._total(parts, product)

    def _total(self, parts: Iterable[torch.Tensor], product: Product) -> torch.Tensor:
        """The sum over the ranks of what each has stored."""
        stored = [part if product.stored == "ieee" else self._rounded(part, product.stored) for part in parts]
        return reduce(torch.add, stored)

    def added_up(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of a place; the result of experts over ranks as the sum of what each rank has stored."""
        product = self.products.get("moe")
        if product is None or product.parts == 1 or place.component != "mlp" or not self._experts(place):
            return tensor
        return self._total(tensor.unbind(-3), product)

    def _product(
        self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any], product: Product
    ) -> Any:
        """The function on rounded operands."""
        sums = SUMS[product.sums]
        if product.format == "ieee" and sums is None:
            return func(*args, **given)
        *equation, left, right = args
        if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)) or self._stays(right):
            return func(*args, **given)
        if sums is not None:
            x, y = (x if product.format == "ieee" else self._rounded(x, product.format) for x in (left, right))
            return added(x, y, sums)
        high, other = self._rounded(left, product.format), self._rounded(right, product.format)
        out = func(*equation, high, other, **given)
        if product.results:
            return self._rounded(out, product.format)
        if product.format == "3xtf32":
            out = out + func(*equation, high, self._rounded(right - other, product.format), **given)
            out = out + func(*equation, self._rounded(left - high, product.format), other, **given)
        return out

    def inverse(self, lower: torch.Tensor) -> torch.Tensor:
        """The inverse of a block of `gdn.chunk`, in the form of this draw."""
        if isinstance(self.by_substitution, bool):
            return (substituted if self.by_substitution else merged)(lower)
        return torch.where(self.by_substitution.to(lower.device), substituted(lower), merged(lower))

    def square(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.square() if self._squares is None else self._squares(matrix)

    def kept(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A value that a chunk kernel keeps between its launches: in the format of its operands, if that has 16 bits.

        Updates of the form on residuals are not stored, and are rounded as the operands that they become.
        """
        product = self.products[self.forms[1]]
        return self._rounded(tensor, product.format) if product.format in STORED and name != "update" else tensor

    def _rounded(self, x: torch.Tensor, format: str) -> torch.Tensor:
        if self.chance is not None:
            sampled = torch.rand(x.shape, generator=self.chance, dtype=x.dtype, device=self.chance.device)
            return to_bits(x, BITS[format], lambda scaled: torch.floor(scaled + sampled.to(x.device)))
        if format in STORED:
            return x.to(STORED[format]).to(x.dtype)
        if isinstance(self.cut, bool):
            return to_bits(x, BITS[format], torch.trunc if self.cut else torch.round)
        which = self.cut.to(x.device)
        which = which.reshape(*which.shape, *[1] * (x.dim() - 1)) if which.dim() else which
        return to_bits(x, BITS[format], lambda scaled: torch.where(which, scaled.trunc(), scaled.round()))

    def _stays(self, weight: torch.Tensor) -> bool:
        """Whether a product stays wide: routers, whole or a row of one, and shared gates. A tensor with draws is no
        weight.
        """
        if not self._wide or is_batchedtensor(weight):  # which has no address
            return False
        return any(weight.data_ptr() in addresses for addresses in self._wide)

    def _experts(self, place: Place) -> bool:
        if place.stage == "trunk":
            return "moe" in self.config.layers[place.layer]
        return self.config.experts > 0 and self.config.block is None  # a block drafter has none


def _memory(x: torch.Tensor) -> range:
    """The addresses from its first number to its last one."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return range(x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size())


class Squares:
    """The squares of matrices. Those of weights are cached, because every draw of every piece multiplies with them."""

    def __init__(self, weights: Weights) -> None:
        self._of = {x.data_ptr(): x for x in tensors_of(weights) if x.numel() <= LARGEST}
        self._known: dict[tuple[object, ...], torch.Tensor] = {}

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        if is_batchedtensor(matrix) or matrix.data_ptr() not in self._of:
            return matrix.square()
        key = matrix.data_ptr(), matrix.shape, matrix.stride()
        if key not in self._known:
            self._known[key] = matrix.square()
        return self._known[key]


class InChunks:
    """The delta rule of a prefill chunk in the declared block form, instead of the token-by-token one.

    It sees every place: it remembers the rows that are folded in, and answers `core` with its own. state: the final one
    """

    def __init__(self, operands: Operands, base: torch.Tensor) -> None:
        """base: the state [HV, K, V] before the chunk."""
        self.operands, self.base = operands, base
        self.shown: dict[str, torch.Tensor] = {}
        self.state: torch.Tensor | None = None

    def core(self) -> torch.Tensor:
        """The read-out [T, HV, V] of the remembered rows."""
        names = FOLDED if "beta" in self.shown else FOLDED_WHOLE
        core, state = in_chunks(self.operands, [self.shown[name] for name in names], self.base)
        self.state = state
        return core

    def keep(self, place: Place, tensor: torch.Tensor) -> None:
        if place.component in (*FOLDED, *FOLDED_WHOLE):
            self.shown[place.component] = tensor


def in_chunks(
    operands: Operands, rows: Sequence[torch.Tensor], base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one request, as FOLDED, in the declared block form -> core (T, HV, V), state (HV, K, V)."""
    q, k, v, log_decay, write = rows
    repeats = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q, k))
    product = operands.products[operands.forms[1]]
    assert product.block is not None, "checked when it was declared"
    gates = gdn.by_channel(log_decay, v)[None], *gdn.erase_and_write(operands.config.recurrence, write[None])
    core, state = recur_by_products(
        q[None], k[None], v[None], *gates, base.to(q)[None], product.block, operands.kept, product.residual,
        operands.inverse,
    )
    return core[0], state[0]


def launched(
    operands: Operands | None, row: Recurrence, rows: Sequence[torch.Tensor], state: torch.Tensor
) -> torch.Tensor:
    """The state [HV, K, V] after one launch of a recurrence alone; rows: as FOLDED, of one request."""
    if operands is not None and operands.chunk and operands.forms[1] in operands.products:
        operands.form = operands.forms[1]
        return in_chunks(operands, rows, state)[1]
    if operands is not None:
        operands.form = operands.forms[operands.chunk]
    q, k, v, log_decay, gate = rows
    q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], dim=1)[None] for x in (q, k))
    decay, (erase, write) = gdn.by_channel(log_decay, v)[None], gdn.erase_and_write(row, gate[None])
    return gdn.recur(q, k, v[None], log_decay=decay, erase=erase, write=write, state=state[None]).state[0]


def added(left: torch.Tensor, right: torch.Tensor, sums: Sums) -> torch.Tensor:
    """left [..., T, K] times right [K, N], summed like a matrix instruction, `terms` products of a sum at a time."""
    columns = max(AT_ONCE // max(left[..., 0].numel() * sums.terms, 1), 1)
    parts = [_added(left.double(), part.double(), sums) for part in torch.split(right, columns, -1)]
    return torch.cat(parts, -1).to(left.dtype)


def _added(left: torch.Tensor, right: torch.Tensor, sums: Sums) -> torch.Tensor:
    total = left[..., :1] * right[:1] * 0
    for some, others in zip(torch.split(left, sums.terms, -1), torch.split(right, sums.terms), strict=True):
        addends = torch.cat([total[..., None, :], some[..., None] * others], -2)  # [..., T, 1 + terms, N]
        leads = (_lead(some)[..., None] + _lead(others)).amax(-2)
        unit = torch.ldexp(torch.ones_like(total), torch.maximum(leads, _lead(total)).clamp(min=-NOTHING) - sums.bits)
        total = to_bits((addends / unit[..., None, :]).trunc().sum(-2) * unit, FP32_BITS, torch.trunc)
    return total


def _lead(x: torch.Tensor) -> torch.Tensor:
    """The exponent of the leading bit; for 0 one below all others."""
    return torch.where(x == 0, -2 * NOTHING, torch.frexp(x)[1] - 1)


def to_bits(x: torch.Tensor, bits: int, towards: Round) -> torch.Tensor:
    """x with a mantissa of this many bits; `towards` rounds mantissas between two values to integers."""
    mantissa, _ = torch.frexp(x)  # at least 1/2 and below 1
    scaled = mantissa * 2.0**bits  # now neighbours are integers
    return torch.where(x.isfinite() & (x != 0), towards(scaled) * (x / scaled), x)
