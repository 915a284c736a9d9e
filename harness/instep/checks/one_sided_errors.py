"""T2 over all events of a run: small errors that always point to the same side, which no single event shows.

Rounding moves a number up as often as down. A slip of one parameter (a decay, a norm weight) moves it to one side. It
may be a tenth of the allowed error of one event, and yet be certain after some hundred rows.

For every place, and every head and channel of it, sample j is the error of one row. A_j is this error along the truth,
and D_j the size of the truth, so A_j / D_j is a relative error with a sign. If a correct engine's error has the mean
beta D_j, then e_j = A_j - beta D_j is as likely positive as negative, whatever its size, and Efron (1969) and Hoeffding
(1963) give for n independent samples

    P(sum e > t sqrt(sum e^2))  <=  exp(-t^2 / 2)

No variance is estimated and no tail is assumed: a few large errors widen the limit as much as they move the sum. The
check finds an error if this is exceeded for every |beta| <= b. With g = sum A / sum D, that is

    |g|  >  max over beta = -b and b of  beta + t sqrt(sum (A - beta D)^2) / sum D

The right side is convex in beta, so both ends suffice. `tier_allowances.py` derives b and t. A noiseless slip of size s
needs n > (t s / (s - b))^2 samples, so no finding has fewer than t^2 = 54.

Samples are independent only if their inputs differ. Rows whose truth has the bits of an earlier row have its error, and
count once. Rows of one event share the error of its state (EVENTS), so the event is one sample there, and its error is
divided by its tokens: a state is multiplied once per token, and if all decays are equal, their roundings are. A value
that is stored in 16 bits is compared before that rounding (`before_rounding`): correct arithmetic hardly ever rounds to
another neighbour, and a slip of 1e-4 does so in 2% of the numbers, always to the same side.

Not judged: places in which a constant's rounding is amplified (AMPLIFIED), places with products that are declared to be
narrower than they are summed, and engines for which no calibration has counted false alarms (`not_judged`): tensor
cores truncate sums, so correct results err to one side.
Leaves out: errors of single events (`recomputed_values.py`, `ops_on_own_inputs.py`).
"""

import sys
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.place_names import Place

from ..finding_problem import Problem
from ..oracle.oracle import Oracle
from ..oracle.recomputation import Recomputation
from ..oracle.storage_rounding import before_rounding, narrower
from ..tier_allowances import CONSTANT_ULPS, FEWEST_SAMPLES, SCALE_FLOOR, one_sided_limit
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.rows_by_request import due, rows
from .check_interface import TellsOnce, slot_of

Numbers = npt.NDArray[np.float64]
Key = tuple[str, int, str]  # stage without its step, layer, component

CALIBRATED = ("plain", "triton", "precise", "invariant")  # op sets, on a CPU
EVENTS = ("core", "update", "state")  # whose rows share the error of a state
# Places in which the rounding of a constant is amplified. A softmax amplifies that of its scale by the size of a score.
# An error in the frequency of a rotation grows with the position, so rotated channels are not judged alone (a rotation
# keeps the norm of a head). A safe gate, sigmoid(exp(A_log) x), amplifies its rate by x: a correct engine used 0.88 of
# a limit there. Logits have no parameter of their own.
AMPLIFIED, OF_A_SAFE_GATE = ("attended", "logits"), ("log_decay",)
ROTATED = ("query", "key")
# Places without a product of matrices, or of a state with a row: declared formats of products do not matter there.
NO_PRODUCT = (
    "normed", "q", "k", "v", "log_decay", "beta", "write", "skip", "gated", "opened", "mixer_normed",
    "residual", "post_normed", "mlp_normed", "hidden", "final", "context",
)  # fmt: skip
PER_HEAD = ("a", "b", "log_decay", "beta", "write")  # a number per head: their channels are heads
BUFFERED_ROWS, BUFFERED_NUMBERS = 32, 1 << 17  # that wait at most before they are added up
CANCELLED = 1e-12  # of sum A^2: what is left of it below this is rounding of the sums themselves
LOOKS = 1.25  # the next look has this many times the samples


def not_judged(ops: str, device: str) -> str:
    """The reason for which small slips of this op set are not judged; empty: they are."""
    if device != "cpu":
        return f"errors to one side are calibrated for CPUs, not for {device}: tensor cores truncate sums"
    if ops not in CALIBRATED:
        return f"errors to one side are calibrated for {', '.join(CALIBRATED)}, not for this subject"
    return ""


def are_exact(products: Mapping[str, Product]) -> bool:
    """Whether no product is declared narrower than fp32, or as a sum of parts."""
    return all(one.format == "ieee" and one.sums == "fp32" and one.parts == 1 for one in products.values())


