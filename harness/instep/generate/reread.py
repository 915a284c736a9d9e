"""What was decoded, read again by the reference in one pass: every token, and every state at the end.

However it was drafted, batched, chunked and accepted, a request that has said its text must stand where the reference
stands that was given prompt and text as a prompt. A wrong state on the way shows in the state at its end, as some heads
forget slowly, and in the keys of the rows behind it for ever. Judged as T3 and T4 judge a run (`checks/`): truth is the
reference in fp64, the yardstick is the reference in the declared width, rounded as declared and summed in any order.
Leaves out: the moment of an error. A trace of the run, replayed, tells it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from instep_reference import trunk
from instep_reference.contract.adaptive import AdaptiveFile
from instep_reference.contract.engine import Admit, Finish, Forward, RequestState, Row
from instep_reference.contract.place import AFTER_LAYERS, Place, unseen

from ..checks.allowance import LUCK, MARGIN_ERRORS, REDRAWS, TIES_ALWAYS, TIES_CAP, TRUTH_ERROR, allowed
from ..checks.measure import Spot, blocks, measured, relative_error
from ..checks.propagated import PROPAGATED
from ..observe.reorder import Reordered
from ..rig.participant import Participant
from ..rig.sides import Plan, reference, rounding, rounds, wide
from ..verdict import Comparison, Tier, Verdict
from .decode import Decoded

FINAL = Place("trunk", AFTER_LAYERS, "final")
LOGITS = FINAL._replace(component="logits")
PICK = FINAL._replace(component="pick")
# field of a state -> stage and component of its places
MEMORY = {
    "conv": ("trunk", "conv"), "state": ("trunk", "state"), "keys": ("trunk", "keys"), "values": ("trunk", "values"),
    "draft_keys": ("extend", "keys"), "draft_values": ("extend", "values"),
}


@dataclass(frozen=True)
class Read:
    """One pass of a reference over a text: its places, with logits [said, vocab] behind the prompt, and its state."""

    places: dict[Place, torch.Tensor]
    state: RequestState

    def noise(self, truth: Read) -> float:
        """The largest relative error of this pass anywhere in what is passed on."""
        off = [TRUTH_ERROR] + [
            float(relative_error(blocks(place.component, self.places[place]), blocks(place.component, right)).max())
            for place, right in truth.places.items() if place.stage == "trunk" and place.component in PROPAGATED
        ]
        return max(off)


class Reader:
    """Reads the kept requests of one run again. Weights are made once per width."""

    def __init__(self, decoded: Decoded) -> None:
        ask, self.decoded = decoded.ask, decoded
        adaptive = None if ask.adaptive is None else AdaptiveFile.of(ask.adaptive)
        self.plan = Plan(
            ask.checkpoint, ask.header.room(), ask.num_steps, adaptive, ask.setup.ops, dtype=ask.setup.dtype
        )
        self.truth = reference(self.plan, torch.float64)
        self.rounded = reference(self.plan, wide(self.plan.width))
        self.rounds = rounds(self.plan, ask.setup.served())
        self.ties = self.made = 0

    def verdict(self) -> Verdict:
        """Everything that was kept; nothing kept is no agreement."""
        verdict = Verdict()
        for number, name in enumerate(self.decoded.states):
            verdict.add(self.request(number, name))
        if self.ties > max(TIES_ALWAYS, TIES_CAP * self.made):
            verdict.add([Comparison(
                "ties", Tier.DECISIONS, 0, "generate", PICK, elements=self.made, worst=float(self.ties),
                allowed=max(TIES_ALWAYS, TIES_CAP * self.made), undecided=self.ties,
                diagnosis=f"{self.ties} of {self.made} tokens were ties: too many",
            )])
        return verdict

    def request(self, number: int, name: str) -> Iterator[Comparison]:
        """The tokens of one request, then its memory."""
        state, standing = self.decoded.states[name], self.decoded.ended[name]
        truth = self._read(standing.prompt, standing.said, None)
        draws = [self._read(standing.prompt, standing.said, 0)]
        draw = partial(self._read, standing.prompt, standing.said)
        yield self._tokens(number, name, standing.said, truth, draws[0].noise(truth))
        for field, (stage, component) in MEMORY.items():
            for layer, right in getattr(truth.state, field).items():
                spot = Spot("reread", Tier.PROPAGATED, number, "generate", Place(stage, layer, component), name, None)
                found, result = getattr(state, field).get(layer), None
                while result is None or (not result.agrees and result.headroom <= LUCK and len(draws) <= REDRAWS):
                    if result is not None:
                        draws.append(draw(len(draws)))
                    yardsticks = [getattr(one.state, field)[layer] for one in draws]
                    result = measured(spot, found, right, yardsticks, max(one.noise(truth) for one in draws))
                yield result

    def _read(self, prompt: tuple[int, ...], said: tuple[int, ...], draw: int | None) -> Read:
        """draw None: the truth; else a draw of the declared width."""
        tokens, engine = (*prompt, *said[:-1]), self.truth if draw is None else self.rounded
        see, order = (
            (unseen, None) if draw is None else (rounding(self.rounds), Reordered(torch.Generator().manual_seed(draw)))
        )
        reader = Participant("reread", engine, arithmetic=order, first=see)
        reader.serve(Admit("r", tokens))
        side = reader.serve(Forward((Row("r", "prefill", len(tokens), root=said[-1]),)))
        reader.serve(Finish("r"))
        with reader.arithmetic:
            rows = side.places[FINAL][len(prompt) - 1 :]
            logits = trunk.logits(engine.model.weights, rows)  # type: ignore[attr-defined]
        return Read({**side.places, LOGITS: logits}, side.after["r"])

    def _tokens(self, number: int, name: str, said: tuple[int, ...], truth: Read, noise: float) -> Comparison:
        """Each token is the truth's argmax behind the ones before it, unless the truth hardly chose."""
        logits, own = truth.places[LOGITS], torch.tensor(said)
        right = logits.argmax(-1)
        differs = own != right
        margin = (logits.gather(1, right[:, None]) - logits.gather(1, own[:, None]))[:, 0]
        granted = logits.abs().amax(-1) * allowed(torch.tensor(noise), self.plan.width)
        worst = torch.where(differs, margin / (MARGIN_ERRORS * granted), 0.0)
        ties, row = int((differs & (worst <= 1)).sum()), int(worst.argmax())
        self.ties, self.made = self.ties + ties, self.made + len(said)
        diagnosis = f"token {row} is {said[row]}, the truth's {int(right[row])} by a margin of {float(margin[row]):.3g}"
        return Comparison(
            "reread", Tier.DECISIONS, number, "generate", PICK, elements=len(said), blocks=len(said), undecided=ties,
            worst=float(worst[row]), allowed=1.0, request=name, diagnosis=diagnosis if differs.any() else "",
        )
