"""Compare one op on one case with the reference: results, memory, and every byte that the op must not change.

Rows and memory are held as T2 holds an op from its own inputs: e_x <= 3 e_r + 4 ulp (`tier_allowances.py`). Ops that
move bits or count have one right answer. Leaves out: the cases (`cases/`), and whole models (`replayed_trace.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch

from instep_optimized.ops.check_op_calls import after
from instep_optimized.ops.op_protocols import ALONG_TREES, Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.result_kinds import unlike
from instep_optimized.ops.watch_op_calls import around, memory_of, tensors_of
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import Place, unseen
from instep_reference.contract.recurrences import GDN, RECURRENCES, Recurrence
from instep_reference.weights import Weights

from ..checks.check_interface import verb
from ..checks.error_measurement import Spot, granted_error, measured
from ..checks.ops_on_own_inputs import before_storage
from ..finding_problem import Problem
from ..oracle.chunked_yardstick import CHUNKS
from ..oracle.declared_product_rounding import Operands, in_chunks
from ..oracle.recomputation import DRAWS, FEWEST_DRAWS, ROUNDED_ONCE
from ..oracle.reordered_arithmetic import Reordered
from ..oracle.storage_rounding import before_rounding, narrower
from ..run.subject_errors import failure
from ..setting import wide
from ..subject.declared_rounding import of_width, rounded_once
from ..subject.guarded_calls import SERVES, SubjectFailed, WrongType, calling
from ..tier_allowances import log_prob_error
from ..verdict import Comparison, Skipped, Tier, Verdict
from ..watch.batched_host_copies import alive, settle
from .cases.case import Call, Case, Inputs, moved, packed, serve
from .cases.guarded_pools import Pool
from .expected_results import (
    ATTENDS,
    COMPUTED,
    CONVS,
    RULES,
    Right,
    Rule,
    Written,
    by_token,
    experts,
    in_chunks_of,
    right,
    widened,
)
from .named_mistakes import Launched, Observed, named

Tensor = torch.Tensor
FORM = {**dict.fromkeys(ATTENDS, "attend"), **dict.fromkeys(CONVS, "conv"), "squared_mlp": "mlp"}  # of products
KIND = "launch"  # the kind of event that a case is
# Op -> fields of an op set without which it does not serve some inputs of the op: which ones, and their name.
NEEDS: Mapping[str, Mapping[str, tuple[Callable[[Inputs], bool], str]]] = {
    "gdn_inputs": {
        "bounds_decay": (lambda given: "decay_bound" in given, "a safe gate"),
        "bounds_beta": (lambda given: "beta_bound" in given, "a beta of more than 1"),
        **{row.name: (lambda given: given["a"].dim() == 3, "a decay per channel") for row in RECURRENCES.values()
           if row.decay == "channel"},
    },
    "output_gate": {"latent_inputs": (lambda given: given["projected"].dim() == 3, "a gate per head")},
    "moe": {"squared_mlp": (lambda given: not given["weights"].gated, "experts without gates"),
            "clamps": (lambda given: given["weights"].limit is not None, "a clamped SwiGLU"),
            "sigmoid": (lambda given: given["weights"].router_bias is not None, "a sigmoid router")},
}
WAVERS = (*ATTENDS, "moe")  # ops whose result may depend on the error of one score (`tier_allowances.py`)


def judged(
    ops: Ops, cases: Sequence[Case], device: str = "cpu", progress: Callable[[int], None] = lambda number: None,
) -> Verdict:
    """Serve every case and compare. Event i of the verdict is case i. Unserved cases are skipped with a reason."""
    verdict, wrong = Verdict(), list[Launched]()
    for number, case in enumerate(cases):
        progress(number)
        if lacks := lacking(ops, case):
            verdict.skipped.append(Skipped("op", number, lacks, str(case)))
            continue
        seen = served_as(ops, case)
        try:
            one = CaseRun(ops, seen, number, device)
            if verdict.add(one):
                wrong.append(one.launched())
        except Unsupported as error:
            verdict.skipped.append(Skipped("op", number, str(error), str(case)))
        except SubjectFailed as failed:
            if isinstance(failed.error, Unsupported):
                verdict.skipped.append(Skipped("op", number, str(failed.error), str(case)))
            else:
                verdict.add([failure(number, KIND, failed, _at(seen.build("cpu").inputs, "result"))])
                if not alive(device):
                    why = f"{device} takes no launch any more, after {case}"
                    verdict.skipped += [Skipped("op", at, why, str(cases[at])) for at in range(number + 1, len(cases))]
                    break
    verdict.events, verdict.compared = len(cases), named(verdict.compared, wrong)
    return verdict


def lacking(ops: Ops, case: Case) -> str:
    """Why the op set does not serve this case; empty if it does."""
    if not ops.trees and case.op in ALONG_TREES and is_tree(case.build("cpu")):
        return "windows that are trees (`Ops.trees`)"
    if case.op in NEEDS:
        given = case.build("cpu").inputs
        for needed, (wants, what) in NEEDS[case.op].items():
            if wants(given) and not getattr(ops, needed):
                return f"{what} (`Ops.{needed}`)"
    return "" if getattr(ops, case.op, None) else f"{ops.name} has no op {case.op}"


def served_as(ops: Ops, case: Case) -> Case:
    """The case as this op set serves it: a kernel that norms and gates inside gets raw rows."""
    return behind_conv(case) if case.op == GDN.name and ops.fused_gdn is not None else case


class CaseRun:
    """One case, served once; its comparisons, for the products that `ops` declares at that time."""

    def __init__(self, ops: Ops, case: Case, number: int, device: str) -> None:
        self.ops, self.case, self.number, self.clauses, self.device = ops, case, number, list[str](), device
        self.observed = list[Observed]()
        # Made on the CPU and moved: a GPU rounds sums and logarithms differently, and the truth needs the same inputs.
        built = case.build("cpu")
        call = moved(packed(built) if ops.packed and case.op in ALONG_TREES else built, device)
        self.memory = {memory_of(pool.raw) for pool in call.pools.values()}
        self.found = serve(around(ops, unseen, self._watched), replace(case, build=lambda device: call), device)
        self.given = case.build("cpu")
        self.plain = serve(PLAIN, replace(case, op=GDN.name, build=_unfused(case.build)) if case.op == "fused_gdn" else
                           case, "cpu")

    def _watched(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(**given: Any) -> Any:
            inputs = [(field, x, x.clone()) for field, value in given.items() for x in tensors_of(value)
                      if memory_of(x) not in self.memory]
            with calling(SERVES):
                result = op(**given)
                if says := unlike(name, result):
                    raise WrongType(says)
                settle(self.device)
            self.clauses += after(name, given, result)
            self.clauses += [f"a result lies on {x.device}" for x in tensors_of(result) if not self._is_there(x)]
            changed = dict.fromkeys(field for field, x, before in inputs if not torch.equal(_bytes(before), _bytes(x)))
            self.clauses += [f"the launch changed its input {field}" for field in changed]
            return result

        return call

    def launched(self) -> Launched:
        """The comparisons with their tensors, for `named`."""
        row = RULES.get(self.case.op)
        return Launched(self.observed, None if row is None else self.given.inputs, row is None or row.update == "delta")

    def __iter__(self) -> Iterator[Comparison]:
        case = self.case
        self.observed = []
        said = "; ".join(self.clauses)
        yield self._told("contract", Tier.IDENTITY, _at(self.given.inputs, "result"), len(self.found.results) + 1,
                         len(self.clauses), said)
        for name, pool in self.found.pools.items():
            yield self._strays(name, pool)
        results = {name: x.cpu() for name, x in self.found.results.items() if self._is_there(x)}
        if case.op not in COMPUTED:
            yield from self._moved(results)
            return
        wide_of = wide(torch.float64 if _is_double(self.given) else torch.float32)
        truth = right(case.op, widened(self.given.inputs, torch.float64), self.given)
        draws = list(self._draws(wide_of))
        for name, due in self.plain.results.items():
            found = results.get(name)
            if found is None or found.shape != due.shape or found.dtype != due.dtype:
                yield self._told("contract", Tier.IDENTITY, _at(self.given.inputs, name), 1, 1, _unlike(found, due))
            else:
                yield from self._rows(name, found, truth, draws)
        for index, written in enumerate(truth.written):
            if written.block.numel():  # a conv of width 1 keeps nothing
                yield self._memory(written, [draw.written[index] for draw in draws], truth)

    @property
    def activation(self) -> torch.dtype:
        """The dtype of the activations."""
        given = self.given.inputs
        floating = (x.dtype for value in given.values() for x in tensors_of(value) if x.is_floating_point())
        return cast(torch.dtype, given.get("dtype") or next(floating, torch.float32))

    def _is_there(self, x: Tensor) -> bool:
        return x.device.type == torch.device(self.device).type

    def _draws(self, width: torch.dtype) -> Iterator[Right]:
        """Yardsticks: sums in another order each, products as declared, prefill in either form where none is."""
        op, inputs = self.case.op, widened(self.given.inputs, width)
        products = of_width(self.ops.products, self.activation)
        mixture = [SimpleNamespace(mlp=experts(inputs["weights"]))] if op == "moe" else []
        config = SimpleNamespace(recurrence=RULES.get(op, GDN))
        operands = Operands(products, cast(Weights, SimpleNamespace(config=config, draft=None, layers=mixture)))
        mode = Reordered(torch.Generator().manual_seed(self.number), operands)
        form, chunk = operands.forms if op in RULES else (FORM.get(op, op), "")
        chunked: list[Rule] = [partial(_in_blocks, operands) if chunk in products else by_token]
        draws = chunked * (DRAWS if op in WAVERS else FEWEST_DRAWS)
        if chunk and chunk not in products and _prefills(self.given):
            draws += [partial(in_chunks_of, size) for size in CHUNKS]
        for number, rule in enumerate(draws):
            operands.begin_draw(number)
            operands.form = form
            with nullcontext() if isinstance(rule, partial) and rule.func is in_chunks_of else mode:
                yield right(op, inputs, self.given, rule)

    def _rows(self, name: str, found: Tensor, truth: Right, draws: Sequence[Right]) -> Iterator[Comparison]:
        """Compare the rows of every request. Rows that no request covers must be zeros."""
        if truth.spans is not None:
            idle = torch.ones(len(found), dtype=torch.bool)
            for span in truth.spans.values():
                idle[span.start : span.stop] = False
            if idle.any():
                wrong = int((found[idle] != 0).sum())
                yield self._told("idle", Tier.BITWISE, _at(self.given.inputs, name), found[idle].numel(), wrong,
                                 f"{wrong} numbers of rows that no request covers are not zero")
        spans = {None: range(len(found))} if truth.spans is None else truth.spans
        for request, span in spans.items():
            mine = slice(span.start, span.stop)
            o, sampled = truth.results[name][mine], torch.stack([draw.results[name][mine] for draw in draws])
            if not o.numel():
                continue
            x, stored, place = found[mine], found.dtype, _at(self.given.inputs, name)
            promised = rounded_once(self.ops.once)
            reads_wide = place.component != "core" or not self._narrow_state()
            once = place.component in ROUNDED_ONCE | promised and narrower(stored, sampled.dtype) and reads_wide
            if once:
                stored = sampled.dtype
            else:
                sampled = sampled.to(stored).to(sampled.dtype)
            result = measured(
                self._spot(place, request), before_rounding(x, o) if once else x, o, sampled, stored=stored)
            if once and place.component in promised:
                result = before_storage(result, x.dtype, promised=True)
            self.observed.append(Observed(
                result, x, o, granted_error(place, stored, o, sampled), sampled, once=once,
                wrongs=lambda o=o: [("each row is that of the row before it", o.roll(1, 0))]))  # type: ignore[misc]
            yield result

    def _memory(self, due: Written, draws: Sequence[Written], truth: Right) -> Comparison:
        pool = self.found.pools[due.pool]
        found, place = pool.view[due.at].cpu(), _at(self.given.inputs, due.component)
        sampled = torch.stack([draw.block for draw in draws])
        sampled = sampled.to(found.dtype).to(sampled.dtype)
        result = measured(self._spot(place, due.request, due.at[0]), found, due.block, sampled, stored=found.dtype)
        self.observed.append(Observed(
            result, found, due.block, granted_error(place, found.dtype, due.block, sampled), sampled, row=due.row,
            wrongs=lambda: _other_memory(due, truth)))  # fmt: skip
        return result

    def _strays(self, name: str, pool: Pool) -> Comparison:
        was, now = _bytes(self.found.before[name]), _bytes(pool.raw)
        wrong = ((was != now).any(dim=1) & ~pool.writable.cpu()).nonzero()[:, 0]
        says = f"{len(wrong)} elements of {name} changed that this launch may not write, the first in "
        says += _where(pool, int(wrong[0])) if len(wrong) else ""
        component = {"memory": "state", "snapshots": "state"}.get(name, name)
        place = _at(self.given.inputs, component if component in ("state", "keys", "values") else "result")
        return self._told("strays", Tier.BITWISE, place, len(now), len(wrong), says)

    def _moved(self, results: dict[str, Tensor]) -> Iterator[Comparison]:
        """Ops that move bits or count: the same bits as `plain`'s."""
        found = {**results, **{name: pool.raw[pool.writable].cpu() for name, pool in self.found.pools.items()}}
        pools = {name: pool.raw[pool.writable] for name, pool in self.plain.pools.items()}
        for name, due in {**self.plain.results, **pools}.items():
            x = found.get(name)
            if name == "log_probs" and self.case.op == "topk_tokens" and x is not None and x.shape == due.shape:
                yield self._log_probs(x)
                continue
            alike = x is not None and x.shape == due.shape and x.dtype == due.dtype
            wrong = int((_bytes(x) != _bytes(due)).any(-1).sum()) if alike and x is not None and due.numel() else 0
            says = f"not those of plain: {wrong} of {due.numel()}" if alike else _unlike(x, due)
            yield self._told("bits", Tier.BITWISE, _at(self.given.inputs, "result"), max(due.numel(), 1),
                             wrong if alike else 1, f"{name}: {says}")

    def _log_probs(self, found: Tensor) -> Comparison:
        """Compare the only computed result of these ops: log-probabilities of the chosen tokens, from given logits."""
        logits = self.given.inputs["logits"].double()
        truth = logits.log_softmax(-1).gather(-1, self.plain.results["tokens"])
        largest = float(logits.abs().max()) if logits.numel() else 0.0
        allowed = log_prob_error(largest, logits.shape[-1], torch.finfo(torch.float32).eps)
        worst = float((found.double() - truth).abs().max()) if truth.numel() else 0.0
        return Comparison(
            "op", Tier.DERIVED, self.number, KIND, _at(self.given.inputs, "result"), elements=max(truth.numel(), 1),
            worst=worst, allowed=allowed,
            problem=None if worst <= allowed else Problem("differs", f"log_probs are off by {worst:.2e}"))

    def _narrow_state(self) -> bool:
        return any(narrower(pool.raw.dtype, torch.float32) for pool in self.found.pools.values())

    def _spot(self, place: Place, request: int | None, unit: int | None = None) -> Spot:
        named = cast(str, None if request is None else str(request))
        return Spot("op", Tier.DERIVED, self.number, KIND, place, named, unit)

    def _told(self, check: str, tier: Tier, place: Place, elements: int, wrong: int, says: str) -> Comparison:
        return Comparison(check, tier, self.number, KIND, place, elements=elements, worst=float(wrong), allowed=0.0,
                          problem=Problem.of(says) if wrong else None)


