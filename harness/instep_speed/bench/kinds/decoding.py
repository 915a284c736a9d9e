"""Whole texts at real sizes, with the acceptance of the trained fixture, for fixed step counts and the controller.

1. The fixture decodes prompts of mixed difficulty, the hardest first, in every arm: `adaptive` and each number of
   drafts a round. With an op set of invariant rows every arm must produce the same tokens.
2. Every arm is forced through layers of the 9B shape: checked first, then timed lap by lap in turn. Each lap must hold
   the bits of the checked run (`replayed_acceptance.py`).

The ratio of drafting to verifying depends on the depth. `vanilla` uses an MTP layer per draft, and the trained model
has one: with one draft it equals `eagle`, and more drafts are not possible. The row reports that. Leaves out: any claim
about the text, and the time of a proposer on the host (`ngram`).
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from instep.bundled import model
from instep.generate.decode import Ask, Decoded, decode, rounds
from instep.generate.tokenizer import prompts_from, stop_of, words_of
from instep.report.divergence_message import where
from instep.setting import Setting
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Commit

from ..bench_types import Arm, At, Cell, Ground, Kind, Size
from ..replayed_acceptance import Extent, Played, play
from .rounds import checkpoint_of

CANDIDATES, FIRST = {"tiny": (1, 3), "card": (1, 3, 7)}, 3
EXACT = "invariant"  # the op set with which all arms must agree bit by bit; on a CPU `plain`, which agrees too
CHECKED = 16  # checked events of every arm; states by T2d in one layer and one arm, bytes and slots in all
SIZES = {"tiny": (2, 5, 1), "card": (16, 64, 3)}  # prompts, tokens of each, laps
CASES: dict[Size, tuple[tuple[int, int, str], ...]] = {  # batch, layers, drafter
    "tiny": ((2, 0, "eagle"),), "default": ((8, 8, "eagle"), (8, 8, "ngram")),
    "full": tuple((batch, layers, drafter) for drafter in ("eagle", "ngram") for layers in (8, 32)
                  for batch in (1, 8, 16)),
}  # fmt: skip


def cells(ground: Ground, size: Size) -> Iterator[At]:
    for batch, layers, drafter in CASES[size]:
        yield {"batch": batch, "drafter": drafter, **({"layers": layers} if layers else {})}


@dataclass
class Texts:
    """All arms of one op set: decoded, played and timed together when the first of them is needed."""

    ground: Ground
    at: At
    ops: str
    decoded: dict[str, Decoded] = field(default_factory=dict)
    played: dict[str, Played] = field(default_factory=dict)
    apart: list[str] = field(default_factory=list)

    def run(self) -> None:
        ground, folder = self.ground, Path(model())
        prompts, tokens, laps = SIZES[_scale(ground)]
        device, small, candidates = str(ground.device), Checkpoint.open(folder), CANDIDATES[_scale(ground)]
        every = mixed(prompts_from(folder / "prompts.json", words_of(folder, small.config.vocab)))
        chosen = dict(list(every.items())[:prompts])
        exact = Setting(EXACT if ground.card else "plain", device, drafter=self.at["drafter"])
        ask = Ask(small, exact, chosen, FIRST, tokens=tokens, batch=min(self.at["batch"], prompts),
                  stop=stop_of(folder))  # fmt: skip
        self.decoded = arms(hardest_first(ask), {"candidate_steps": list(candidates)}, candidates)
        self.apart = parted(self.decoded)
        setting = Setting.of(ops=self.ops, device=device, dtype=str(ground.dtype).removeprefix("torch."),
                             graphs=ground.card, drafter=self.at["drafter"])  # fmt: skip
        large = checkpoint_of(ground, self.at.get("layers"))
        judged = [large.config.recurrent[0]]
        until = {name: min(Extent.full_batches(one).until or 0, CHECKED) for name, one in self.decoded.items()}
        extents = {name: Extent(last, judged if name == ADAPTIVE else []) for name, last in until.items()}
        self.played = play(self.decoded, large, setting, laps=laps, extents=extents)

    def check(self, name: str) -> str:
        if not self.played:
            self.run()
        if self.apart:
            return f"the arms say different tokens: {', '.join(self.apart)}"
        one = self.played[name]
        found = one.checked.verdict.findings[:1]
        if found:
            return f"{where(found[0])}: {found[0].diagnosis}"
        return "" if one.right else "a lap holds other bits than the checked run, or nothing was compared"

    def samples(self, name: str) -> list[float]:
        """Seconds per token, lap by lap."""
        one = self.played[name]
        return [sum(lap.seconds) / one.speed().tokens for lap in one.laps]

    def told(self, name: str) -> dict[str, Any]:
        one = self.played[name]
        speed, counts = one.speed(), Counter(count for each in rounds(one.decoded) for count in each.accepted)
        return {
            "tokens_per_s": speed.overall, "decoding_tokens_per_s": speed.decoding, "round_ms": speed.latency_ms,
            "latency_s": one.latency_s(), "accepted": speed.accepted,
            "distribution": {str(count): windows for count, windows in sorted(counts.items())},
            "steps": {str(count): number for count, number in speed.steps.items()},
            "checked_events": one.checked.verdict.events, "elements": one.checked.verdict.elements,
        }


def _scale(ground: Ground) -> str:
    return "tiny" if ground.tiny else "card"


def make(ground: Ground, at: At) -> Cell:
    cell = Cell([])
    if at["drafter"] == "eagle" and (layers := ModelConfig.from_file(Path(model()) / "config.json").mtp_layers) < FIRST:
        cell.absent["vanilla"] = f"it takes an MTP layer per draft, and the trained model has {layers}"
    for ops in ground.sets:
        texts = Texts(ground, at, ops)
        for name in (ADAPTIVE, *map(str, CANDIDATES[_scale(ground)])):
            told = name if name == ADAPTIVE else f"always {name}"
            cell.arms.append(_arm(texts, name, told if len(ground.sets) == 1 else f"{ops}, {told}"))
    return cell


def _arm(texts: Texts, name: str, told: str) -> Arm:
    samples: Callable[[int], list[float]] = lambda count: texts.samples(name)  # noqa: E731
    return Arm(told, None, lambda: texts.check(name), samples=samples, more=lambda: texts.told(name))


# ---- the same prompts in several arms: with a step controller, and with each fixed count

ADAPTIVE = "adaptive"
# Kinds of prompts that the fixture lacks: text that every draft head follows, and text that none can.
REPEATED = (b"spam, eggs, ", b"    pass\n", b"0, 1, 2, 3, ")
REPEATS, NOISE_BYTES, NOISES = 8, 48, 3


def arms(ask: Ask, adaptive: dict[str, Any], fixed: tuple[int, ...]) -> dict[str, Decoded]:
    """Map each arm to its decoding: `adaptive`, and the number of drafts for each of `fixed`."""
    asked = {ADAPTIVE: dataclasses.replace(ask, adaptive=adaptive)}
    asked |= {str(steps): dataclasses.replace(ask, adaptive=None, num_steps=steps) for steps in fixed}
    return {name: decode(one) for name, one in asked.items()}


def parted(decoded: Mapping[str, Decoded]) -> list[str]:
    """The requests whose tokens differ between some arm and the first one."""
    first, *others = decoded.values()
    return [name for name in first.ask.prompts if any(other.said(name) != first.said(name) for other in others)]


def hardest_first(ask: Ask) -> Ask:
    """Sort the requests by the number of accepted drafts per round, so that the difficulty of the load drifts.

    A batch with easy and hard requests side by side looks the same to a controller all the time.
    """
    accepted: dict[str, list[int]] = {name: [] for name in ask.prompts}
    for event in decode(ask).events:
        if isinstance(event, Commit) and event.accepted is not None:
            for name, path in zip(event.requests, event.accepted, strict=True):
                accepted[name].append(len(path.nodes))
    order = sorted(accepted, key=lambda name: sum(accepted[name]) / max(1, len(accepted[name])))
    return dataclasses.replace(ask, prompts={name: ask.prompts[name] for name in order})


def mixed(prompts: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, tuple[int, ...]]:
    """Prompts of bytes that alternate with repeated text and with noise: easy, ordinary, hard."""
    generator = torch.Generator().manual_seed(seed)
    easy = {f"repeated {number}": tuple(text * REPEATS) for number, text in enumerate(REPEATED)}
    hard = {
        f"noise {number}": tuple(torch.randint(32, 127, (NOISE_BYTES,), generator=generator).tolist())
        for number in range(NOISES)
    }
    extra = [pair for both in zip(easy.items(), hard.items(), strict=True) for pair in both]
    found: dict[str, tuple[int, ...]] = {}
    every = max(1, len(prompts) // len(extra))
    for number, (name, prompt) in enumerate(prompts.items()):
        if number % every == 0 and extra:
            found.update([extra.pop(0)])
        found[name] = prompt
    return found | dict(extra)


KIND = Kind("a token", cells, make)
