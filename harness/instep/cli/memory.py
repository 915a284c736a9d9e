"""`instep memory`: the memory of a request under every commit strategy, and how many requests fit.

Leaves out: the figures (`instep.subject.memory_per_request`), and memory that is not per request, except the weights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from instep_reference.contract.errors import BadInput

from ..options import DRAFTER
from ..report.document import Document, Kind, Listing
from ..verdict import Exit
from .finish_with_result import Files, writes
from .subject_options import Given, takes_setting

if TYPE_CHECKING:
    from ..subject.memory_per_request import Need


@writes("json")
@takes_setting(
    without=("device", "state_rounding", "graphs", "prompt_graphs", "overlap"),
    ops="Op set or module:attribute, for its dtypes and the strategies that it brings.",
    strategy="How states are committed; left out: every strategy.", conv="The same for conv windows.",
    dtype="Activations, KV and conv windows, bfloat16 if left out.",
    state_dtype="How states are stored, fp32 if left out (with float64 fp64); float8_e4m3fn: with scales.",
    drafter=f"{DRAFTER[:-1]}; left out: what fits the model.",
)
def memory(
    given: Given,
    files: Files,
    where: Annotated[str, typer.Argument(help="A checkpoint directory, a config.json, or a shape like qwen3.5-9b.")],
    num_steps: Annotated[int | None, typer.Option(help="Drafts a round; the window is one wider.", min=0)] = None,
    candidates: Annotated[str | None, typer.Option(help="Candidate step counts, as in 1,3,7, of which the largest "
                                                       "matters. Default, without --num-steps: 3.")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="For tree windows: maximum nodes of a window, with its "
                                                            "root. Default: chains.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a request, prompt and text.", min=1, max=2**62)] = 4096,
    tracked: Annotated[int, typer.Option(help="Tracked prefixes on the device, of --tokens tokens each.", min=0)] = 0,
    gib: Annotated[float, typer.Option(help="Memory for pools, in GiB, weights not counted.", min=0.0)] = 64.0,
) -> None:
    """Print the bytes of a request by pool, for every strategy and form of conv windows."""
    from instep_optimized.options import check

    from ..adapters.strategy_by_name import OPTIONS
    from ..campaign.shapes import sized_like
    from ..report.result import Result
    from ..subject.memory_per_request import needs, spelled, weights_bytes

    if not math.isfinite(gib):
        raise BadInput("--gib", found=gib, expected="a finite number")
    files.must_be_free()
    config, widest = sized_like(where), _widest(num_steps, candidates)
    setting = given.setting(dtype="bfloat16", drafter="eagle" if config.mtp_layers < 2 else "vanilla")
    options, ops = setting.options(), setting.op_set()
    check(options, config, widest - 1, ops, num_draft_tokens, interval=1 if tracked else None)
    typed = [(getattr(setting, option),) if option in given.named else () for option in OPTIONS]
    strategies, forms = typed
    found = list(needs(config, options, widest, tokens, ops, strategies, forms, num_draft_tokens, tracked))
    room = int(gib * 2**30)
    widest = max(widest, num_draft_tokens or 0)
    title = f"{where}: windows of {widest}, {setting.dtype}, requests of {tokens} tokens"
    weights = spelled(weights_bytes(config, setting.activation))
    taken = {f"{tracked} tracked prefixes": tracked * max((one.prefix for one in found), default=0),
             "attention in parts": max((one.scratch(one.fit(room)) for one in found), default=0)}  # fmt: skip
    among = " and ".join(f"{spelled(size)} of {what}" for what, size in taken.items() if size)
    data = {
        "where": where, "widest": widest, "dtype": setting.dtype, "tokens": tokens, "gib": gib,
        "strategies": [_as_data(one, room) for one in found],
    }
    more = f", {among} among them" * bool(among)
    said = f"weights {weights} beside; fit: requests in {gib:g} GiB of pools{more}"
    told = Document(title, Exit.AGREED, [said], tables=[_table(found, title, room)])
    files.finish(Result(Exit.AGREED, "cpu", data), told)


def _widest(num_steps: int | None, candidates: str | None) -> int:
    if candidates is None:
        return (3 if num_steps is None else num_steps) + 1
    if num_steps is not None:
        raise BadInput("--candidates", found="--num-steps too", expected="one of them")
    parts = candidates.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise BadInput("--candidates", found=candidates, expected="step counts of at least 0, as 1,3,7")
    return max(map(int, parts)) + 1


def _table(needs: list[Need], title: str, room: int) -> Listing:
    """One unit for all sizes, so that they can be compared; a token's is smaller."""
    from instep_optimized.memory.tiled_units import SCALES

    size, unit = (2**20, "MiB") if max(one.fixed for one in needs) >= 2**20 else (2**10, "KiB")
    names = ("state", "window", "beside", "slot table", "a token", "request", "fit")
    heads: dict[str, Kind] = {"states": "word", "conv": "word", **dict.fromkeys(names, "number")}
    rows = list[tuple[str, ...]]()
    for one in needs:
        state = one.pools.get("state", 0) + one.pools.get("state" + SCALES, 0)
        sizes = (state, one.pools.get("conv", 0), one.beside, one.slot_table)
        rows.append((
            one.strategy, one.conv, *(f"{part / size:.2f}" for part in sizes), f"{one.per_token / 2**10:.1f}",
            f"{one.total / size:.1f}", str(one.fit(room)),
        ))  # fmt: skip
    return Listing(heads, rows, f"{title}; {unit}, of a token KiB")


def _as_data(need: Need, room: int) -> dict[str, Any]:
    return {
        "strategy": need.strategy, "conv": need.conv, "pools": dict(need.pools), "slot_table": need.slot_table,
        "fixed": need.fixed, "per_token": need.per_token, "total": need.total, "fit": need.fit(room),
        "prefix": need.prefix, "tracked": need.tracked, "scratch": need.scratch(need.fit(room)),
    }
