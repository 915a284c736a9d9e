"""Wrong inputs of an op: another row, head, request, tensor or token, or a rounded one.

The op is run again in fp64 on the subject's own inputs with one of them changed. The embedding of another token is
searched in the whole table. Leaves out: ops of one input, whose rows are rows of the result (`wrong_rows.py`), weights
and formulas (`constants.py`), and memory (`wrong_memory.py`).
"""

from collections.abc import Iterator

import torch

from instep_reference.contract.engine import Drafted
from instep_reference.contract.place_names import STAGE_LEVEL, Place
from instep_reference.label_mixing import MASK, mix
from instep_reference.norms import rms_norm

from ...checks.check_interface import counted
from ...checks.error_measurement import HEAD_AXIS
from ...oracle.single_layer_run import LayerWork
from ...watch.memory_changes import pattern
from ...watch.rows_by_request import row_spans, rows
from .finding_case import Case, Explanation, in_16_bits
from .wrong_labels import code, embedded, heads, vocab_of
from .wrong_rows import SHOWN

# Component -> the components that its op reads, if there are several, or if it reads memory, too.
READS: dict[str, tuple[str, ...]] = {
    "mixed": ("qkv",), "state": ("update",), "gated": ("core", "z"),
    "attended": ("query", "key", "value"), "opened": ("attended", "projected"),
    "residual": ("mixer", "mixer_normed"), "hidden": ("residual", "mlp", "mlp_normed"), "skip": ("core", "v"),
    "joined": ("normed", "post_normed"),
}  # fmt: skip
READS_OF_CONVS = {**READS, "qkv": ("in_gate", "x"), "gated": ("out_gate", "mixed")}  # of short convolutions
# Ops of one input, which may have been rounded, or replaced as a whole.
READS_ONE: dict[str, tuple[str, ...]] = {
    "qkv": ("normed",), "z": ("normed",), "b": ("normed",), "a": ("normed",), "q": ("mixed",), "k": ("mixed",),
    "v": ("mixed",), "log_decay": ("a",), "beta": ("b",), "write": ("a",), "mixer": ("gated", "opened", "attended"),
    "projected": ("normed",), "in_gate": ("normed",), "out_gate": ("normed",), "x": ("normed",),
    "key_raw": ("normed",), "value": ("normed",), "query": ("projected",), "key": ("key_raw",),
    "post_normed": ("residual",), "mlp": ("post_normed",), "fused": ("joined",),
    "mixer_normed": ("mixer",), "mlp_normed": ("mlp",),
}  # fmt: skip
FAR = 4  # rows that an input may be shifted by
MOST_TOKENS = 64  # of a piece that is run again so often
SAME_ROW = 1e-5  # relative: rows of two requests that are the same up to the rounding of fp32
# The same of ops that only a search of all other rows tries.
READS_ALSO: dict[str, tuple[str, ...]] = {
    "ple_key": ("ngrams",), "ple_value": ("ngrams",), "ple_written": ("ple_key", "ple_value"),
    "ple_normed": ("ple_written",), "ple_mixed": ("ple_normed",), "ple_made": ("ple_written", "ple_mixed"),
    "ple": ("ple_made",), "residual": ("normed",), "hidden": ("post_normed",), "logits": ("final",),
}  # fmt: skip
STREAM = ("residual", "hidden", "embedding", "normed", "post_normed", "mixer", "mlp", "mixer_normed", "mlp_normed")


def inputs(case: Case) -> Iterator[Explanation]:
    gates = READS if case.own("out_gate") is None else READS_OF_CONVS
    gates = gates if case.own("skip") is None else {**gates, "gated": ("skip", "z")}
    several, alone = (reads.get(case.component, ()) for reads in (gates, READS_ONE))
    for name in (*several, *alone) if case.piece is not None else ():
        own = case.own(name)
        if own is None:
            continue
        changed = (*_moved(case, name, own), *_replaced(name, own)) if name in several else ()
        for says, other in (*changed, *((f"{name} rounded to {said}", narrow) for said, narrow in in_16_bits(own))):
            yield from case.made(f"is computed with {says}{_or_seen_alone(case, name, other)}", {name: other})


