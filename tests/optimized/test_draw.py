"""The op `draw` of every set against the reference's definition, and cases without a definition: padding, gaps, ties.

Leaves out: rounds in which it is called (`test_engine_reference.py`).
"""

from collections.abc import Callable, Sequence

import pytest
import torch

from instep_optimized.ops.check_op_calls import before
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from instep_optimized.sampling_inputs import numbers
from instep_reference.acceptance import chain
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.contract.sampling import LEAST_PART, UNIFORM, Sampling
from instep_reference.sampling import Drawing, drawn

PICK = Place("trunk", AFTER_LAYERS, "pick")
UNITS = round(1 / UNIFORM)
GREEDY = Sampling(0.0)
BATCHES: dict[str, tuple[tuple[Sampling, tuple[int, ...]], ...]] = {  # a request's numbers, and its parents
    "plain and greedy": ((Sampling(1.0), chain(4)), (GREEDY, chain(4)), (Sampling(0.3), chain(4))),
    "a row beside windows": ((Sampling(1.2), chain(1)), (Sampling(1.0), chain(4)), (GREEDY, chain(1))),
    "top-k": ((Sampling(1.0, top_k=3), chain(3)), (Sampling(2.0, top_k=1), chain(3)), (Sampling(0.7), chain(3))),
    "top-p": ((Sampling(1.0, top_p=0.5), chain(3)), (Sampling(3.0, top_p=0.9), chain(3)), (GREEDY, chain(3)),
              (Sampling(1.0, top_p=LEAST_PART), chain(3))),
    "both": ((Sampling(1.5, top_k=9, top_p=0.8), chain(4)), (Sampling(0.9, top_k=70, top_p=0.05), chain(4))),
    "trees": ((Sampling(1.3), (-1, 0, 0, 1, 1)), (Sampling(1.0, top_k=20), (-1, 0, 0, 0, 3)), (GREEDY, chain(5))),
    "all the same": ((Sampling(1.0, top_k=4, top_p=0.99), (-1, 0, 0, 0, 0)),) * 3,
}


def given(name: str, seed: int, vocab: int, tied: bool) -> dict[str, torch.Tensor | Place | None]:
    """Rows of a batch with an idle request and an unowned row; drafts are likely tokens, often the same twice."""
    batch, dice = BATCHES[name], torch.Generator().manual_seed(seed)
    counts = [len(parents) for _, parents in batch]
    width = max(counts)
    logits = torch.randn(sum(counts) + 1, vocab, generator=dice) * 2
    logits = logits.mul(4).round() / 4 if tied else logits
    begin = [sum(counts[:n]) for n in range(len(batch))]
    likely = [logits[at].topk(4).indices[torch.randint(4, (width,), generator=dice)] for at in begin]
    tree = torch.tensor([[*parents, *[-1] * (width - len(parents))] for _, parents in batch] + [[-1] * width])
    units = torch.randint(UNITS, (len(batch) + 1, width + 1), generator=dice)
    return {
        "logits": logits, "window": torch.stack([*likely, torch.full((width,), 7)]),
        "parents": tree if any(parents != chain(len(parents)) for _, parents in batch) else None,
        "begin": torch.tensor([*begin, 0]), "count": torch.tensor([*counts, 0]),
        "sampling": torch.tensor([numbers(sampling) for sampling, _ in batch] + [(0.0, 0.0, 0.0)]),
        "uniforms": units[:, :-1], "final": units[:, -1], "to": PICK,
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", BATCHES)
def test_kernel_draws_on_a_gpu_as_defined(name: str) -> None:
    for vocab in (64, 257, 151_936):
        args = given(name, vocab, vocab, tied=False)
        on_card = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in args.items()}
        said = TRITON.draw(**on_card).tolist()  # type: ignore[arg-type]
        due = right(name, args)
        # One draw in a million lies within the rounding of two sums: of these few rows at most one does.
        assert sum(mine != defined for mine, defined in zip(said, due, strict=False)) <= 1, (name, vocab, said, due)