def behind_conv(case: Case) -> Case:
    """A case of `gdn` for a kernel that computes norms and gates itself: raw rows, with q and k of several lengths."""

    def build(device: str) -> Call:
        call = case.build(device)
        q, k, v, log_decay, beta = call.inputs["inputs"]
        length = 2.0 ** (torch.arange(q[..., 0].numel(), device=q.device) % 3).view(*q.shape[:2], 1)
        raw = torch.cat([(length * q * k.shape[2] ** 0.5).flatten(1), (length * k).flatten(1), v.flatten(1)], dim=1)
        zeros = torch.zeros(v.shape[1], device=v.device)
        rest = {name: value for name, value in call.inputs.items() if name != "inputs"}
        return Call({
            "mixed": raw, "a": torch.log(torch.expm1(-log_decay)), "b": torch.logit(beta), "A_log": zeros,
            "dt_bias": zeros.clone(), "key_heads": k.shape[1], "key_dim": k.shape[2], **rest}, call.pools)

    return replace(case, op="fused_gdn", build=build)


def _unfused(build: Callable[[str], Call]) -> Callable[[str], Call]:
    """The call of `gdn` that a call of `fused_gdn` contains."""

    def built(device: str) -> Call:
        inputs, pools = build(device)
        given = {**inputs, "to": (inputs["to"],) * 5}
        names = ("mixed", "a", "b", "A_log", "dt_bias", "key_heads", "key_dim", "to")
        return Call({"inputs": PLAIN.gdn_inputs(**{name: given[name] for name in names}), "parts": inputs["parts"],
                     "dtype": inputs["dtype"], "to": inputs["to"]}, pools)

    return built


