"""A finding with a few made numbers, for the functions that explain it, and a comparison of all that they yield."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any

import torch

from instep.diagnose.mistakes.finding_case import Case, Explanation
from instep_reference.contract.place_names import Place
from instep_reference.weights import GdnWeights, LayerWeights

NONE = torch.zeros(0)


def value(**given: Any) -> Any:
    """A frozen value of these fields, for code that replaces some of them."""
    return make_dataclass("Value", given, frozen=True)(**given)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@dataclass(frozen=True)
class SmallWeights:
    config: Any
    layers: Sequence[Any]
    draft: Any
    final_norm: Any
    block: Any = None


@dataclass
class SmallCase:
    """A finding of request "a". rows: component -> the subject's rows; draft, final_norm: weights next to the layers"""

    component: str
    config: Any = None
    layers: Sequence[Any] = ()
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    right: Any = None
    found: Any = None
    stage: str = "trunk"
    layer: int = 0
    draft: Any = None
    final_norm: Any = None
    piece: Any = field(default_factory=lambda: SimpleNamespace(work=None))
    pieces: Sequence[Any] = ()
    context: Any = field(default_factory=lambda: SimpleNamespace(subject=SimpleNamespace(places={}, before={})))

    granted: Any = None
    oracle: Any = None
    again: Any = None
    work, hidden = Case.work, Case.hidden

    @property
    def weights(self) -> Any:
        return SmallWeights(self.config, self.layers, self.draft, self.final_norm)

    @property
    def finding(self) -> Any:
        return SimpleNamespace(place=Place(self.stage, self.layer, self.component), request="a")

    def own(self, component: str) -> torch.Tensor | None:
        return getattr(self.piece, "rows", self.rows).get(component)

    def made(self, says: str, changes: Any = None, weights: Any = None, **work: Any) -> Iterator[Explanation]:
        """The changes in the place of what an op makes of them."""
        yield Explanation(says, {"changes": changes, "weights": weights, **work})  # type: ignore[arg-type]


def yields(found: Iterable[Explanation], due: Iterable[tuple[Any, ...]]) -> bool:
    """Whether these are the explanations, in this order: sentence, tensor, and tries if they are not 1."""
    made, wanted = [*found], [*due]
    said, wants = [one.sentence for one in made], [str(one[0]) for one in wanted]
    assert said == wants, (set(said) ^ set(wants), said)
    other = [one.sentence for one, (_, wrong, *tries) in zip(made, wanted, strict=True)
             if not same(one.wrong, wrong) or [one.tries] != (tries or [1.0])]  # fmt: skip
    assert not other, other
    return True


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-12)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return bool(one == other)


def changed_mixer(case: Any, says: str, **changed: Any) -> Iterator[Explanation]:
    """The changed weights of a mixer in the place of what its op makes of them."""
    yield Explanation(says, changed)  # type: ignore[arg-type]


def config_of(inputs: str = "normed", **given: Any) -> Any:
    recurrence = SimpleNamespace(inputs=inputs, conv=given.pop("conv", ("q", "k", "v")), bound=given.pop("safe", None))
    return SimpleNamespace(recurrence=recurrence, **given)


def layer(mixer: Any = None, first: Any = None, second: Any = None, mlp: Any = None) -> LayerWeights:
    return LayerWeights(first, mixer, second, mlp)


def gdn(**given: Any) -> GdnWeights:
    return GdnWeights(**{name: NONE for name in list(GdnWeights.__annotations__)[:9]} | given)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def softplus(x: torch.Tensor) -> torch.Tensor:
    return (1 + x.exp()).log()


def near(x: torch.Tensor, axis: int, by: int = 1) -> list[tuple[str, torch.Tensor]]:
    """The tensor with the numbers before, and after, in the places of these along an axis."""
    size = x.shape[axis]
    return [(word, x.index_select(axis, torch.tensor([(at + step * by) % size for at in range(size)])))
            for word, step in (("before", -1), ("after", 1))]  # fmt: skip
