"""`RequestState.parts()`: every memory tensor of a layer, once, under the place where it is written.

Leaves out: the contents of the tensors.
"""

from dataclasses import fields

import torch

from instep_reference.contract.engine import MEMORY, RequestState
from instep_reference.contract.place_names import COMPONENTS, STAGES, Place, memory_place


def state() -> RequestState:
    """Make a state with two layers everywhere and a different number in every tensor."""
    number = iter(range(100))

    def two() -> dict[int, torch.Tensor]:
        return {layer: torch.tensor([next(number)]) for layer in (0, 3)}

    return RequestState(4, 1, 2, torch.zeros(1), two(), two(), two(), two(), two(), two())


def test_parts_list_every_tensor_once_without_copies() -> None:
    one = state()
    held = [each.name for each in fields(one) if isinstance(getattr(one, each.name), dict)]
    right = [tensor for name in held for tensor in getattr(one, name).values()]
    found = list(one.parts())
    assert len(found) == len(right) == 12 and list(MEMORY) == held
    assert all(mine is other for (_, mine), other in zip(found, right, strict=True)), "in order, no copies"
    assert len(dict(found)) == len(found), "no two parts share a place"


def test_parts_have_the_places_of_the_events_that_write_them() -> None:
    places = [place for place, _ in state().parts()]
    assert places[:2] == [Place("trunk", 0, "conv"), Place("trunk", 3, "conv")]
    assert places[-2:] == [Place("extend", 0, "values"), Place("extend.3", 3, "values")]
    assert all(place.component in COMPONENTS and place.stage.partition(".")[0] in STAGES for place in places)
    assert memory_place("state", 3) == Place("trunk", 3, "state")
