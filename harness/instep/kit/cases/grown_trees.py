"""Cases of the ops that grow a tree: rows of logits with ties, steps of a tree under way, and its windows.

Leaves out: every other op on trees (`trees.py`).
"""

import torch

from instep_optimized.ops.integer_op_protocols import Beams
from instep_optimized.ops.plain import PLAIN

from .case import FP32, Call, Case, Draw, drawn_from


@drawn_from(31)
def topk_tokens_case(
    draw: Draw, rows: int, vocab: int, topk: int, dtype: torch.dtype = FP32, ties: bool = False
) -> Call:
    logits = draw.normal(rows, vocab, scale=3.0).to(dtype)
    return Call({"logits": logits.round() if ties else logits, "topk": topk}, {})


def said(draw: Draw, rows: int, topk: int, ties: bool) -> dict[str, torch.Tensor]:
    """The results of a draft head: falling log-probabilities, many of them equal if `ties`."""
    falls = draw.uniform(rows, topk, low=0, high=3).to(FP32).cpu()
    # Summed on the host: a GPU adds in another order, and these are inputs of a case.
    falls = (falls.round() if ties else falls).cumsum(1).to(draw.device)
    return {"tokens": draw.uniform(rows, topk, low=0, high=99).long(), "log_probs": -falls}


def grown(draw: Draw, requests: int, topk: int, steps: int, num_steps: int, ties: bool) -> Beams | None:
    before: Beams | None = None
    for step in range(1, steps + 1):
        rows = requests * (topk if step > 1 else 1)
        before = PLAIN.select_beams(**said(draw, rows, topk, ties), before=before, step=step, num_steps=num_steps)
    return before


@drawn_from(32)
def select_beams_case(draw: Draw, requests: int, topk: int, step: int, num_steps: int, ties: bool) -> Call:
    before = grown(draw, requests, topk, step - 1, num_steps, ties)
    now = said(draw, requests * (topk if before else 1), topk, ties)
    return Call({**now, "before": before, "step": step, "num_steps": num_steps}, {})


@drawn_from(33)
def build_tree_case(draw: Draw, requests: int, topk: int, steps: int, nodes: int, ties: bool) -> Call:
    tree = grown(draw, requests, topk, steps, steps, ties)
    assert tree is not None
    return Call({"tokens": tree.tokens, "parents": tree.parents, "scores": tree.scores, "nodes": nodes}, {})


GROW = [
    *(Case("topk_tokens", name, topk_tokens_case(*given)) for name, given in {
        "small": (3, 64, 4), "all": (2, 5, 5), "wide": (9, 5000, 3), "one": (1, 40, 1), "none": (0, 8, 2),
    }.items()),
    Case("topk_tokens", "ties", topk_tokens_case(5, 300, 8, ties=True)),
    *(Case("select_beams", f"{step}-of-{steps}-{'ties' if ties else 'apart'}",
           select_beams_case(requests, topk, step, steps, ties), exact=True)
      for requests, topk, step, steps, ties in (
          (3, 4, 1, 1, True), (3, 3, 1, 3, False), (2, 3, 2, 3, True), (4, 2, 4, 4, True), (1, 1, 2, 3, False),
          (0, 2, 2, 3, False), (1, 31, 3, 3, False))),
    *(Case("build_tree", f"{given[3]}-nodes-of-{given[0]}", build_tree_case(*given), exact=True) for given in (
        (3, 3, 3, 8, False), (2, 3, 3, 6, True), (2, 2, 2, 9, True), (1, 1, 4, 5, False), (0, 2, 2, 4, True))),
]  # fmt: skip
