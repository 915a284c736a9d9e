"""One piece of the reference run several times on the same bits: once in fp64, several times as declared.

Leaves out: which piece, and on which bits (`oracle.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from instep_reference import gdn
from instep_reference.chunked import recur_in_chunks
from instep_reference.contract.engine import RequestState
from instep_reference.contract.place import Place, See
from instep_reference.weights import Weights

from .rows import Share

# A piece of the reference: given weights in some width, it shows its places, and returns the state it left, if any.
Work = Callable[[Weights, See], torch.Tensor | None]

# Yardsticks beside the rounded run. Jittered: every named place is moved at random before it is stored, which stands
# for another summation order (Monte Carlo arithmetic, Parker 1997): of a block of a few numbers, or of one that hangs
# on a single ill-conditioned number, one run may be right by luck; that five are is unlikely. The amplitude, in units
# in the last place of the width computed in: a running sum of n = 256 terms ends eps/2 * sqrt(n / 3) = 4.6 eps off.
JITTERED = 4
JITTER_ULPS = 4.0
CHUNKS = (16, 64)  # tokens to a chunk of the second declared form of the delta rule


@dataclass(frozen=True)
class Run:
    """What one run showed, and the state [HV, K, V] that it left."""

    places: Mapping[Place, torch.Tensor]
    state: torch.Tensor | None = None

    def of(self, component: str) -> torch.Tensor:
        return next(tensor for place, tensor in self.places.items() if place.component == component)


@dataclass(frozen=True)
class Folding:
    """A state and the tokens folded into it: base [HV, K, V] in fp64, and the first `count` tokens.

    tokens    the truth's run over the whole window, which shows what each token folds in
    previous  the state before the step before this one; others: whose, and what they hold
    """

    base: torch.Tensor
    count: int
    previous: torch.Tensor | None
    others: Sequence[tuple[str, torch.Tensor]]
    tokens: Run


@dataclass(frozen=True)
class Replay:
    """A piece of one event and request, computed again.

    wrongs: what a known mistake would have computed, to name a failure: a sentence, and the piece on other rows.
    """

    share: Share
    stage: str
    layer: int
    truth: Run
    yardsticks: tuple[Run, ...]
    folding: Folding | None = None
    wrongs: tuple[tuple[str, Work], ...] = ()

    @property
    def request(self) -> str:
        return self.share.request

    @property
    def writes_state(self) -> bool:
        return self.folding is not None and self.share.kind != "verify"

    def place(self, component: str) -> Place:
        return Place(self.stage, self.layer, component)

    def committed(self, share: Share, folding: Folding, state_dtype: torch.dtype | None) -> Replay:
        """The same layer after a commit: only the tokens at the accepted nodes are folded in."""
        nodes = list(share.nodes)
        runs = [
            Run({}, _stored(fold(run, folding.base, nodes), None if run is self.truth else state_dtype))
            for run in (self.truth, *self.yardsticks)
        ]
        return replace(self, share=share, truth=runs[0], yardsticks=tuple(runs[1:]), folding=folding)


@dataclass(frozen=True)
class Flight:
    """A verified window that is not committed: everything that a commit goes back to."""

    before: RequestState
    layers: Mapping[int, Replay]
    final: torch.Tensor | None
    window: tuple[int, ...]


@dataclass
class Runner:
    """Runs a piece in fp64 and as declared: in the declared width, rounded at the declared points."""

    truth: Weights
    rounded: Weights
    rounds: Mapping[str, torch.dtype]
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __call__(self, work: Work, base: torch.Tensor | None = None) -> tuple[Run, tuple[Run, ...]]:
        """`base`: the state before a prefill chunk, whose delta rule has a second declared form."""
        truth = self.true(work)
        plain = self._kept(_recorded(work, self.rounded, self._round))
        jittered = (self._kept(_recorded(work, self.rounded, self._jitter)) for _ in range(JITTERED))
        chunked = () if base is None else (self._kept(run) for run in _in_chunks(plain, base))
        return truth, (plain, *jittered, *chunked)

    def true(self, work: Work) -> Run:
        """Only the fp64 run."""
        return _recorded(work, self.truth, lambda place, tensor: tensor)

    def _round(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        return _stored(tensor, self.rounds.get(place.component))

    def _jitter(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        drawn = 2 * torch.rand(tensor.shape, generator=self.generator, dtype=tensor.dtype) - 1
        return self._round(place, tensor * (1 + JITTER_ULPS * torch.finfo(tensor.dtype).eps * drawn.to(tensor.device)))

    def _kept(self, run: Run) -> Run:
        """As it is stored: the state too, and the read-out where a form of the rule did not pass through `see`."""
        places = {place: self._round(place, tensor) for place, tensor in run.places.items()}
        return Run(places, None if run.state is None else _stored(run.state, self.rounds.get("state")))


def fold(run: Run, base: torch.Tensor, nodes: Sequence[int]) -> torch.Tensor:
    """The state [HV, K, V] after the tokens at `nodes` of a run were folded into `base`, token by token."""
    q, k, v, log_decay, erase, write = (part[:, list(nodes)] for part in _rule_inputs(run))
    return gdn.recur(q, k, v, log_decay, erase, write, base.to(k)[None])[1][0]


def _in_chunks(run: Run, base: torch.Tensor) -> Iterator[Run]:
    """Only the read-out and the state have this second form; downstream of them the plain run stands."""
    core = next(place for place in run.places if place.component == "core")
    for chunk in CHUNKS:
        q, k, v, log_decay, erase, write = _rule_inputs(run)
        out, state = recur_in_chunks(q, k, v, log_decay, erase, write, base.to(k)[None], chunk)
        yield Run({core: out[0]}, state[0])


def _rule_inputs(run: Run) -> tuple[torch.Tensor, ...]:
    """q, k, v, log_decay, erase, write with a batch axis, heads repeated: value head h reads key head h // r."""
    q, k, v, log_decay, beta = (run.of(name) for name in ("q", "k", "v", "log_decay", "beta"))
    repeats = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q, k))
    log_decay, beta = log_decay[..., None], beta[..., None]
    return tuple(x[None] for x in (q, k, v, log_decay, beta, beta))


def _recorded(work: Work, weights: Weights, see: See) -> Run:
    places: dict[Place, torch.Tensor] = {}

    def record(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        places[place] = see(place, tensor)
        return places[place]

    state = work(weights, record)
    return Run(places, state)


def _stored(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Rounded to how it is stored, in the width that it came in."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype).to(tensor.dtype)
