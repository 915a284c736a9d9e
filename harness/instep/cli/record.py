"""`instep record`: drive the reference through prompts and a policy, and write the events as a trace.

Leaves out: the schedule (`instep.trace.event_scheduler`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from instep_reference.contract.errors import BadInput

from ..options import PROPOSED, WIDTHS, either, known
from . import controller_options
from .subject_options import Given, takes_setting

if TYPE_CHECKING:
    from ..setting import Setting
    from ..trace.file import Trace
    from ..trace.policy import Policy


def _example(asked: bool) -> None:
    if asked:
        from ..trace.policy import example

        print(example())
        raise typer.Exit


@takes_setting(
    without=("ops", "device", "dtype", "state_dtype", "state_rounding", "kv_dtype", "kept_dtype", "chunk_dtype",
             "ring_dtype", "layout", "snapshot_layout", "strategy", "conv", "graphs", "prompt_graphs", "guarded"),
    drafter=PROPOSED,
    overlap="Rounds overlap: a request ends, and a step count changes, one round late.",
)
def record(
    given: Given,
    checkpoint: Annotated[Path, typer.Option("--model", "--checkpoint", help="A Hugging Face checkpoint directory.")],
    prompts: Annotated[Path, typer.Option(help="JSON list of {name, text | tokens}.")],
    out: Annotated[Path, typer.Option(help="The trace to write; its tensors go to a file next to it.")],
    policy: Annotated[Path | None, typer.Option(help="JSON policy: arrivals, chunks, step counts, acceptance, moments. "
                                                     "Default: a request per prompt with a mix of events.")] = None,
    example_policy: Annotated[bool, typer.Option("--example-policy", callback=_example, is_eager=True,
                                                 help="Print a policy for two prompts as a template.")] = False,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help=f"The dtype in which the reference decides: "
                                                              f"{either(WIDTHS)}.")] = "float64",
    num_steps: Annotated[int | None, typer.Option(help="Instead of the policy's initial step count.", min=0)] = None,
    rounds: Annotated[int | None, typer.Option(help="Instead of the policy's maximum number of rounds.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the policy's seed.")] = None,
    adaptive: controller_options.Adaptive = None, dialect: controller_options.DialectOption = None,
    captured: controller_options.Captured = None,
) -> None:
    """Record a trace with the reference; both files are written, or none."""
    known("dtype", dtype)
    from msgspec.structs import replace

    from ..trace.file import replaceable
    from ..trace.policy import read_policy, read_prompts

    replaceable(out)
    instead = {"num_steps": num_steps, "rounds": rounds, "seed": seed}
    texts, setting = read_prompts(prompts), given.setting(dtype=dtype)
    chosen = _usual(texts, checkpoint, setting, rounds) if policy is None else read_policy(policy)
    advance = replace(chosen, **{name: value for name, value in instead.items() if value is not None})
    if (steps := controller_options.chosen(num_steps, adaptive, dialect, captured)) is not None:
        advance = replace(advance, num_steps=steps.num_steps, adaptive=steps.adaptive, controller=steps.controller,
                          steps=(), follow=True)  # fmt: skip
    trace = make(checkpoint, texts, advance, out, setting)
    kinds = [str(event.__struct_config__.tag) for event in trace.events]
    print(f"{out}: {len(kinds)} events, " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))


def _usual(prompts: dict[str, tuple[int, ...]], checkpoint: Path, setting: Setting, rounds: int | None) -> Policy:
    from instep_reference.contract.checkpoint import Checkpoint

    from ..trace.policy import usual

    if not prompts:
        raise BadInput("--prompts", found="no prompt", expected="at least one")
    return usual(prompts, drafts=setting.drafter is not None or Checkpoint.open(checkpoint).config.mtp_layers > 0,
                 rounds=rounds)  # fmt: skip


def make(
    directory: Path, prompts: dict[str, tuple[int, ...]], policy: Policy, out: Path, setting: Setting | None = None,
) -> Trace:
    """Drive the reference and write the trace; the setting's drafter, dtype and `overlap` are used."""
    from msgspec.structs import replace

    from instep_reference.contract.checkpoint import Checkpoint
    from instep_reference.contract.drafters import EXTERNAL

    from ..report.machine import installed
    from ..run.build_compared_engines import Plan, reference
    from ..run.engine_without_comparison import header_of
    from ..setting import Setting
    from ..trace.event_scheduler import drive, recorded
    from ..trace.file import write
    from ..trace.header import Model, Recording

    chosen = setting or Setting(dtype="float64")
    opened = Checkpoint.open(directory, chosen.mode)
    if chosen.drafter == EXTERNAL and not policy.trees:
        raise BadInput("--drafter", found="external without a proposer", expected="ngram, or module:attribute")
    if chosen.overlap:
        policy = replace(policy, overlap=True, lag=max(policy.lag, 1))
    header, messages = header_of(
        policy, opened, model=Model.of(opened, directory, os.path.relpath(directory.resolve(), out.parent.resolve())),
        recording=Recording(chosen.mode, chosen.dtype, policy.overlap), directory=directory,
        created={name: installed(name) or "from source" for name in ("instep", "torch")} | {"reference": chosen.dtype},
    )
    for message in messages:
        print(message)
    plan = Plan.of(header, opened, chosen, "policy")
    first, receiver = reference(plan, chosen.activation), None
    if header.receiver is not None:
        _, there = plan.of_receiver(header, "policy")
        receiver = reference(there, chosen.activation)
        receiver.saved = first.saved
    steps_taken = list(drive(policy, prompts, header, first, propose=chosen.proposer(), receiver=receiver))
    return write(out, header, [step.event for step in steps_taken], recorded(steps_taken))