def _in_blocks(
    operands: Operands, row: Recurrence, rows: Sequence[Tensor], state: Tensor
) -> tuple[Tensor, Tensor]:
    """Prefill in the declared block form. row: that of the operands' configuration."""
    operands.form = operands.forms[1]
    try:
        return in_chunks(operands, rows, state)
    finally:
        operands.form = operands.forms[0]


def _prefills(call: Call) -> bool:
    return any(part.form == "chunk" for part in call.inputs["parts"])


def is_tree(call: Call) -> bool:
    pages = call.inputs.get("pages")
    return any(part.parents is not None for part in call.inputs.get("parts", ())) or (
        pages is not None and pages.ancestors is not None)


def _is_double(call: Call) -> bool:
    return any(x.dtype == torch.float64 for value in call.inputs.values() for x in tensors_of(value))


def _bytes(x: Tensor) -> Tensor:
    """[numbers, bytes of each]."""
    flat = x.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).view(x.numel(), x.element_size())


def _at(given: Inputs, name: str) -> Place:
    """The place of a result: its own name, or the component that the call names."""
    to = given.get("to")
    component = to.component if name == "result" and isinstance(to, Place) else "hidden" if name == "result" else name
    return Place("trunk", 0, component)


def _other_memory(due: Written, truth: Right) -> Iterator[tuple[str, Tensor]]:
    """Wrong contents of a unit: its contents before, the memory of another request or row, or its transpose."""
    yield "holds what was there before the launch", due.before
    for other in truth.written:
        if other.pool == due.pool and other.block.shape == due.block.shape:
            says = f"of request {other.request}" if other.request != due.request else (
                f"after {_tokens(other.row + 1)}; {due.row + 1} {verb(due.row + 1, 'was', 'were')} due")
            yield f"holds the memory {says}", other.block
    yield "holds it with its last two axes exchanged", due.block.mT.reshape(due.block.shape)


def _where(pool: Pool, element: int) -> str:
    """unit 3, or the red zone after unit 3."""
    units = pool.numbers.flatten(1).cpu()
    inside = (units == element).any(1).nonzero()
    if len(inside):
        return f"unit {int(inside[0])}"
    below = (units.amin(1) <= element).nonzero()
    return f"the red zone after unit {int(below[-1])}" if len(below) else "the red zone before unit 0"


def _unlike(found: Tensor | None, due: Tensor) -> str:
    has = "nothing" if found is None else f"{tuple(found.shape)} of {found.dtype}"
    return f"has {has}; {tuple(due.shape)} of {due.dtype} is due"


def _tokens(count: int) -> str:
    return f"{count} row{'s' * (count != 1)}"
