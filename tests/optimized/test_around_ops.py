"""`around`: what is seen, in which order, and that seeing changes nothing; op sets by name.

Leaves out: what the harness makes of what it sees.
"""

import sys
from dataclasses import fields
from inspect import signature
from types import ModuleType
from typing import Any

import pytest
import torch

from instep_optimized.ops import BY_NAME, load, op_protocols
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place, unseen
from support.running import processes

HERE, THERE = Place("trunk", 0, "residual"), Place("trunk", 0, "query")


def test_named_result_passes_through_see_which_may_replace_it() -> None:
    seen = []

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        seen.append((place, tensor.clone()))
        return tensor + 1

    x = torch.ones(2, 3)
    grafted = around(PLAIN, see).add(x=x, y=x, to=HERE)
    assert torch.equal(grafted, 2 * x + 1)
    assert [place for place, _ in seen] == [HERE]
    assert torch.equal(seen[0][1], 2 * x)


def test_every_field_of_a_bundle_has_its_own_place() -> None:
    seen = []

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        seen.append(place)
        return tensor

    places = tuple(Place("trunk", 0, name) for name in ("q", "k", "v", "log_decay", "beta"))
    result = around(PLAIN, see).gdn_inputs(
        mixed=torch.randn(3, 12), a=torch.randn(3, 2), b=torch.randn(3, 2), A_log=torch.zeros(2),
        dt_bias=torch.zeros(2), key_heads=1, key_dim=3, to=places,
    )
    assert tuple(seen) == places
    assert type(result).__name__ == "GdnInputs"


def test_unnamed_results_are_not_seen() -> None:
    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError(place)

    rows = around(PLAIN, see).select(x=torch.eye(3), index=torch.tensor([2, -1]))
    assert rows.tolist() == [[0, 0, 1], [0, 0, 0]]


def test_wrappers_are_inside_see_in_the_given_order() -> None:
    order: list[str] = []

    def wrapper(label: str) -> Any:
        def wrap(name: str, op: Any) -> Any:
            def call(**given: Any) -> Any:
                result = op(**given)
                order.append(f"{label} {name}")
                return result

            return call

        return wrap

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        order.append(f"see {place.component}")
        return tensor

    x = torch.ones(1, 1)
    around(PLAIN, see, wrapper("first"), wrapper("second")).add(x=x, y=x, to=HERE)
    assert order == ["first add", "second add", "see residual"]


def test_empty_wrapping_returns_the_same_set() -> None:
    assert around(PLAIN, unseen) is PLAIN
    watched = around(PLAIN, lambda place, tensor: tensor)
    assert (watched.name, watched.types, watched.rounds) == (PLAIN.name, PLAIN.types, PLAIN.rounds)
    assert watched.add is not PLAIN.add


def test_sets_are_loaded_by_name_or_by_module_and_attribute() -> None:
    assert load("plain") is PLAIN is load("instep_optimized.ops.plain:PLAIN")
    assert load("ledger").name == "ledger"


@pytest.mark.parametrize(("name", "found"), [
    ("nothing", "'nothing'"), ("no.such:THING", "No module"), ("torch:nothing", "no attribute"),
    ("torch:nan", "float"),
])  # fmt: skip
def test_invalid_op_set_is_refused_with_the_valid_names(name: str, found: str) -> None:
    with pytest.raises(BadInput, match=found):
        load(name)


# Parameters after those of a protocol: op -> name -> the field of `Ops` that promises it, and its default.
BOUNDS = {"gdn_inputs": {"beta_bound": ("bounds_beta", 1.0), "decay_bound": ("bounds_decay", None)}}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_ops_of_a_set_have_the_signatures_of_their_protocols(name: str) -> None:
    ops, checked = load(name), 0
    for field in fields(Ops):
        protocol = getattr(op_protocols, str(field.type).removesuffix(" | None"), None)
        if not getattr(protocol, "_is_protocol", False) or (op := getattr(ops, field.name)) is None:
            continue
        _, *parameters = signature(protocol.__call__, eval_str=True).parameters.values()
        found, bounds = [*signature(op, eval_str=True).parameters.values()], BOUNDS.get(field.name, {})
        assert found[: len(parameters)] == parameters, field.name
        given = {more.name: more.default for more in found[len(parameters) :]}
        assert given == {bound: default for bound, (flag, default) in bounds.items() if getattr(ops, flag)}, field.name
        checked += 1
    assert checked > 30


def test_functions_of_a_module_with_names_of_ops_are_its_ops() -> None:
    def add() -> None: ...
    def another() -> None: ...

    add.__module__ = another.__module__ = "own"
    module = ModuleType("own")
    vars(module).update(add=add, another=another, norm=PLAIN.norm)
    assert op_protocols.ops_of(module) == {"add": add}


def test_triton_is_imported_only_on_request() -> None:
    program = "import sys, instep_optimized; instep_optimized.load('plain'); print('triton' in sys.modules)"
    paths = {"PYTHONPATH": ":".join(sys.path)}
    done = processes.run([sys.executable, "-c", program], timeout=120, env=paths)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
