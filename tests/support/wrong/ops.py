"""Op sets that are wrong in one op, found by the harness as `support.wrong.ops:NAME`.

Leaves out: whole engines that are wrong (`subjects.py`).
"""

from dataclasses import replace
from typing import Any

import torch

from instep_optimized import load
from instep_optimized.ops.plain.rerun_ring import keeps_updates, put_updates
from instep_reference.contract.place_names import Place

PLAIN, LEDGER, TRITON = load("plain"), load("ledger"), load("triton")


def _stay(**given: Any) -> None:
    """A commit under `snapshot` that leaves the state where it was."""


def _swapped(**given: Any) -> Any:
    """Keys and values change places among the rows that are stored together; whole numbers do not."""
    rows = given["rows"]
    return PLAIN.store_rows(**{**given, "rows": rows.roll(1, 0) if rows.is_floating_point() else rows})


def _in_four_parts(*, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], to: Place) -> torch.Tensor:
    """A product split over four programs whose parts meet in the activation dtype, as vendors' libraries may do."""
    whole = torch.zeros(x.shape[0], weight.shape[0], dtype=x.dtype)
    for rows, columns in zip(x.flatten(1).chunk(4, dim=1), weight.chunk(4, dim=1), strict=True):
        whole = (whole.float() + (rows.float() @ columns.float().T).to(x.dtype).float()).to(x.dtype)
    return whole.view(x.shape[0], *shape)


def _one_on(**given: Any) -> Any:
    """Positions and locations are those of the next place."""
    return PLAIN.place_rows(**{**given, "shift": given["shift"] + 1})


def _louder(name: str) -> Any:
    return lambda **given: 1.01 * getattr(PLAIN, name)(**given)


def _louder_beside(**given: Any) -> torch.Tensor:
    """Louder by 1% if a decode takes the rows of a window in the same launch."""
    used = sum(int(part.count.sum()) for part in given["parts"])
    beside = len(given["parts"]) == 2 and used < len(given["inputs"].v)
    return (1.01 if beside else 1.0) * PLAIN.gdn(**given)


def _labels_swapped(**given: Any) -> None:
    rows = given["rows"]
    LEDGER.store_rows(**{**given, "rows": rows.roll(1, 0) if rows.dim() > 1 else rows})


def _doubled(**given: Any) -> torch.Tensor:
    return PLAIN.gated_norm(**given).double()


def _short(**given: Any) -> torch.Tensor:
    return PLAIN.gated_norm(**given)[:0].clone()


def _waiting(**given: Any) -> torch.Tensor:
    """A launcher that looks at what it launches on."""
    core = given["core"]
    return PLAIN.gated_norm(**given) if core.shape[0] == 0 or float(core[0, 0, 0]) == float(core[0, 0, 0]) else core


def _poisoned(**given: Any) -> torch.Tensor:
    """Return a row that was never written."""
    gated = PLAIN.gated_norm(**given)
    gated[1:2] = torch.nan
    return gated


def _one_column_more(**given: Any) -> torch.Tensor:
    """A delta rule that also writes the column after its columns, if there is one."""
    core = PLAIN.gdn(**given)
    for part in given["parts"]:
        if part.per_row is not None and part.per_row.pool.shape[1] == 2:
            pool = part.per_row.pool
            units, column, *inner = pool.stride()
            beside = pool.as_strided(pool[:, 0].shape, (units, *inner), pool.storage_offset() + 2 * column)
            beside[part.per_row.units] = 1.0
    return core


def _updates_louder(**given: Any) -> torch.Tensor:
    """In layer 0, what the ring keeps of the last window is a hundredth too large; what is handed on is right."""
    core, rows = PLAIN.gdn(**given), len(given["inputs"].q)
    if given["to"].layer == 0 and rows and keeps_updates(given["parts"]):
        kept = PLAIN.kept_updates(parts=given["parts"], rows=rows, to=given["to"])
        put_updates(given["parts"], 1.01 * kept)
    return core


def _narrow_beta_of_windows(**given: Any) -> torch.Tensor:
    """In layer 0 beta goes through bf16 where a window is verified; what is shown of it is right."""
    inputs, verified = given["inputs"], [part.form == "window" and part.store is None for part in given["parts"]]
    if given["to"].layer == 0 and all(verified):
        given["inputs"] = inputs._replace(beta=inputs.beta.bfloat16().to(inputs.beta))
    return TRITON.gdn(**given)


def _far_off(**given: Any) -> Any:
    """Write rows of the KV a gigabyte after the pages."""
    placed = TRITON.place_rows(**given)
    return placed._replace(locations=placed.locations + 2**26)


FAR_OFF = replace(TRITON, name="far off", place_rows=_far_off)
NARROW_BETA_OF_WINDOWS = replace(TRITON, name="narrow beta", gdn=_narrow_beta_of_windows)
UPDATES_LOUDER = replace(PLAIN, name="updates louder", gdn=_updates_louder)
UNMOVED = replace(PLAIN, name="unmoved", move=_stay)
SWAPPED = replace(PLAIN, name="swapped", store_rows=_swapped)
IN_FOUR_PARTS = replace(PLAIN, name="in four parts", linear=_in_four_parts)
ONE_ON = replace(PLAIN, name="one on", place_rows=_one_on)
LOUDER_TWICE = replace(PLAIN, name="louder twice", gated_norm=_louder("gated_norm"), output_gate=_louder("output_gate"))
LOUDER_BESIDE = replace(PLAIN, name="louder beside", gdn=_louder_beside)
LABELS_SWAPPED = replace(LEDGER, name="labels swapped", store_rows=_labels_swapped)
DOUBLED = replace(PLAIN, name="doubled", gated_norm=_doubled)
SHORT = replace(PLAIN, name="short", gated_norm=_short)
WAITING = replace(PLAIN, name="waiting", gated_norm=_waiting, captures=True)
CLAIMS = replace(PLAIN, name="claims", captures=True)
CORRECT = replace(PLAIN, name="correct", gated_norm=_waiting)
POISONED = replace(PLAIN, name="poisoned", gated_norm=_poisoned)
LATE_AND_LOUD = replace(UNMOVED, name="late and loud", gated_norm=_louder("gated_norm"))
ONE_COLUMN_MORE = replace(PLAIN, name="one column more", gdn=_one_column_more)