def _or_seen_alone(case: Case, name: str, rows: torch.Tensor) -> str:
    """For values that are all one row: without earlier positions, attention that sees that row alone gives the same."""
    fresh = case.component == "attended" and case.piece is not None and not case.piece.span.start
    same = name == "value" and len(rows) > 1 and torch.equal(rows, rows[:1].expand_as(rows))
    return ", or sees that row alone" * (fresh and same)


def _moved(case: Case, name: str, own: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The rows of an input shifted, its heads rotated, and the rows of other requests."""
    rows = len(own)
    for step in [s for by in range(1, min(rows, FAR + 1)) for s in ((by,) if by * 2 == rows else (by, -by))]:
        where = "the row before" if step == 1 else "the row after" if step == -1 else (
            f"the row {abs(step)} {'before' if step > 0 else 'after'}")
        yield f"the {name} of {where}", own.roll(step, 0)
    axis = HEAD_AXIS.get(name, 0)
    heads = own.shape[axis]
    for step in range(1, min(heads, FAR + 1)) if axis else ():
        yield f"the {name} of another head: head h with that of head (h - {step}) mod {heads}", own.roll(step, axis)
    if rows > 1:
        yield f"the {name} of the first row for every row", own[:1].expand_as(own)
        yield f"the {name} of the last row for every row", own[-1:].expand_as(own)
    for whose, theirs in case.others(name):
        at = torch.arange(rows).clamp(max=len(theirs) - 1)
        if theirs.shape[1:] == own.shape[1:] and not _has_rows(own, theirs[at]):
            yield f"the {name} {whose}", theirs[at]


def _has_rows(own: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether the request has these rows, too, as if both began with the same tokens."""
    apart = torch.cdist(others.flatten(1), own.flatten(1), compute_mode="donot_use_mm_for_euclid_dist").amin(1)
    return bool((apart <= SAME_ROW * torch.linalg.vector_norm(others.flatten(1), dim=1)).all())


def _replaced(name: str, own: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"no {name}, but zeros", torch.zeros_like(own)
    yield f"{name} twice as large", 2 * own
    yield f"half of {name}", own / 2
    yield f"{name} of the opposite sign", -own


def other_rows(case: Case) -> Iterator[Explanation]:
    """An input, or the result itself, is another tensor of the same request: of the op, the layer or a layer before."""
    if case.piece is None or case.piece.span.count > MOST_TOKENS:
        return
    work, tables = case.piece.work, (READS, READS_ONE, READS_OF_CONVS, READS_ALSO)
    names = dict.fromkeys(name for table in tables for name in table.get(case.component, ()))
    known = dict(_before(case))
    for name in names:
        own = case.own(name)
        for says, other in known.items() if own is not None else ():
            if says != f"`{name}`" and own is not None and other.shape == own.shape:
                yield from case.made(f"is computed with {says} in the place of `{name}`", {name: other})
    if isinstance(work, LayerWork) and _reads_hidden(case, work):
        mine = work.hidden.to("cpu", torch.float64)
        for says, other in (*known.items(), *_earlier(case)):
            if other.shape == mine.shape and says != INPUT:
                yield from case.made(f"is computed with {says} in the place of {INPUT}", hidden=other)
        for says, narrow in in_16_bits(mine):
            yield from case.made(f"is computed with {INPUT} rounded to {says}", hidden=narrow)
    for says, other in known.items():
        if other.shape == case.right.shape:
            yield Explanation(f"is {says}", other)
    if case.component == "post_normed" and case.finding.place.layer == STAGE_LEVEL and len(case.right) == 1:
        yield from _of_another_final_row(case)


INPUT = "the rows that the layer reads"


def _reads_hidden(case: Case, work: LayerWork) -> bool:
    without = case.again(hidden=torch.full_like(work.hidden, torch.nan))
    return without is not None and not bool(without.isfinite().all())


def _before(case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """The rows that the layer reads, and its results that precede the finding in the data flow."""
    assert case.piece is not None, "asked before"
    place, work = case.finding.place, case.piece.work
    if isinstance(work, LayerWork):
        yield INPUT, work.hidden.to("cpu", torch.float64)
    for other in case.piece.own:
        if other[:2] == place[:2] and other.order() < place.order() and (own := case.own(other.component)) is not None:
            yield f"`{other.component}`", own


def _earlier(case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """The rows of the residual stream in the layer before and in the one before that."""
    assert case.piece is not None, "asked before"
    place = case.finding.place
    for layer in range(max(STAGE_LEVEL, place.layer - 2), place.layer):
        for component in STREAM:
            theirs = rows(case.context.subject, Place(place.stage, layer, component), case.piece.span)
            if theirs is not None:
                at = "" if layer == STAGE_LEVEL else f" of layer {layer}"
                yield f"`{component}`{at}", theirs.to("cpu", torch.float64)


def _of_another_final_row(case: Case) -> Iterator[Explanation]:
    """A draft step that continues from another row than that of its parent."""
    draft = case.weights.draft
    for place in case.context.subject.places if draft is not None else ():
        if place.component == "final" and draft is not None:
            for name, theirs in case.everybody(place):
                whose = "" if name == case.finding.request else f' of request "{name}"'
                for row, each in enumerate(theirs.to("cpu", torch.float64)):
                    made = rms_norm(each[None], draft.norm_hidden, case.weights.config.eps)
                    yield Explanation(f"is the norm of `final` of stage {place.stage}, row {row}{whose}", made)


POISON = -2  # in the place of a token: the poison of memory; -1 is unknown


def tokens(case: Case) -> Iterator[Explanation]:
    if case.component != "embedding" or (case.oracle is None and case.finding.check != "labels"):
        return
    if case.granted is None:
        table, poison = embedded(case, vocab_of(case)), case.context.log.poison
        if poison is not None:
            table[mix(int(pattern(poison, torch.int64)) & MASK, code(case.finding.place))] = POISON
        ours, due = ([table.get(label, -1) for label in heads(x)] for x in (case.found, case.right))
        wrong = [row for row, pair in enumerate(zip(ours, due, strict=True)) if pair[0] != pair[1]]
        if wrong and all(ours[row] != -1 for row in wrong):
            yield Explanation(_sentence(case, wrong, ours, due), case.found)
        return
    rows = case.weights.embedding.to("cpu", torch.float64)
    ours, due = (nearest(x.to("cpu", torch.float64), rows) for x in (case.found, case.right))
    wrong = [row for row, pair in enumerate(zip(ours, due, strict=True)) if pair[0] != pair[1]]
    if wrong:
        yield Explanation(_sentence(case, wrong, ours, due), rows[ours], len(rows) ** len(wrong))


def _sentence(case: Case, wrong: list[int], ours: list[int], due: list[int]) -> str:
    own = _own(case)
    whose = {own: ", the draft head's own pick"}
    named = ["poison (memory that nothing wrote)" if token == POISON else f"token {token}{whose.get(token, '')}"
             for token in ours]  # fmt: skip
    told = [f"row {row} is the embedding of {named[row]}; the trace has {due[row]}" for row in wrong[:SHOWN]]
    more = [f"and {counted(len(wrong) - SHOWN, 'more row')}"] if len(wrong) > SHOWN else []
    return ", ".join(told + more)


def _own(case: Case) -> int | None:
    """The draft head's own pick of the draft that a chain step continues from."""
    stage, _, step = case.finding.place.stage.partition(".")
    answer, spans = case.context.subject.answer, row_spans(case.context, case.finding.place.stage)
    row = next((row for row, span in enumerate(spans) if span.request == case.finding.request), None)
    if stage != "chain" or row is None or not isinstance(answer, Drafted) or answer.own_parents is not None:
        return None
    return int(answer.own[row, int(step) - 1])


def nearest(rows: torch.Tensor, table: torch.Tensor) -> list[int]:
    """The row of a table that is nearest to each of these rows."""
    found: list[int] = torch.cdist(rows, table).argmin(1).tolist()
    return found