class OneSided(TellsOnce):
    """Per stage, layer, component, head and channel, over all events so far: the mean of the signed error."""

    name = "one_sided"
    tier = Tier.DERIVED

    def __init__(self, oracle: Oracle, not_judged: str = "") -> None:
        """not_judged: why nothing is judged; empty: it is."""
        super().__init__()
        self.oracle, self.reason = oracle, not_judged
        self.samples: dict[Key, Samples] = {}

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        if self.reason:
            yield from self.once(context, self.reason)
            return
        exact = are_exact(self.oracle.runner.products)
        if not exact:
            yield from self.once(context, "errors to one side are not judged in products that are declared narrower")
        left_out = AMPLIFIED if self.oracle.config.decay_bound is None else (*AMPLIFIED, *OF_A_SAFE_GATE)
        for piece in self.oracle.at(context):
            if not isinstance(piece, Recomputation) or piece.prefix:
                continue
            for place, found, truth, stored in _errors(context, piece):
                if place.component in left_out or not (exact or place.component in NO_PRODUCT):
                    continue
                key = place.stage.partition(".")[0], place.layer, place.component
                samples = self.samples.setdefault(key, Samples(place.component, self._rotated(), context.index))
                if samples.add(found, truth, piece.span.count) and samples.due():
                    yield from self._look(context, place, piece.request, samples, stored)

    def _rotated(self) -> int:
        """The channels of a head that positions turn: all of them with latent attention."""
        config = self.oracle.config
        return config.rotary_dim if "mla" not in config.mixers else sys.maxsize

    def _look(
        self, context: EventContext, place: Place, request: str, samples: "Samples", stored: torch.dtype
    ) -> Iterator[Comparison]:
        samples.looks, samples.looked = samples.looks + 1, samples.count
        eps = torch.finfo(self.oracle.runner.rounded.embedding.dtype).eps
        mean, limit = samples.judged(CONSTANT_ULPS * eps, one_sided_limit(samples.looks))
        worst = int((np.abs(mean) / limit).argmax())
        off, granted = float(mean[worst]), float(limit[worst])
        where, head = samples.group(worst)
        if narrower(stored, torch.float32):
            where += f" beyond its rounding to {str(stored).removeprefix('torch.')}"
        yield Comparison(
            self.name, self.tier, context.index, context.kind, place, elements=samples.count, blocks=len(mean),
            worst=abs(off), allowed=granted, request=request, slot=slot_of(context, request), head=head,
            problem=None if abs(off) <= granted else Problem("differs", (
                f"is {abs(off):.1e} of its size too {'large' if off > 0 else 'small'}{where}, on average over "
                f"{samples.count} {'events' if place.component in EVENTS else 'rows'} since event {samples.first}; "
                f"rounding errs to both sides"
            )),
        )  # fmt: skip


def _errors(
    context: EventContext, piece: Recomputation
) -> Iterator[tuple[Place, torch.Tensor, torch.Tensor, torch.dtype]]:
    """Every place of a piece with the subject's value before its rounding to 16 bits, the truth, and how it is stored.
    """
    near = piece.from_own_inputs or piece
    for place, truth in near.truth.places.items():
        found = rows(context.subject, place, piece.span) if due(context, place, piece.span) else None
        if found is not None and found.shape == truth.shape and len(truth) and truth.is_floating_point():
            yield place, _unrounded(found, truth), truth, found.dtype
    if near.writes_state and near.truth.state is not None:
        found, truth = near.left(context.subject).state.get(near.layer), near.truth.state
        if found is not None and found.shape == truth.shape and not narrower(found.dtype, torch.float32):
            yield piece.place("state"), found[None].to(truth), truth[None], found.dtype


