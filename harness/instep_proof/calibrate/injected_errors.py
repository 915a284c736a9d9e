"""Op sets that are a little wrong, by a size that is part of the name: `plain` with one result off, as `beta@0.001`.

    gates, beta, k   of one head, times 1 + size        qkv        one column, times 1 + size
    core, attended   of one head, times 1 + size        mlp        every row, times 1 + size
    logits           of one token, plus size times the row's largest

In the first layer of its kind. Leaves out: errors in memory, which are made after an event (`graded_errors.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from instep_optimized import load
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.contract.recurrences import GDN

TOKEN = 7  # whose logit is off
COLUMN = 3


def __getattr__(name: str) -> Ops:
    """beta@0.001 and the like, for `--ops instep_proof.calibrate.injected_errors:beta@0.001`."""
    error, at, size = name.partition("@")
    if not at or error not in ERRORS:
        raise AttributeError(name)
    try:
        return with_error(error, float(size))
    except ValueError:
        raise AttributeError(name) from None


@dataclass(frozen=True)
class InjectedError:
    """op     whose result is off; place: where, in the first layer that has it (kind "linear" serves many places)
    off    (result, size) -> what is handed on instead
    """

    op: str
    place: Place
    off: Callable[[Any, float], Any]


def with_error(name: str, size: float) -> Ops:
    """`plain` with that error."""
    error, plain = ERRORS[name], load("plain")
    op = getattr(plain, error.op)

    def wrong(**given: Any) -> Any:
        result, to = op(**given), given["to"]
        return error.off(result, size) if error.place in (to if isinstance(to[0], Place) else (to,)) else result

    changed: dict[str, Any] = {error.op: wrong}
    return replace(plain, name=f"{name}@{size!r}", **changed)


def _head(x: torch.Tensor, size: float) -> torch.Tensor:
    """x [rows, heads, ...] with the first head times 1 + size."""
    return torch.cat((x[:, :1] * (1 + size), x[:, 1:]), dim=1)


def _of(name: str) -> Callable[[Any, float], Any]:
    return lambda inputs, size: inputs._replace(**{name: _head(getattr(inputs, name), size)})


def _column(x: torch.Tensor, size: float) -> torch.Tensor:
    x = x.clone()
    x[:, COLUMN] *= 1 + size
    return x


def _token(x: torch.Tensor, size: float) -> torch.Tensor:
    x = x.clone()
    x[:, TOKEN] += size * x.abs().amax(-1)
    return x


# A line is a place that can be off. Layer 0 is of GDN, layer 1 of attention (`calibration_traces.py`).
ERRORS: dict[str, InjectedError] = {
    "log_decay": InjectedError("gdn_inputs", Place("trunk", 0, "log_decay"), _of("log_decay")),
    "beta": InjectedError("gdn_inputs", Place("trunk", 0, "beta"), _of("beta")),
    "k": InjectedError("gdn_inputs", Place("trunk", 0, "k"), _of("k")),
    "qkv": InjectedError("linear", Place("trunk", 0, "qkv"), _column),
    "core": InjectedError(GDN.name, Place("trunk", 0, "core"), _head),
    "attended": InjectedError("attend", Place("trunk", 1, "attended"), _head),
    "mlp": InjectedError("mlp", Place("trunk", 0, "mlp"), lambda x, size: x * (1 + size)),
    "logits": InjectedError("lm_head", Place("trunk", AFTER_LAYERS, "logits"), _token),
}
