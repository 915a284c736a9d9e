"""Rounds over trees for an engine: a story of events, and all answers of an engine that serves one.

Leaves out: the claims about it (`tests/optimized/test_engine_trees.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from random import Random
from typing import Any

import torch

from instep.kit.cases.guarded_pools import same_bits
from instep_optimized import OptimizedEngine
from instep_reference.contract.engine import (
    Abort,
    Admit,
    Commit,
    Committed,
    Draft,
    Drafted,
    Event,
    Finish,
    Forward,
    Forwarded,
    Idle,
    Load,
    Path,
    Preempt,
    Resume,
    Row,
    Save,
    SetNumSteps,
)
from instep_reference.contract.place_names import unseen
from instep_reference.speculative_rounds import Rounds
from support.trees import chain, drawn, path
from support.two_sides import CAPACITY

NODES, STEPS, VOCAB = 6, 3, 64
ROOM = replace(CAPACITY, num_draft_tokens=NODES)


class Story:
    """Rounds of several requests with trees of all shapes and sizes, mixed with chains, prefill and decode; all phases.

    ahead  (request, count) -> the target's next tokens. Then the engine decides acceptance, and a path of each tree
           has some of these tokens. None means that paths and bonuses are given
    head   whether the model has a draft head, which may draft chains
    """

    def __init__(self, seed: int, *, ahead: Callable[[str, int], list[int]] | None = None, head: bool = True) -> None:
        self._draw, self._ahead, self._head, self._windows = Random(seed), ahead, head, dict[str, tuple[int, ...]]()

    def token(self) -> int:
        return self._draw.randrange(VOCAB)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.token() for _ in range(count))

    def draft(self, names: tuple[str, ...], *, chains: bool = False) -> Draft:
        trees = [chain(STEPS + 1) if chains else drawn(self._draw, self._draw.randint(2, NODES), STEPS) for _ in names]
        self._windows.update(zip(names, trees, strict=True))
        picks = tuple(self.drafts(name, tree) for name, tree in zip(names, trees, strict=True))
        return Draft(names, picks, None if chains else tuple(tree[1:] for tree in trees))

    def drafts(self, name: str, tree: tuple[int, ...]) -> tuple[int, ...]:
        tokens = [self.token() for _ in tree]
        if self._ahead is not None:
            nodes = max((path(tree, self._draw.randrange(len(tree)))[1:] for _ in range(2)), key=len)
            for node, token in zip(nodes, self._ahead(name, len(nodes)), strict=True):
                tokens[node] = token
                twins = [other for other in range(1, len(tree)) if tree[other] == tree[node] and other > node]
                tokens[twins[0] if twins else node] = token  # of two children with the pick the lowest is taken
        return tuple(tokens[1:])

    def verify(self, names: tuple[str, ...], *beside: Row) -> Forward:
        return Forward((*beside[:1], *(Row(name, "verify") for name in names), *beside[1:]))

    def commit(self, names: tuple[str, ...]) -> Commit:
        paths = []
        for name in names:
            tree = self._windows[name]
            nodes = path(tree, self._draw.randrange(len(tree)))
            paths.append(Path(tuple(nodes[1:]), self.token()))
        return Commit(names, tuple(paths) if self._ahead is None else None)

    def round(self, names: tuple[str, ...], *beside: Row) -> Iterator[Event]:
        yield self.draft(names[:1], chains=self._draw.random() < 0.3)
        if names[1:]:
            yield self.draft(names[1:])
        order = tuple(self._draw.sample(names, len(names)))
        yield self.verify(order, *beside)
        yield self.commit(tuple(self._draw.sample(names, len(names))))

    def __iter__(self) -> Iterator[Event]:
        prompt = self.tokens(9)
        first = self.tokens(11)
        yield Admit("a", first)
        yield Admit("b", self.tokens(2))
        yield Forward((Row("a", "prefill", 11), Row("b", "prefill", 2)))
        yield Admit("c", prompt)
        yield from self.round(("a", "b"), Row("c", "prefill", 2))
        yield from self.round(("b", "a"), Row("c", "prefill", 3))
        yield Forward((Row("a", "decode", root=self.token()), Row("c", "prefill", 4), Row("b", "decode")))
        yield from self.round(("c", "a", "b"))
        yield Draft(("b", "c")) if self._head else self.draft(("b", "c"), chains=True)  # the head's own chains
        self._windows.update(b=chain(STEPS + 1), c=chain(STEPS + 1))
        yield self.verify(("c", "b"), Row("a", "decode"))
        yield self.commit(("b", "c"))
        yield Save("a", "kept")
        yield Preempt("a")
        yield from self.round(("b", "c"))
        yield Resume("a")
        yield from self.round(("a",))
        yield Finish("b")
        yield Admit("e", first)
        yield Load("e", "kept")
        yield from self.round(("e", "a"))
        yield Finish("e")
        yield self.draft(("a",))
        yield Abort("a")  # drafted
        yield Admit("d", self.tokens(3))
        yield Forward((Row("d", "prefill", 3),))
        yield self.draft(("d", "c"))
        yield self.verify(("d", "c"))
        yield Abort("d")  # verified
        yield self.commit(("c",))
        yield SetNumSteps(0)
        yield Forward((Row("c", "decode"),))
        yield Idle()
        yield SetNumSteps(STEPS)
        yield from self.round(("c",))
        yield Preempt("c")
        yield Abort("c")


def ahead(truth: Rounds[Any, Any, Any], name: str, count: int) -> list[int]:
    """The target's next tokens, by plain decoding without a trace in memory."""
    kept, see = dict(truth.requests), truth.see
    truth.see = unseen
    said = [truth.forward((Row(name, "decode"),)).roots[name] for _ in range(count)]
    truth.requests, truth.see = kept, see
    return said


def played(subject: OptimizedEngine, story: Iterable[Event]) -> list[torch.Tensor]:
    """Every number that the engine gives, and the states of requests that are between rounds."""
    told, verified = list[torch.Tensor](), set[str]()
    for event in story:
        answer = event.on(subject)
        if isinstance(answer, Drafted | Committed):
            said = (getattr(answer, field.name) for field in fields(answer))
            told += [numbers for numbers in said if isinstance(numbers, torch.Tensor)]
        elif isinstance(answer, Forwarded):
            told += [*answer.own.values(), torch.tensor(list(answer.roots.values()))]
        if isinstance(event, Forward):
            verified |= {row.request for row in event.rows if row.kind == "verify"}
        verified &= set(subject.slots()) - (set(event.requests) if isinstance(event, Commit) else set())
        for name in sorted(subject.slots().keys() - verified):
            told += [tensor for _, tensor in subject.state(name).parts()]
    return told


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(same_bits(mine, right) for mine, right in zip(one, other, strict=True))
