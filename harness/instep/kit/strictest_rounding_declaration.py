"""Find the strictest declaration of products with which an op set agrees: `instep op mine:OPS gdn --suggest-rounding`.

A declaration is suggested only if the errors look like its rounding: a kernel that rounds operands makes nearly the
errors that the yardstick makes with the same operands. A mistake of the same size does not, so none is excused.
Leaves out: `rounds`, the storage of components, which a case of one op does not show.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.declared_rounding import ADDED, FORMATS, HALVES, Product
from instep_reference.contract.errors import BadInput
from instep_reference.contract.recurrences import RECURRENCES

from ..diagnose.mistakes.delta_rule import MISTAKES
from ..diagnose.mistakes.explanation_fit import off
from ..verdict import Comparison, Exit, Verdict
from .cases import Case
from .compare_with_reference import CaseRun, judged, served_as
from .named_mistakes import Observed

FORMS = {
    **{row.name: row.forms for row in RECURRENCES.values()},
    **{op: (op,) for op in ("conv", "attend", "linear", "mlp", "moe", "lm_head")},
    **dict.fromkeys(("biased_conv", "short_conv"), ("conv",)),
    "attend_latents": ("attend",), "squared_mlp": ("mlp",),
}  # fmt: skip
CHUNKS = {row.forms[1] for row in RECURRENCES.values()}
BLOCKS = (64, 16, 1)  # tokens; the first one is that of the published kernels
# The cosine between the errors of a subject and of the yardstick, over the tensors that a stricter declaration refuses.
# Unrelated errors of n numbers have one of about n ** -0.5, under 0.1 for these tensors. A kernel with the declared
# products reaches 0.9; one that rounds a part of the operands, or adds in another order, is between.
ALIKE = 0.3
MARGIN = 0.1  # of two blocks or forms of a chunk the usual one is suggested, unless the other is that much more alike
ROUNDING = {mistake.name for mistake in MISTAKES if mistake.rounds}


@dataclass(frozen=True)
class Tried:
    """The comparison under one declaration. product: None if nothing is declared.

    compared, elements: number of comparisons and of numbers, up to the first case that fails; failed: how many fail
    worst, allowed: of the comparison that is nearest to its limit, or furthest beyond it
    alike: the cosine between its errors and those of the subject; None where nothing needed the declaration
    """

    product: Product | None
    compared: int
    elements: int
    failed: int
    worst: float
    allowed: float
    alike: float | None = None


@dataclass(frozen=True)
class Suggestion:
    """The strictest declaration of a form that agrees, and the next stricter one. chosen is None if there is none."""

    form: str
    chosen: Tried | None
    stricter: Tried | None
    why: str = ""

    @property
    def line(self) -> str:
        """The line to write; empty: there is nothing to declare, or nothing agrees."""
        product = None if self.chosen is None else self.chosen.product
        return "" if product is None else f'products={{"{self.form}": {written(product)}}}'


@dataclass(frozen=True)
class Suggested:
    """A suggestion for every form of an op that multiplies. verdict: without a declaration for these forms."""

    forms: Sequence[Suggestion]
    verdict: Verdict

    @property
    def exit(self) -> Exit:
        if any(form.chosen is None for form in self.forms) or any(one.raised for one in self.verdict.findings):
            return Exit.DIVERGED
        return Exit.AGREED if self.forms else Exit.INCONCLUSIVE

    @property
    def products(self) -> dict[str, Product]:
        """The declaration of all forms that need one."""
        return {form.form: form.chosen.product for form in self.forms if form.chosen and form.chosen.product}

    @property
    def line(self) -> str:
        """The declaration as a line; empty: nothing has to be declared, or nothing agrees."""
        pairs = ", ".join(f'"{form}": {written(one)}' for form, one in self.products.items())
        return f"products={{{pairs}}}" if pairs else ""


def written(product: Product) -> str:
    """Product("tf32", block=64)"""
    parts = [f'"{product.format}"'] + [f"block={product.block}"] * (product.block is not None)
    parts += ["residual=True"] * product.residual + ["narrow=True"] * product.narrow
    parts += ["results=True"] * product.results + [f'sums="{product.sums}"'] * (product.sums != "fp32")
    return f"Product({', '.join(parts)})"


def suggested(
    ops: Ops, cases: Sequence[Case], device: str = "cpu", progress: Callable[[int], None] = lambda number: None,
) -> Suggested:
    """Try the declarations of every form that the cases have, from the strictest on."""
    if unknown := sorted({case.op for case in cases} - FORMS.keys()):
        expected = f"ops that multiply: {', '.join(FORMS)}"
        raise BadInput("--suggest-rounding", found=f"op {unknown[0]}", expected=expected)
    every = {form for case in cases for form in FORMS[case.op]}
    bare = replace(ops, products={form: one for form, one in ops.products.items() if form not in every})
    verdict = judged(bare, cases, device, progress)
    runs = _Runs(bare, cases, device, verdict)
    found = [one for op in dict.fromkeys(case.op for case in cases) for form in FORMS[op]
             if (one := _of_form(form, runs, verdict)) is not None]  # fmt: skip
    return Suggested(found, verdict)


def _of_form(form: str, runs: "_Runs", verdict: Verdict) -> Suggestion | None:
    """None: no case has the form."""
    first = runs.tried(form, None)
    if not first.compared:
        return None
    if not first.failed:
        return Suggestion(form, first, None)
    mine = [one for one in verdict.findings if runs.form_of(one) in (form, "")]
    for finding in mine:
        if finding.check != "op":
            return Suggestion(form, None, first, f"no rounding: {finding.diagnosis}")
        if finding.explained is not None and not {*finding.explained.names[:1]} & ROUNDING:
            return Suggestion(form, None, first, f"this is a mistake, and no rounding: {finding.explained.says}")
    unlike, before = "", first
    for equally_strict in declarations(form, runs.dtypes(form)):
        several = [runs.tried(form, product) for product in equally_strict]
        allowing = [tried for tried in several if not tried.failed]
        if not allowing:
            before = several[0]
            continue
        most = max(tried.alike or 0.0 for tried in allowing)
        best = next(tried for tried in allowing if (tried.alike or 0.0) >= most - MARGIN)
        if best.alike is not None and best.alike >= ALIKE:
            return Suggestion(form, best, before)
        unlike = unlike or (
            f"{best.product} allows errors of this size, but these are not the errors of its rounding "
            f"(their cosine is {best.alike or 0:.2f}, and must be {ALIKE})")
    return Suggestion(form, None, before, unlike or "no declaration allows these errors")


def declarations(form: str, dtypes: Iterable[torch.dtype]) -> Iterator[list[Product]]:
    """From the strictest on, and together those that differ in their blocks alone.

    A declaration for 16-bit activations alone needs cases of both widths.
    """
    several = len({dtype.itemsize > 2 for dtype in dtypes}) > 1
    widths = (True, False) if several else (False,)
    if form in ADDED:
        yield from ([Product("ieee", narrow=narrow, sums="hopper")] for narrow in widths)
    for name in FORMATS[1:]:
        for narrow in widths:
            one = Product(name, narrow=narrow)
            blocks = [replace(one, block=block) for block in BLOCKS]
            yield [*blocks, replace(blocks[0], residual=True)] if form in CHUNKS else [one]
            if form == "conv" and name in HALVES:
                yield [replace(one, results=True)]


class _Runs:
    """The cases, each served once and compared again for every declaration."""

    def __init__(self, ops: Ops, cases: Sequence[Case], device: str, verdict: Verdict) -> None:
        self.ops, self.cases = ops, cases
        raised = {one.event for one in verdict.findings if one.raised is not None}
        there = dict.fromkeys(one.event for one in verdict.compared if one.event not in raised)
        self.runs = {number: CaseRun(ops, served_as(ops, cases[number]), number, device) for number in there}
        self.launches = {number: run.launched() for number, run in self.runs.items()}
        self.refused: dict[str, set[tuple[int, int]]] = {}  # of a form: case and comparison that fail without any

    def form_of(self, one: Comparison) -> str:
        """The form that a comparison is about; empty: the whole launch."""
        forms = FORMS[self.cases[one.event].op]
        if len(forms) == 1 or one.event not in self.launches:
            return forms[0]
        part = self.launches[one.event].form(one.request)
        return f"gdn.{part}" if part else ""

    def dtypes(self, form: str) -> set[torch.dtype]:
        """The dtypes of the activations of its cases."""
        return {run.activation for number, run in self.runs.items() if form in FORMS[self.cases[number].op]}

    def tried(self, form: str, product: Product | None) -> Tried:
        """Compare all cases of a form; give up after the first case that fails."""
        ops = self.ops if product is None else replace(self.ops, products={**self.ops.products, form: product})
        mine, alike = list[Comparison](), list[float]()
        for number in sorted(self.runs, key=lambda number: number not in self._failed(form)):
            run = self.runs[number]
            if form not in FORMS[self.cases[number].op]:
                continue
            run.ops = ops
            here = {at: one for at, one in enumerate(run) if self.form_of(one) in (form, "")}
            if all(self.form_of(one) != form for one in here.values()):
                continue
            mine += here.values()
            wrong = {(number, at) for at, one in here.items() if not one.agrees}
            if product is None:
                self.refused.setdefault(form, set()).update(wrong)
                continue
            if wrong:
                break
            allowed = {id(one) for at, one in here.items() if (number, at) in self.refused[form]}
            alike += [_alike(one) for one in run.observed if id(one.finding) in allowed]
        worst = max(mine, key=lambda one: one.used, default=None)
        return Tried(
            product, len(mine), sum(one.elements for one in mine), sum(not one.agrees for one in mine),
            0.0 if worst is None else worst.worst, 0.0 if worst is None else worst.allowed,
            sum(alike) / len(alike) if alike else None)

    def _failed(self, form: str) -> set[int]:
        return {number for number, _ in self.refused.get(form, ())}


def _alike(one: Observed) -> float:
    """The largest cosine between the subject's errors and those of a draw."""
    error = off(one, one.right).flatten()
    draws = (one.sampled.double() - one.right.double()).flatten(1)
    size = (error.norm() * draws.norm(dim=1)).clamp_min(torch.finfo(torch.float64).tiny)
    return float(((draws @ error) / size).max())
