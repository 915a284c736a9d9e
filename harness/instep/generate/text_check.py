"""Check a decoded text with one pass of the reference: every token, and every state at the end.

With any drafting, batching, chunking and acceptance, a request at its end must have the state of a reference that gets
prompt and text as one prompt. A wrong state on the way shows in the state at the end, as some heads forget slowly, and
permanently in the keys of the later rows. The judgement is that of T3 and T4 (`checks/`): truth is the reference in
fp64, the yardstick is the reference in the declared width, rounded as declared and summed in any order.
Leaves out: the event of an error. Replaying a trace of the run shows it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from instep_reference import trunk
from instep_reference.contract.engine import Admit, Finish, Forward, RequestState, Row
from instep_reference.contract.place_names import AFTER_LAYERS, Place

from ..checks.decisions import drawn_choices
from ..checks.error_measurement import Spot, blocks, relative_error
from ..checks.sampled_tokens import Row as DrawnRow
from ..checks.tensor_and_choice_judgement import Draw, Ties, chosen, judge
from ..finding_problem import Problem
from ..run.build_compared_engines import Plan, reference, rounded_participant
from ..run.compared_engine import Participant
from ..tier_allowances import REDRAWS, TRUTH_ERROR
from ..verdict import TIES, Comparison, Tier, Verdict
from ..watch.visible_places import PROPAGATED
from .decode import Decoded, drawings

FINAL = Place("trunk", AFTER_LAYERS, "final")
LOGITS = FINAL._replace(component="logits")
PICK = FINAL._replace(component="pick")


@dataclass(frozen=True)
class Read:
    """One pass of a reference over a text: its places, with logits [tokens, vocab] after the prompt, and its state."""

    places: dict[Place, torch.Tensor]
    state: RequestState

    def noise(self, truth: "Read") -> float:
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
        self.plan = Plan.of(ask.header, ask.checkpoint, ask.setting, "generate")
        self.truth = reference(self.plan, torch.float64)
        self.served = ask.setting.op_set()
        self.ties, self.drawn = Ties("tokens"), drawings(ask.header, decoded.events)

    def verdict(self) -> Verdict:
        """Everything that was kept; nothing kept is no agreement."""
        verdict = Verdict()
        for number, name in enumerate(self.decoded.states):
            verdict.add(self.request(number, name))
        verdict.add(self.ties.too_many(TIES, 0, "generate", PICK))
        return verdict

    def request(self, number: int, name: str) -> Iterator[Comparison]:
        """The tokens of one request, then its memory."""
        state, standing = self.decoded.states[name], self.decoded.ended[name]
        truth = self._read(standing.prompt, standing.said, None)
        draws = [self._read(standing.prompt, standing.said, 0)]

        def sampled(place: Place) -> Iterator[Draw]:
            """As many as it takes; a draw serves every place."""
            for draw in range(REDRAWS + 1):
                if draw == len(draws):
                    draws.append(self._read(standing.prompt, standing.said, draw))
                yield dict(draws[draw].state.parts())[place], draws[draw].noise(truth)

        yield self._tokens(number, name, standing.said, truth, draws[0].noise(truth))
        found = dict(state.parts())
        for place, right in truth.state.parts():
            spot = Spot("reread", Tier.PROPAGATED, number, "generate", place, name, None)
            yield judge(spot, right, sampled(place), found.get(place))

    def _read(self, prompt: tuple[int, ...], said: tuple[int, ...], draw: int | None) -> Read:
        """draw None: the truth; else a draw of the declared width."""
        tokens = (*prompt, *said[:-1])
        reader = Participant("reread", self.truth) if draw is None else (
            rounded_participant(self.plan, self.served, draw)
        )
        reader.serve(Admit("r", tokens))
        side = reader.serve(Forward((Row("r", "prefill", len(tokens), root=said[-1]),)))
        reader.serve(Finish("r"))
        with reader.arithmetic:
            rows = side.places[FINAL][len(prompt) - 1 :]
            logits = trunk.logits(reader.engine.model.weights, rows)  # type: ignore[attr-defined]
        return Read({**side.places, LOGITS: logits}, side.after["r"])

    def _tokens(self, number: int, name: str, said: tuple[int, ...], truth: Read, noise: float) -> Comparison:
        """Require each token to be the truth's choice after the ones before it, unless the truth's margin is too small.

        A drawn token is judged by the uniforms and the window with which the subject drew it.
        """
        logits, own, stored = truth.places[LOGITS], torch.tensor(said), self.plan.setting.activation
        if name in self.drawn:
            rows = [DrawnRow(row, *how) for row, how in zip(logits, self.drawn[name], strict=True)]
            right = torch.tensor([row.drawn for row in rows])
            choices = drawn_choices(rows, right, own, noise, stored)
        else:
            right = logits.argmax(-1)
            choices = chosen(logits, right, own, noise, stored)
        self.ties.add(choices)
        row, margin = choices.row, float(choices.margin[choices.row])
        clause = f"token {row} is {said[row]}, the truth's {int(right[row])} by a margin of {margin:.3g}"
        return Comparison(
            "reread", Tier.DECISIONS, number, "generate", PICK, elements=len(said), blocks=len(said),
            undecided=choices.ties, worst=choices.worst, allowed=1.0, request=name,
            problem=Problem("differs", clause) if choices.differs.any() else None,
        )
