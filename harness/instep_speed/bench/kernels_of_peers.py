"""Kernels of other packages as arms next to ours: which kernel of which package in which kind.

A maker gets the machine, the cell's axes and the inputs of the kind, and returns an arm. Its answers are checked like
ours. If the package is neither installed nor unpacked on Python's path, or its kernel does not support the cell, the
cell reports that. Leaves out: the contents of the packages.
"""

from importlib import import_module
from typing import Any

from instep_reference.contract.errors import Unsupported

from .answer_check import fallen
from .bench_types import Arm, At, Cell, Ground

PEERS: dict[str, dict[str, str]] = {
    "strategies": {
        "sglang verify + scatter": "instep_speed.bench.peers.sglang:verify_and_scatter",
        "sglang ReplaySSM": "instep_speed.bench.peers.sglang:replay",
        "flashinfer verify + copy": "instep_speed.bench.peers.flashinfer:verify",
        "vllm columns": "instep_speed.bench.peers.vllm:verify",
    },
    "decode": {
        "sglang sigmoid": "instep_speed.bench.peers.sglang:decode",
        "sglang packed decode": "instep_speed.bench.peers.sglang:packed_decode",
        "fla recurrent": "instep_speed.bench.peers.fla:decode",
        "flashinfer decode": "instep_speed.bench.peers.flashinfer:decode",
    },
    "channel_decay decode": {"fla recurrent": "instep_speed.bench.peers.fla:kda_decode"},
    "channel_decay prefill": {"fla chunked": "instep_speed.bench.peers.fla:kda_prefill"},
    "mixer": {
        "sglang conv + packed decode": "instep_speed.bench.peers.sglang:mixer_packed",
        "sglang conv + sigmoid": "instep_speed.bench.peers.sglang:mixer_gated",
    },
    "conv": {"sglang conv update": "instep_speed.bench.peers.sglang:conv"},
    "prefill": {
        "fla chunked": "instep_speed.bench.peers.fla:prefill",
        "sglang chunked": "instep_speed.bench.peers.sglang:prefill",
        "flashinfer prefill": "instep_speed.bench.peers.flashinfer:prefill",
        "flashqla": "instep_speed.bench.peers.flashinfer:flashqla",
    },
    "attend": {
        "torch sdpa": "instep_speed.bench.peers.torch_functions:attend",
        "flashinfer, FA2": "instep_speed.bench.peers.flashinfer:attend_2",
        "flashinfer, FA3": "instep_speed.bench.peers.flashinfer:attend_3",
    },
    "pick": {"torch argmax": "instep_speed.bench.peers.torch_functions:pick"},
    "products": {"torch": "instep_speed.bench.peers.torch_functions:products"},
}


def arms(kind: str, ground: Ground, at: At, cell: Cell, **drawn: Any) -> Cell:
    """Add the peers of its kind to a cell."""
    for name, address in PEERS.get(kind, {}).items() if ground.peers else ():
        module, _, maker = address.partition(":")
        try:
            arm: Arm = getattr(import_module(module), maker)(ground, at, name, **drawn)
        except Unsupported as refused:
            cell.absent[name] = str(refused)
        except ImportError as missing:
            cell.absent[name] = f"its package is not here ({missing.name or missing})"
        except Exception as raised:  # foreign code
            cell.absent[name] = fallen(raised)
        else:
            cell.arms.append(arm)
    return cell
