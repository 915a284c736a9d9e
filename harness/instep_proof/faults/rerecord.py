"""Record the traces of faults again with another model: the same policies and prompts, that model's choices.

So every fault can be planted under a model with experts, or with other layers. Events follow from the policy, so most
faults show at the same event. Leaves out: traces whose policy this model cannot serve (`BadInput` gives the reason).
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from instep.cli.record import make
from instep.setting import Setting
from instep.trace.file import read
from instep.trace.header import Recording
from instep.trace.policy import read_policy
from instep_reference.contract.engine import Admit

from .free_run import POLICY


def retraced(traces: Path, stems: Iterable[str], checkpoint: Path, folder: Path) -> Path:
    """Fill `folder` with these traces of the model in `checkpoint`."""
    for stem in dict.fromkeys(stems):
        old, policy = read(traces / f"{stem}.jsonl"), read_policy(traces / f"{stem}{POLICY}")
        said = {event.request: event.prompt for event in old.events if isinstance(event, Admit)}
        arrivals = tuple(arrival for arrival in policy.arrivals if arrival.request in said)
        prompts = {arrival.prompt: said[arrival.request] for arrival in arrivals}
        told = old.header.recording or Recording()
        how = Setting(dtype=told.dtype, drafter=told.drafter, overlap=told.overlap)
        make(checkpoint, prompts, replace(policy, arrivals=arrivals), folder / f"{stem}.jsonl", how)
        shutil.copy(traces / f"{stem}{POLICY}", folder)
    return folder
