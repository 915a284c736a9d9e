"""Rounds over trees for an engine: a story of events, and all answers of an engine that serves one.

Leaves out: the claims about it (`tests/optimized/test_engine_trees.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from random import Random
from typing import Any

import torch

from instep.kit.cases.guarded_pools import same_bits
from instep_optimized import OptimizedEngine
from instep_reference.contract import engine as e
from instep_reference.contract.place_names import unseen
from instep_reference.speculative_rounds import Rounds
from support.inputs.tree_windows import chain, drawn, path
from support.worlds.engine_and_reference import CAPACITY

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

    def draft(self, names: tuple[str, ...], *, chains: bool = False) -> e.Draft:
        trees = [chain(STEPS + 1) if chains else drawn(self._draw, self._draw.randint(2, NODES), STEPS) for _ in names]
        self._windows.update(zip(names, trees, strict=True))
        picks = tuple(self.drafts(name, tree) for name, tree in zip(names, trees, strict=True))
        return e.Draft(names, picks, None if chains else tuple(tree[1:] for tree in trees))

    def drafts(self, name: str, tree: tuple[int, ...]) -> tuple[int, ...]:
        tokens = [self.token() for _ in tree]
        if self._ahead is not None:
            nodes = max((path(tree, self._draw.randrange(len(tree)))[1:] for _ in range(2)), key=len)
            for node, token in zip(nodes, self._ahead(name, len(nodes)), strict=True):
                tokens[node] = token
                twins = [other for other in range(1, len(tree)) if tree[other] == tree[node] and other > node]
                tokens[twins[0] if twins else node] = token  # of two children with the pick the lowest is taken
        return tuple(tokens[1:])

    def verify(self, names: tuple[str, ...], *beside: e.Row) -> e.Forward:
        return e.Forward((*beside[:1], *(e.Row(name, "verify") for name in names), *beside[1:]))

    def commit(self, names: tuple[str, ...]) -> e.Commit:
        paths = []
        for name in names:
            tree = self._windows[name]
            nodes = path(tree, self._draw.randrange(len(tree)))
            paths.append(e.Path(tuple(nodes[1:]), self.token()))
        return e.Commit(names, tuple(paths) if self._ahead is None else None)

    def round(self, names: tuple[str, ...], *beside: e.Row) -> Iterator[e.Event]:
        yield self.draft(names[:1], chains=self._draw.random() < 0.3)
        if names[1:]:
            yield self.draft(names[1:])
        order = tuple(self._draw.sample(names, len(names)))
        yield self.verify(order, *beside)
        yield self.commit(tuple(self._draw.sample(names, len(names))))

    def __iter__(self) -> Iterator[e.Event]:
        prompt = self.tokens(9)
        first = self.tokens(11)
        yield e.Admit("a", first)
        yield e.Admit("b", self.tokens(2))
        yield e.Forward((e.Row("a", "prefill", 11), e.Row("b", "prefill", 2)))
        yield e.Admit("c", prompt)
        yield from self.round(("a", "b"), e.Row("c", "prefill", 2))
        yield from self.round(("b", "a"), e.Row("c", "prefill", 3))
        yield e.Forward((e.Row("a", "decode", root=self.token()), e.Row("c", "prefill", 4), e.Row("b", "decode")))
        yield from self.round(("c", "a", "b"))
        yield e.Draft(("b", "c")) if self._head else self.draft(("b", "c"), chains=True)  # the head's own chains
        self._windows.update(b=chain(STEPS + 1), c=chain(STEPS + 1))
        yield self.verify(("c", "b"), e.Row("a", "decode"))
        yield self.commit(("b", "c"))
        yield e.Save("a", "kept")
        yield e.Preempt("a")
        yield from self.round(("b", "c"))
        yield e.Resume("a")
        yield from self.round(("a",))
        yield e.Finish("b")
        yield e.Admit("e", first)
        yield e.Load("e", "kept")
        yield from self.round(("e", "a"))
        yield e.Finish("e")
        yield self.draft(("a",))
        yield e.Abort("a")  # drafted
        yield e.Admit("d", self.tokens(3))
        yield e.Forward((e.Row("d", "prefill", 3),))
        yield self.draft(("d", "c"))
        yield self.verify(("d", "c"))
        yield e.Abort("d")  # verified
        yield self.commit(("c",))
        yield e.SetNumSteps(0)
        yield e.Forward((e.Row("c", "decode"),))
        yield e.Idle()
        yield e.SetNumSteps(STEPS)
        yield from self.round(("c",))
        yield e.Preempt("c")
        yield e.Abort("c")


def ahead(truth: Rounds[Any, Any, Any], name: str, count: int) -> list[int]:
    """The target's next tokens, by plain decoding without a trace in memory."""
    kept, see = dict(truth.requests), truth.see
    truth.see = unseen
    said = [truth.forward((e.Row(name, "decode"),)).roots[name] for _ in range(count)]
    truth.requests, truth.see = kept, see
    return said


def played(subject: OptimizedEngine, story: Iterable[e.Event]) -> list[torch.Tensor]:
    """Every number that the engine gives, and the states of requests that are between rounds."""
    told, verified = list[torch.Tensor](), set[str]()
    for event in story:
        answer = event.on(subject)
        if isinstance(answer, e.Drafted | e.Committed):
            said = (getattr(answer, field.name) for field in fields(answer))
            told += [numbers for numbers in said if isinstance(numbers, torch.Tensor)]
        elif isinstance(answer, e.Forwarded):
            told += [*answer.own.values(), torch.tensor(list(answer.roots.values()))]
        if isinstance(event, e.Forward):
            verified |= {row.request for row in event.rows if row.kind == "verify"}
        verified &= set(subject.slots()) - (set(event.requests) if isinstance(event, e.Commit) else set())
        for name in sorted(subject.slots().keys() - verified):
            told += [tensor for _, tensor in subject.state(name).parts()]
    return told


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(same_bits(mine, right) for mine, right in zip(one, other, strict=True))
