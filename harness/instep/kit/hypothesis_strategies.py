"""Hypothesis strategies: configurations of models, prompts, and whole traces of legal events.

    @given(workload=kit.traces())
    def test_it(workload): kit.replayed(workload, OPS).must_agree()

Leaves out: the content of an event (`campaign/fuzz/draw_events.py`), and long campaigns (`instep fuzz`).
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec.structs import replace as with_fields

from instep_reference.contract import engine as e
from instep_reference.contract.engine import AnyEvent
from instep_reference.contract.errors import BadInput

from ..campaign.fuzz import draw_events as drawn
from ..campaign.fuzz.campaign import edges_of
from ..run.engine_without_comparison import header_of
from ..trace.event_rules import EventRules
from ..trace.event_scheduler import Step, recorded
from ..trace.file import Trace
from ..trace.header import Recording
from ..trace.policy import Policy
from .argument_checks import must_be
from .model_and_trace import PROMPTS, Workload, model_of

EVENTS = 12  # steps of a drawn trace
LONGEST = 20  # tokens of a drawn prompt, so that every policy of two slots has room for it
WIDTHS = ((16, 32), (32, 16), (16, 64))  # of keys and of values: never equal, or a transposed state would be invisible
One = tuple[Collection[str], drawn.Drawer]  # a function that draws an event; one of these kinds must be legal
FORWARD: One = ("prefill", "verify", "decode"), drawn.forward
READ: One = ("prefill",), drawn.forward  # and other work in the same forward
VERIFY: One = ("verify",), drawn.forward
ADMIT: One = ("admit",), drawn.admit
DRAFT: One = ("draft",), drawn.draft


def commit(draw: drawn.Draw, rules: EventRules, edges: Sequence[int]) -> Any:
    """Draw a commit. If all accepted counts are equal, one of them is changed in half of the draws."""
    event: Any = drawn.commit(draw, rules, edges)
    (name, *others), (path, *paths) = event.requests, event.accepted
    drafts = len(rules.table.live[name].window) - 1
    if not others or not drafts or len({len(one.nodes) for one in event.accepted}) > 1 or draw(st.booleans()):
        return event
    count = draw(st.sampled_from([count for count in range(drafts + 1) if count != len(path.nodes)]))
    return with_fields(event, accepted=(e.Path(tuple(range(1, count + 1)), path.bonus), *paths))


COMMIT: One = ("commit",), commit
STEPS: Mapping[str, Sequence[One]] = {
    "whole round": (DRAFT, DRAFT, VERIFY, VERIFY, COMMIT), "round": (DRAFT, VERIFY, COMMIT), "forward": (FORWARD,),
    "commit": (COMMIT,), "admit": (ADMIT, READ, READ),
    **{kind: (((kind,), drawer),) for kind, drawer in drawn.UPKEEP.items()},
}
OFTEN = ("whole round",) * 4 + ("round", "forward", "resume")  # in addition to one of each: commits make most mistakes


@st.composite
def configurations(draw: drawn.Draw) -> dict[str, Any]:
    """Numbers of a model for `small(**config)`: heads that share keys, unequal widths, conv widths, depths."""
    heads, shared, width = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from(WIDTHS))
    every = draw(st.sampled_from((2, 3)))
    return {
        "linear_num_key_heads": heads, "linear_num_value_heads": heads * shared, "linear_key_head_dim": width[0],
        "linear_value_head_dim": width[1], "linear_conv_kernel_dim": draw(st.integers(2, 4)),
        "num_hidden_layers": every, "full_attention_interval": every,
        "tie_word_embeddings": draw(st.booleans()),
    }


def prompts(vocab: int = 64, names: Sequence[str] = tuple(PROMPTS)) -> SearchStrategy[dict[str, tuple[int, ...]]]:
    """A prompt under each name, of 1 to 20 tokens."""
    tokens = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=LONGEST).map(tuple)
    return st.fixed_dictionaries(dict.fromkeys(names, tokens))


@st.composite
def traces(draw: drawn.Draw, /, events: int = EVENTS, *, prefixes: bool = False, **config: Any) -> Workload:
    """A trace of legal events with every choice drawn, and the model of `small(**config)`.

    events    maximum number of steps after two requests have begun; a round is one step of three or more events
    prefixes  also track prefixes, and move kept data to the host, back, and away. The engine must support these
    """
    must_be("events", events, int, "a number of steps, from 1")
    if events < 1:
        raise BadInput("events", found=events, expected="a number of steps, from 1")
    checkpoint, numbers = model_of(**config)
    room, steps = drawn.room(draw), drawn.candidates(draw)
    room = drawn.with_prefixes(draw, room) if prefixes else room
    policy = Policy("drawn", "No sequence of legal events makes the sides part.", room, (), steps[0],
                    adaptive={"candidate_steps": sorted(steps), **drawn.HASTY})
    header, _ = header_of(policy, checkpoint, recording=Recording())
    rules, edges, served = EventRules(header), edges_of(checkpoint), list[AnyEvent]()

    def legal(one: One) -> bool:
        return any(drawn.may(rules, kind) for kind in one[0])

    def serve(one: One) -> None:
        """Add one event, unless none of its kinds is legal now, or the pools have no room for it."""
        if not legal(one):
            return
        try:
            event: Any = one[1](draw, rules, edges)
            rules.check(event)
        except BadInput:
            return
        rules.apply(event)
        served.append(event)

    for first in (ADMIT, ADMIT, READ, READ, READ):
        serve(first)
    count = st.integers(1, events)
    for _ in range(max(draw(count), draw(count))):  # the larger of two, because most drawn numbers are small
        names = [name for name in (*OFTEN, *STEPS) if legal(STEPS[name][0])]
        for one in STEPS[draw(st.sampled_from(names))] if names else ():
            serve(one)
    prompts_of = recorded([Step(event, None) for event in served])
    return Workload(Trace(Path("drawn.jsonl"), header, tuple(served), prompts_of, ""), checkpoint, numbers)