def right(name: str, args: dict[str, torch.Tensor | Place | None]) -> list[int]:
    """By the reference's definition, request by request, in fp64."""
    said: list[int] = []
    for row, (sampling, parents) in enumerate(BATCHES[name]):
        begin, nodes = len(said), len(parents)
        logits = args["logits"][begin : begin + nodes].double()  # type: ignore[index]
        units = [*args["uniforms"][row, :nodes].tolist(), int(args["final"][row])]  # type: ignore[index]
        window = args["window"][row, :nodes].tolist()  # type: ignore[index]
        drawing = Drawing(sampling, window, parents, [unit * UNIFORM for unit in units])
        said += drawn(logits, drawing) if sampling.draws else logits.argmax(-1).tolist()
    return [*said, 0]


@pytest.mark.parametrize("ops", [PLAIN, TRITON], ids=lambda ops: ops.name)
@pytest.mark.parametrize("name", BATCHES)
def test_a_set_draws_as_the_reference_does(ops: object, name: str) -> None:
    for seed in range(6 if ops is PLAIN else 1):
        for vocab in (100, 5) if name == "all the same" else (100,):
            tied = bool((seed + len(name)) % 2)
            args = given(name, seed, vocab, tied)
            assert not list(before("draw", args))
            assert ops.draw(**args).tolist() == right(name, args), (seed, vocab)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ops", [PLAIN, TRITON], ids=lambda ops: ops.name)
@pytest.mark.parametrize(("logits", "window", "uniform", "final", "sampling", "token"), [
    # All the probability at the one child: the largest uniform still takes it, for there is no rest.
    ([9.0, -90.0, -90.0, -90.0], [0, 0], UNITS - 1, UNITS - 1, Sampling(1.0), 0),
    ([1.0, 1.0, 1.0, 1.0], [0, 2], 0, 0, Sampling(1.0, top_k=2), 0),  # 2 is not kept: never taken, even at 0
    ([1.0, 1.0, 1.0, 1.0], [0, 1], UNITS // 2 - 1, 0, Sampling(1.0, top_k=2), 1),  # just under the half
    ([1.0, 1.0, 1.0, 1.0], [0, 1], UNITS // 2, UNITS - 1, Sampling(1.0, top_k=2), 0),  # at it: of the rest, 0
    ([0.0, -0.0, 0.0, -1.0], [0, 3], 0, UNITS - 1, Sampling(1.0, top_k=2), 1),  # zeros are equal, whatever their sign
    ([-torch.inf, 1.0, -torch.inf, 1.0], [0, 2], 0, 0, Sampling(1.0), 1),  # an impossible draft is never taken
])  # fmt: skip
def test_draw_handles_edge_cases(
    ops: object, logits: Sequence[float], window: list[int], uniform: int, final: int, sampling: Sampling, token: int
) -> None:
    one: Callable[[int], torch.Tensor] = lambda number: torch.tensor([number])  # noqa: E731
    said = ops.draw(  # type: ignore[attr-defined]
        logits=torch.tensor([logits] * 2), window=torch.tensor([window]), parents=None, begin=one(0), count=one(2),
        sampling=torch.tensor([numbers(sampling)]), uniforms=torch.tensor([[uniform, 0]]), final=one(final), to=PICK)
    assert int(said[0]) == token


def test_contracts_name_what_is_wrong_with_a_draw() -> None:
    args = given("plain and greedy", 0, 100, tied=False)
    units, window = args["uniforms"], args["window"]
    for change, says in (
        ({"uniforms": units + UNITS}, "uniforms run from"), ({"window": window + 99}, "drafts run from"),
        ({"sampling": torch.zeros(4, 3).double()}, "not float32"), ({"begin": torch.zeros(4).long()}, "share a row"),
        ({"uniforms": units[:, :2]}, "uniforms is (4, 2), (4, 4) fits"),
    ):
        assert any(says in clause for clause in before("draw", {**args, **change})), says
