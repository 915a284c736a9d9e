"""A window that is a tree as one run over its nodes: the same as the reference's, which decodes node by node."""

import pytest
import torch

from instep.oracle.single_layer_run import positions_of
from instep.trace.tree_shape import depths, lines
from instep_reference import trunk
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.place_names import Place
from instep_reference.weights import Weights
from support.inputs.checkpoints import Kind, write
from support.running.covering import few

LAYERS = ["full_attention", "linear_attention", "linear_attention"]
TREES = [(-1,), (-1, 0, 1, 2, 3), (-1, 0, 0, 0), (-1, 0, 0, 1, 2, 1, 4), (-1, 0, 1, 0, 3, 1, 2, 6)]


@pytest.fixture(scope="module", params=["dense", "moe"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    kind: Kind = request.param
    folder = write(tmp_path_factory.mktemp(kind), kind, num_hidden_layers=3, layer_types=LAYERS)
    return Weights.of(Checkpoint.open(folder), torch.float64)


@few(12)
@pytest.mark.parametrize("parents", TREES, ids=str)
@pytest.mark.parametrize("before", [0, 1, 7])
def test_nodes_as_rows_of_one_run_are_the_nodes_decoded_one_by_one(
    weights: Weights, before: int, parents: tuple[int, ...]
) -> None:
    tokens = [(7 * index + 3) % 64 for index in range(before + len(parents))]
    memories = trunk.empty_memories(weights)
    if before:
        _, memories = trunk.advance(weights, tokens[:before], memories, 0)
    alone: list[dict[Place, torch.Tensor]] = []
    after: list[tuple[trunk.LayerMemory, ...]] = []
    for node, parent in enumerate(parents):
        seen: dict[Place, torch.Tensor] = {}
        held = after[parent] if parent >= 0 else memories
        place = before + depths(parents)[node]
        _, left = trunk.advance(
            weights, [tokens[before + node]], held, place, lambda at, x, seen=seen: seen.setdefault(at, x)
        )
        alone.append(seen)
        after.append(left)

    together: dict[Place, torch.Tensor] = {}
    positions, forms = positions_of(before, len(parents), parents, torch.device("cpu"))
    hidden = trunk.embed(weights, torch.tensor(tokens[before:]))
    for index, memory in enumerate(memories):
        hidden, left_by_layer = trunk.layer(
            weights.config,
            weights.layers[index],
            index,
            "trunk",
            hidden,
            memory,
            positions,
            lambda at, x: together.setdefault(at, x),
            forms,
        )
        if index:  # of a GDN layer: the memory after the last node
            for name, tensor in vars(after[-1][index]).items():
                torch.testing.assert_close(getattr(left_by_layer, name), tensor, rtol=1e-12, atol=1e-14)
    assert together, "places were compared"
    for at, rows in together.items():
        torch.testing.assert_close(rows, torch.cat([seen[at] for seen in alone]), rtol=1e-12, atol=1e-14)


def test_paths_and_depths() -> None:
    assert depths(TREES[3]) == [0, 1, 1, 2, 2, 2, 3] and lines(TREES[3])[6] == [0, 2, 4, 6]