def _unrounded(found: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return before_rounding(found, truth) if narrower(found.dtype, torch.float32) else found.to(truth)


class Samples:
    """The samples of one place: sums over those that were added up, and the rows that were not yet.

    first: the event of the first row;  count: samples that were added up;  looks: how often they were judged, and
    looked: how many there were at the last look
    Groups of a place: its whole row, each head, each channel.
    """

    def __init__(self, component: str, rotated: int, first: int) -> None:
        """rotated: the channels of a head that positions turn."""
        self.component, self.first, self.count, self.looks, self.looked = component, first, 0, 0, 0
        self._skip = rotated if component in ROTATED else 0
        self._sums: Numbers = np.zeros((5, 0))  # of A, D, A^2, A D, D^2 in every group
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # found, truth, tokens
        self._known = set[int]()  # hashes of rows

    def add(self, found: torch.Tensor, truth: torch.Tensor, tokens: int = 1) -> bool:
        """Add the rows of one event and request; whether rows were added up, and not only kept."""
        self._waiting.append((found, truth, tokens))
        rows = sum(1 if self.component in EVENTS else len(each) for _, each, _ in self._waiting)
        if rows < BUFFERED_ROWS and sum(each.numel() for _, each, _ in self._waiting) < BUFFERED_NUMBERS:
            return False
        self._add_up()
        return True

    def due(self) -> bool:
        """Whether there are enough samples for another look."""
        return self.count >= max(FEWEST_SAMPLES, LOOKS * self.looked)

    def _add_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self.component in EVENTS:  # [.., HV, .., V], one sample each
            parts = [_by_head(x.double().numpy(), o.double().numpy(), tokens) for x, o, tokens in waiting]
            a, d = (np.concatenate(both) for both in zip(*parts, strict=True))
        else:
            x, o = (torch.cat(each).double().numpy() for each in list(zip(*waiting, strict=True))[:2])
            fresh = [number for number, row in enumerate(o) if self._is_new(row)]
            if not fresh:
                return
            a, d = self._by_row(x[fresh] - o[fresh], o[fresh])
        whole = np.isfinite(a).all(1)  # other checks report the rows that are not finite
        a, d = a[whole], d[whole]
        if not self._sums.shape[1]:
            self._sums = np.zeros((5, a.shape[1]))
        self._sums += [each.sum(0) for each in (a, d, a * a, a * d, d * d)]
        self.count += len(a)

    def judged(self, constant: float, times: float) -> tuple[Numbers, Numbers]:
        """The mean signed error of every group, and its limit. constant: b; times: t."""
        a, d, aa, ad, dd = self._sums
        with np.errstate(all="ignore"):
            squares = [aa - 2 * np.sign(a) * beta * ad + beta**2 * dd for beta in (constant, -constant)]
            ends = [beta + times * np.sqrt(np.maximum(square, CANCELLED * aa)) / d
                    for beta, square in zip((constant, -constant), squares, strict=True)]  # fmt: skip
            return np.where(d > 0, a / d, 0.0), np.where(d > 0, np.maximum(*ends), np.inf)

    def slipped(self, size: float) -> "Samples":
        """The same samples if every value had a further relative error of this size."""
        a, d, aa, ad, dd = self._sums
        moved = Samples(self.component, self._skip, self.first)
        moved._sums = np.stack((a + size * d, d, aa + 2 * size * ad + size**2 * dd, ad + size * dd, dd))
        return moved

    def group(self, number: int) -> tuple[str, int | None]:
        """The words that name a group, and its head."""
        if self.component in EVENTS or number <= self._heads:
            return "", number - 1 if number else None
        channel = number - 1 - self._heads
        per_head = self.component in PER_HEAD and not self._heads  # KDA has gates per channel
        return ("", channel) if per_head else (f" in channel {channel + self._skip}", None)

    def _by_row(self, e: Numbers, o: Numbers) -> tuple[Numbers, Numbers]:
        """A and D of every row, [rows, groups]."""
        e, o = (x.reshape(len(x), -1, x.shape[-1]) for x in (e, o))  # [rows, heads, channels]
        a, d = _along(e, o)
        size = np.sqrt(np.square(o).mean((1, 2)))[:, None]
        size[size == 0] = 1.0
        channels = (e * np.sign(o))[..., self._skip :].sum(1) / size, np.abs(o)[..., self._skip :].sum(1) / size
        self._heads = a.shape[1] - 1
        return np.concatenate((a, channels[0]), 1), np.concatenate((d, channels[1]), 1)

    def _is_new(self, row: Numbers) -> bool:
        mark = hash(row.tobytes())
        new = mark not in self._known
        self._known.add(mark)
        return new


def _along(e: Numbers, o: Numbers) -> tuple[Numbers, Numbers]:
    """A and D [.., 1 + heads] of the whole, and of the heads if there are several. e, o [.., heads, elements]."""
    each = np.einsum("rhc,rhc->rh", e, o), np.einsum("rhc,rhc->rh", o, o)
    several = o.shape[1] > 1
    dot, square = (np.concatenate((x.sum(1, keepdims=True), x[:, : x.shape[1] * several]), 1) for x in each)
    some = square > SCALE_FLOOR**2
    return np.where(some, dot / np.where(some, square, 1.0), 0.0), some.astype(np.float64)


def _by_head(x: Numbers, o: Numbers, tokens: int) -> tuple[Numbers, Numbers]:
    """A and D [1, 1 + heads] of one event. x, o: [rows, heads, V], or [1, heads, K, V]"""
    x, o = (np.moveaxis(each, 1, 0).reshape(1, each.shape[1], -1) for each in (x, o))
    a, d = _along(x - o, o)
    return a / max(tokens, 1), d
