"""What a controller of step counts is worth: the trained fixture's accepted counts, played at the sizes of a 9B model.

    PYTHONPATH=tests python tests/perf/adaptive_effect.py --out FILE --commit REVISION

1. The fixture decodes prompts of mixed difficulty, the hardest first, with the controller and with each fixed step
   count. With the op set `invariant` every arm must say the same tokens; a sample is read again by the reference.
2. Every arm is forced through an engine of the shape: checked after every event, then timed; see `forced.py`.
   How drafting compares with verifying hangs on the depth, so a figure is of a model of `--layers 32`; where checking
   all of that takes too long, `--checked` and `--judged` say how much is checked, and the result says it too.
Leaves out: any claim about the text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from instep.atomic_write import write_atomically
from instep.generate.decode import Ask, Decoded
from instep.generate.reread import Reader
from instep.generate.words import prompts_from, stop_of, words_of
from instep.replay.setting import Setting
from instep.report.command import typed
from instep.report.machine import machine
from instep.shapes import NAMES, shape
from instep.shapes.random_weights import random_checkpoint
from instep.verdict import Exit
from instep_reference.contract.checkpoint import Checkpoint
from perf.arms import ADAPTIVE, arms, hardest_first, mixed, parted
from perf.forced import Extent, Played, play

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "tiny"
CANDIDATES = (1, 3, 7)
FIRST = 3  # the controller's first step count
SAMPLE = 3  # requests of every arm that the reference reads again
EXACT = "invariant"  # the op set with which all arms must agree to the bit


def main(argv: list[str], config: Any = None) -> int:
    """`config`: of the large model, instead of the shape's."""
    told = _parsed(argv)
    decoded = decoded_arms(told)
    apart, read = parted(decoded), {name: Reader(one).verdict() for name, one in decoded.items()}
    wrong = [name for name, verdict in read.items() if verdict.exit is not Exit.AGREED]
    if told.fixture_ops == EXACT and apart:
        wrong.append(f"tokens differ between arms: {apart}")
    large = config or shape(told.shape, layers=told.layers, vocab=told.vocab)
    setting = Setting.of(
        ops=told.ops, device=told.device, dtype=told.dtype, strategy=told.strategy, graphs=told.graphs
    )
    checkpoint = random_checkpoint(large, device=told.device, dtype=setting.activation)
    played = play(decoded, checkpoint, setting, laps=told.laps, extents=_extents(told, decoded))
    wrong += [f"{name} at the large size" for name, one in played.items() if not one.right]
    result = {
        "schema": 1, "exit": int(Exit.DIVERGED if wrong else Exit.AGREED),
        "command": typed(["adaptive_effect.py", *argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": told.commit, "machine": machine(told.device),
        "setting": {"shape": told.shape, "layers": len(large.layer_kinds), "ops": told.ops, "dtype": told.dtype,
                  "fixture_ops": told.fixture_ops, "batch": told.batch, "tokens": told.tokens, "laps": told.laps,
                  "options": str(setting.options())},
        "wrong": wrong, "tokens_differ": apart, "arms": {name: _arm(decoded[name], played[name]) for name in decoded},
        "effect": {} if wrong else _effect(played),
    }
    print(report(result))
    if told.out is not None:
        write_atomically({told.out: msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"})
    return int(result["exit"])


def decoded_arms(told: argparse.Namespace) -> dict[str, Decoded]:
    """The fixture's part."""
    checkpoint = Checkpoint.open(FIXTURE)
    prompts = mixed(prompts_from(FIXTURE / "prompts.json", words_of(FIXTURE, checkpoint.config.vocab)))
    chosen = dict(list(prompts.items())[: told.prompts])
    ask = Ask(
        checkpoint, Setting(told.fixture_ops, told.device), chosen, FIRST, tokens=told.tokens, batch=told.batch,
        stop=stop_of(FIXTURE), kept=frozenset(list(chosen)[:: max(1, len(chosen) // SAMPLE)]),
    )
    return arms(hardest_first(ask), {"candidate_steps": list(CANDIDATES)}, tuple(told.fixed))


def _extents(told: argparse.Namespace, decoded: Mapping[str, Decoded]) -> dict[str, Extent]:
    """As asked; in graphs, with an op set that is not invariant, as far as bits can be compared."""
    if told.checked is None and told.graphs and told.ops != EXACT:
        return {name: Extent.full_batches(one, told.judged) for name, one in decoded.items()}
    return dict.fromkeys(decoded, Extent(told.checked, told.judged))


def report(result: Mapping[str, Any]) -> str:
    """A table for people; without a figure of speed where anything was wrong."""
    if result["wrong"]:
        return f"DIVERGED  no speed is shown: {'; '.join(result['wrong'])}"
    lines = [f"{'arm':>9}  tokens/s  ms a round  latency s  accepted  rounds by step count"]
    for name, arm in result["arms"].items():
        steps = ", ".join(f"{count}: {rounds}" for count, rounds in arm["steps"].items())
        lines.append(
            f"{name:>9}  {arm['tokens_per_s']:8.1f}  {arm['round_ms']:10.2f}  {arm['latency_s']:9.3f}  "
            f"{arm['accepted']:8.2f}  {steps}"
        )
    for name, change in result["effect"].items():
        faster, later = f"{change['tokens_per_s']:+.1%}", f"{change['latency']:+.1%}"
        lines.append(f"adaptive against {name}: tokens/s {faster}, latency {later}")
    return "\n".join(lines)


def _arm(decoded: Decoded, played: Played) -> dict[str, Any]:
    speed, verdict = played.speed(), played.checked.verdict
    found: dict[str, Any] = {
        "right": played.right, "events": len(decoded.events), "checked_events": verdict.events,
        "elements": verdict.elements, "accepted": speed.accepted,
        "steps": {str(count): rounds for count, rounds in speed.steps.items()}, "tokens": speed.tokens,
        "requests": len(decoded.ask.prompts), "findings": [one.diagnosis for one in verdict.findings[:3]],
    }
    if played.right:
        laps = [sum(lap.seconds) for lap in played.laps]
        found |= {"tokens_per_s": speed.overall, "decoding_tokens_per_s": speed.decoding, "round_ms": speed.latency_ms,
                  "latency_s": played.latency_s(), "lap_seconds": laps}
    return found


def _effect(played: Mapping[str, Played]) -> dict[str, dict[str, float]]:
    """Adaptive against every fixed count: parts by which it differs."""
    ours = played[ADAPTIVE]
    return {
        name: {"tokens_per_s": ours.speed().overall / one.speed().overall - 1,
               "latency": ours.latency_s() / one.latency_s() - 1}
        for name, one in played.items() if name != ADAPTIVE
    }


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--shape", default="qwen3.5-9b", choices=NAMES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--ops", default="triton", help="of the large engine")
    parser.add_argument("--fixture-ops", default=EXACT)
    parser.add_argument("--strategy")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, help="CUDA graphs in the large engine")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--fixed", type=int, nargs="*", default=[0, 1, 3, 7], help="step counts of the other arms")
    parser.add_argument("--checked", type=int, help="the last event of every arm that is checked; left out: all are")
    parser.add_argument("--judged", type=int, nargs="*", help="layers of the large model under T2d; left out: all")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
