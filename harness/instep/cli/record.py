"""`instep record`: drive the reference through prompts and a policy, and keep what happened as a trace.

Leaves out: the schedule itself (`instep.trace.drive`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..trace.file import Trace
    from ..trace.policy import Policy


def record(
    checkpoint: Annotated[Path, typer.Option(help="A Hugging Face checkpoint directory.")],
    prompts: Annotated[Path, typer.Option(help="JSON list of {name, text | tokens}.")],
    policy: Annotated[Path, typer.Option(help="JSON policy: arrivals, chunks, step counts, acceptance, moments.")],
    out: Annotated[Path, typer.Option(help="The trace to write; its tensors go beside it.")],
    dtype: Annotated[str, typer.Option(help="The width in which the reference decides.")] = "float64",
    num_steps: Annotated[int | None, typer.Option(help="Instead of the policy's initial step count.", min=0)] = None,
    rounds: Annotated[int | None, typer.Option(help="Instead of the policy's most rounds.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the policy's seed.")] = None,
    drafter: Annotated[str | None, typer.Option(help="How drafts are made: eagle or vanilla.")] = None,
) -> None:
    """Record a trace with the reference; both files are written, or none."""
    from msgspec.structs import replace

    from ..rig.strategies import chosen
    from ..trace.file import replaceable
    from ..trace.policy import read_policy, read_prompts

    replaceable(out)
    given = {"num_steps": num_steps, "rounds": rounds, "seed": seed}
    told = replace(read_policy(policy), **{name: value for name, value in given.items() if value is not None})
    trace = make(checkpoint, read_prompts(prompts), told, out, dtype, chosen(drafter=drafter).get("drafter"))
    kinds = [type(event).__name__.lower() for event in trace.events]
    print(f"{out}: {len(kinds)} events, " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))


def make(
    directory: Path, prompts: dict[str, tuple[int, ...]], policy: Policy, out: Path, dtype: str = "float64",
    drafter: str | None = None,
) -> Trace:
    """Drive the reference and write the trace; its plan names the drafter that was named."""
    from msgspec.structs import replace

    from instep_reference.contract.checkpoint import Checkpoint

    from ..report.machine import installed
    from ..rig.sides import DEFAULTS, Plan, candidates, reference
    from ..trace.drive import drive, recorded
    from ..trace.file import write
    from ..trace.header import SCHEMA, Header, Model, sound

    opened = Checkpoint.open(directory)
    header = Header(
        schema=SCHEMA, name=policy.name, claim=policy.claim,
        checkpoint=Model.of(opened, directory, os.path.relpath(directory.resolve(), out.parent.resolve())),
        capacity=policy.capacity, num_steps=policy.num_steps, candidates=(policy.num_steps,), adaptive=policy.adaptive,
        lag=policy.lag, seed=policy.seed, stop=policy.stop,
        replay=tuple(replace(part, drafter=part.drafter or drafter) for part in policy.replay),
        created={name: installed(name) or "from source" for name in ("instep", "torch")} | {"reference": dtype},
    )
    adaptive = header.adaptive_file("policy")
    steps, messages = candidates(policy.num_steps, adaptive)
    header = replace(header, candidates=steps)
    for message in messages:
        print(message)
    sound(header, "policy")
    plan = Plan(
        opened, header.room(), header.num_steps, adaptive, "reference", dtype=dtype, drafter=drafter or DEFAULTS.drafter
    )
    steps_taken = list(drive(policy, prompts, header, reference(plan, plan.width)))
    return write(out, header, [step.event for step in steps_taken], recorded(steps_taken))
