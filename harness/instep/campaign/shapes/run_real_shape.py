"""Run a model in the shape of a real one, with random weights, through a trace with forced choices.

The reference cannot hold such a model as a whole, so checks that need a whole reference are not among them.
Leaves out: the checks (`run/large_model.py`).
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from instep_reference.contract.checkpoint import Checkpoint

from ...diagnose import explain_outcome
from ...run.large_model import forced_trace, outcome
from ...run.replay import Outcome, must_have, must_reach
from ...setting import Setting
from ...trace.file import Trace
from ...trace.header import Part, Room
from ...trace.policy import Arrival, Policy, Steps
from . import shape
from .random_weights import random_checkpoint

LAYERS = 4  # three GDN layers and one attention layer, plus the draft head
PAGE_SIZE = 16
PROMPT_TOKENS = (70, 9, 1, 33)  # longer than a page and than a conv window, and shorter than one
CHUNKS: tuple[tuple[int, ...], ...] = ((65, 5), (3,), (), (8, 25))
CANDIDATE_STEPS = (1, 3, 7)
WIDEST = max(CANDIDATE_STEPS) + 1
LATE = 2  # the round in which the last request arrives


def shaped(
    name: str, setting: Setting, *, layers: int = LAYERS, vocab: int | None = None, until: int | None = None,
    judged: Collection[int] | None = None,
) -> Outcome:
    """Check one shape. layers, vocab: how much of the model is kept; judged: the layers to compare (None: all)."""
    config = shape(name, layers=layers, vocab=vocab)
    must_have(judged or (), config)
    checkpoint = random_checkpoint(config, device=setting.device)
    named = f"{name}, {layers} layers"
    trace = replace(course(checkpoint, named, ops=setting.ops), path=Path(name))  # the name in the command
    must_reach(until, trace)
    size = ("--layers", str(layers), *(() if vocab is None else ("--vocab", str(vocab))))
    return explain_outcome(outcome(
        trace, checkpoint, setting, until=until, layers=judged, kept=judged, again=("instep", "shapes", *size)
    ))  # fmt: skip


def course(
    checkpoint: Checkpoint, name: str, *, requests: int = 3, rounds: int = 10, ops: str = "triton",
) -> Trace:
    """A short trace with every choice forced. The tokens come from the ledger engine, which is cheap at any size.

    Prompts run in chunks, then rounds with every step count and a plain step, where all, none or some drafts are
    accepted. One request arrives late, so that its prompt runs next to windows. Slots are sparse, and the highest
    come first.
    """
    lengths = [PROMPT_TOKENS[number % len(PROMPT_TOKENS)] for number in range(requests)]
    policy = _policy(name, lengths, rounds)
    prompts = {f"r{number}": length for number, length in enumerate(lengths)}
    return forced_trace(policy, checkpoint, prompts, policy.seed, replay=(Part(ops),))


def _policy(name: str, lengths: list[int], rounds: int) -> Policy:
    requests = len(lengths)
    reach = [length + (rounds + 1) * WIDEST for length in lengths]
    pages = sum(-(-positions // PAGE_SIZE) for positions in reach)
    slots, most = tuple(range(2 * requests, 0, -2)), requests * max(WIDEST, *lengths)
    arrivals = tuple(
        Arrival(
            f"r{number}", f"r{number}", arrive=LATE * (number == requests - 1 > 0), chunks=CHUNKS[number % len(CHUNKS)],
            max_new=rounds * WIDEST,
        )
        for number in range(requests)
    )
    first, *others = sorted(CANDIDATE_STEPS, reverse=True)
    return Policy(
        name, "At the sizes of a real model every state after every commit is that of the accepted tokens.",
        Room(slots, tuple(range(pages + 1, 1, -1)), PAGE_SIZE, most, max(reach)), arrivals, first,
        adaptive={"candidate_steps": sorted(CANDIDATE_STEPS)},
        steps=tuple(Steps(LATE + 2 + 2 * turn, steps) for turn, steps in enumerate([*others, first])),
        accept=(WIDEST - 1, 0, 2, 1, WIDEST - 1, 3, 0, 5), plain=(rounds - 2,), rounds=rounds,
    )
