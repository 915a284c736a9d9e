"""A formula with one slip: the functions of the reference that make a place, with one spot of their source changed.

They run again on the subject's own rows. If exactly one changed formula gives what was found, it is the explanation,
with both formulas. This needs no list of mistakes, so it comes after all that have a sentence. Leaves out: the changes
(`source_slips.py`), inputs and memory (`wrong_inputs.py`, `wrong_memory.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from instep_reference import attention, gdn, mla, mlp, norms, per_layer_embedding, short_conv, trunk

from ...oracle import single_layer_run
from .finding_case import Case, Explanation
from .source_slips import of_function, slipped

NORM = (norms.rms_norm, norms.over_rms)
STREAMS = (per_layer_embedding.read_streams, per_layer_embedding.norm_streams, *NORM)
OF_NGRAMS = (per_layer_embedding.embed, per_layer_embedding.dilated_conv, per_layer_embedding.norm_streams, *NORM)
RULE = (gdn.recur, gdn._written, gdn._add, gdn.left_by, gdn.absorb)
# Component -> the functions of the reference between its inputs and its rows.
MAKERS: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("normed", "post_normed", "strength", "post_strength", "final"), STREAMS),
    **dict.fromkeys(("context", "mixer_normed", "mlp_normed"), NORM),
    "ngrams": (per_layer_embedding.entries,),
    **dict.fromkeys(("ple_written", "ple_normed", "ple_mixed", "ple_made", "ple"), OF_NGRAMS),
    **dict.fromkeys(("q", "k"), (norms.l2_norm, gdn._rows)),
    "log_decay": (gdn.forget,), "beta": (gdn._rows,),
    "mixed": (gdn.causal_conv, single_layer_run.conv_tree, gdn._rows),
    **dict.fromkeys(("core", "update", "state"), (*RULE, gdn.erase_and_write, single_layer_run.recur_tree)),
    "gated": (norms.gated_norm, norms.over_rms, short_conv.mix),
    **dict.fromkeys(("query", "key"), (attention.rotate, attention._normed, *NORM)),
    "value": NORM,
    "attended": (attention.attend, attention.attend_both_ways, single_layer_run.read_tree, mla.mix),
    "opened": (attention.mix,),
    **dict.fromkeys(("residual", "hidden"), (trunk.layer, per_layer_embedding.add_to_streams)),
    "mlp": (mlp.dense, mlp.mixture, mlp.route, mlp.route_by_sigmoid, mlp.in_best_groups),
}  # fmt: skip
FITTED_FIRST = ("attended",)  # the scale of scores is fitted to the finding before a slip is tried
MOST_TOKENS = 64  # of a piece that is run again so often


def slips(case: Case) -> Iterator[Explanation]:
    if case.component not in FITTED_FIRST:
        yield from _slips(case)


def slips_of_scores(case: Case) -> Iterator[Explanation]:
    if case.component in FITTED_FIRST:
        yield from _slips(case)


def _slips(case: Case) -> Iterator[Explanation]:
    if case.piece is None or case.piece.span.count > MOST_TOKENS:
        return
    for function in MAKERS.get(case.component, ()):
        for slip in of_function(function):
            with slipped(function, slip):
                try:
                    wrong = case.again()
                except Exception:  # a changed formula may raise anything
                    continue
            if wrong is not None and wrong.shape == case.right.shape:
                yield Explanation(f"is made with `{slip.wrong}`, not with `{slip.right}` (`{function.__name__}` of the "
                                  "reference)", wrong)  # fmt: skip
