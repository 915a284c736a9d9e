"""The setting of a subject: one frozen value for the command line, the engine's options and printed commands.

Leaves out: building anything from it (`run/build_compared_engines.py`, `run/engine_without_comparison.py`), and
combinations that an engine refuses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from instep_optimized import Options, options
from instep_optimized.commit import OURS, known
from instep_optimized.memory_addresses import StateLayout
from instep_optimized.ops.interpreter import wanted_on
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.declared_rounding import (
    CHUNK,
    KEPT,
    RING,
    SCALED_KEPT,
    SCALED_KV,
    SCALED_STATE,
    Storage,
    by_chance,
)
from instep_reference.contract.drafters import MODES
from instep_reference.contract.errors import BadInput

from .adapters import Maker, find, in_a_shell
from .adapters.strategy_by_name import OPTIONS, with_keeper
from .options import CHOICES, FP8, IN_TURNS, INT8, STRESSES, either
from .options import known as known_value
from .subject.engines import verbs
from .subject.engines.verbs import ByVerbs
from .subject.proposers import NAMES, mode_of, proposer
from .subject.proposers import OURS as PROPOSERS
from .trace.event_scheduler import Propose
from .trace.header import Recording

DEFAULTS = Options()  # values without an option
WIDTHS = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}
# Options that an --engine does not receive.
GROUPED = ("ranks", "stages", "micro_batches", "dp")  # options of an engine with several ranks or stages
MOST_PARTS = 1024  # of each of them: every part is built in this machine's memory
UNTOLD = ("ops", "state_dtype", "state_rounding", "kv_dtype", "kept_dtype", "chunk_dtype", "ring_dtype",
          "snapshot_layout", "strategy", "conv", "graphs", "prompt_graphs", "overlap", "guarded", *GROUPED, "experts",
          "comm")  # fmt: skip
ADDRESSED = ("strategy", "conv", "drafter")  # more options whose value may be module:attribute
MOST_ROWS = 1 << 20  # of a graph of prompts
NEAREST, STOCHASTIC = "nearest", "stochastic"
STATES: Mapping[str, Storage] = {**WIDTHS, FP8: SCALED_STATE}
FALLING = ("bfloat16", "float16", FP8)  # dtypes of states that may be rounded stochastically
KVS: Mapping[str, Storage] = {FP8: SCALED_KV}
KEEPS: Mapping[str, Storage] = {INT8: SCALED_KEPT}


@dataclass(frozen=True)
class Setting:
    """The op set or engine and its options. Every field has the name of its command-line option.

    ops       op set by name, an engine, or module:attribute
    device    cpu or cuda, for the subject
    dtype     activations
    state_dtype  the storage of states; None: fp32, or fp64 with float64 activations
    state_rounding  the rounding of states to a state_dtype of at most 16 bits; None or nearest: to nearest;
              stochastic: stochastic with seed 0; stochastic:N: with seed N, from 0 to 2**64 - 1
    kv_dtype  the storage of KV and draft KV; None: the dtype of activations
    kept_dtype  the storage of states in tracked prefixes; None: as in the pool
    chunk_dtype  the dtype of the states that a prompt's chunk leaves to a tracked prefix; None: as in the pool
    ring_dtype  the dtype of 16 bits in which a ring has keys and updates in two parts; None: in one part of fp32
    layout    physical order of a state block: VK or KV
    snapshot_layout  the same in the pool of snapshots; None: as `layout`
    strategy  the commit strategy of recurrent states; conv: of conv windows. `lazy-rerun` equals `lazy_rerun`.
              One of ours, of the op set, of a package, or module:attribute
    drafter   the drafter, or the proposer of external drafts (`proposers.py`); None: the trace's, or the engine's
              default without a trace
    graphs    rounds run in graphs: CUDA graphs on a GPU, an emulator elsewhere
    prompt_graphs  numbers of packed rows for which forwards with prompts are captured, with commas between them; None:
              they run eagerly
    overlap   a round may be launched before the counts of the previous round are known
    guarded   there are red zones between the units of every pool
    ranks     tensor-parallel ranks of the engine
    experts   the part of routed experts that a rank has: columns of each, or whole ones
    comm      how ranks or stages exchange data: lockstep, in turns in this process, or gloo or nccl, each in a process
    stages    pipeline stages of the engine
    micro_batches  parts of a batch that are in flight over the stages at a time, at most
    dp        replicas of a data-parallel group, in lock step in this process
    stress    kinds of stress on a GPU (`run/stress.py`), with commas between them; jitter:N has the seed N; None: none
    engine    an engine driven through callbacks, module:attribute; None: `ops` is used
    handed    the op set or engine as an object; `ops` or `engine` is then its name

    An engine of the user receives device, dtype and layout, and decides about the rest.
    Raises `BadInput`, which names the option, for an unknown value or a device that this machine does not have.
    """

    ops: str = "plain"
    device: str = "cpu"
    dtype: str = "float32"
    layout: StateLayout = DEFAULTS.layout
    strategy: str = DEFAULTS.strategy
    conv: str = DEFAULTS.conv
    drafter: str | None = None
    graphs: bool = DEFAULTS.graphs
    overlap: bool = DEFAULTS.overlap
    guarded: bool = DEFAULTS.guarded
    state_dtype: str | None = None
    state_rounding: str | None = None
    kv_dtype: str | None = None
    kept_dtype: str | None = None
    chunk_dtype: str | None = None
    ring_dtype: str | None = None
    snapshot_layout: StateLayout | None = None
    ranks: int = 1
    experts: str = DEFAULTS.experts
    comm: str = IN_TURNS
    stages: int = 1
    micro_batches: int = 1
    dp: int = 1
    prompt_graphs: str | None = None
    stress: str | None = None
    engine: str | None = None
    handed: Any = field(default=None, repr=False)  # Ops | Maker | ByVerbs | None, which cannot be stored in a file

    def __post_init__(self) -> None:
        for name in CHOICES:
            if (found := getattr(self, name)) is not None:
                object.__setattr__(self, name, known_value(name, found))
        device_here(self.device)
        for name in GROUPED:
            found = getattr(self, name)
            if not str(found).isdecimal() or not 0 < int(found) <= MOST_PARTS:
                raise BadInput(f"--{name.replace('_', '-')}", found=found,
                               expected=f"at least 1, and at most {MOST_PARTS}")  # fmt: skip
        several = [f"--{name} {getattr(self, name)}" for name in ("stages", "dp", "ranks") if getattr(self, name) > 1]
        if len(several) > 1 or (self.comm != IN_TURNS and self.dp > 1):
            other = several[1] if len(several) > 1 else f"--comm {self.comm}"
            option, found = several[0].split()
            raise BadInput(option, found=f"{found} with {other}", expected="one of the two")
        if self.micro_batches > 1 and self.stages == 1:
            raise BadInput("--micro-batches", found=f"{self.micro_batches} with --stages 1",
                           expected="several stages, over which they are in flight")  # fmt: skip
        for name, default, more in (("experts", DEFAULTS.experts, ""), ("comm", IN_TURNS, ", or --stages")):
            if (found := getattr(self, name)) != default and self.ranks == 1 and not (more and several):
                raise BadInput(f"--{name}", found=f"{found} with one rank", expected=f"--ranks 2 or more{more}")
        if self.device != {"gloo": "cpu", "nccl": "cuda"}.get(self.comm, self.device):
            raise BadInput("--comm", found=f"{self.comm} with --device {self.device}",
                           expected="gloo with cpu, nccl with cuda: rank n is on card n")  # fmt: skip
        if self._seed is None and self.state_rounding is not None:
            object.__setattr__(self, "state_rounding", None)
        if self.prompt_buckets is not None and not self.graphs:
            raise BadInput("--prompt-graphs", found="no --graphs", expected="both, as rounds run in graphs first")
        if self.stresses:
            may_be_stressed(self.device, self.comm)
        if self.drafter is not None and self.drafter not in NAMES and ":" not in self.drafter:
            raise BadInput("--drafter", found=self.drafter, expected=f"{either(NAMES)}, or module:attribute")
        for name, component in OPTIONS.items():
            found = getattr(self, name)
            if found.replace("-", "_") in OURS[component]:
                object.__setattr__(self, name, found.replace("-", "_"))
            else:
                self._with_keepers(name)

    @property
    def activation(self) -> torch.dtype:
        """The dtype of hidden rows, KV and conv windows."""
        return WIDTHS[self.dtype]

    @property
    def width(self) -> torch.dtype:
        """The dtype in which values with narrower declared storage are computed."""
        return wide(self.activation)

    @property
    def state(self) -> Storage:
        """The storage of states."""
        state = self.width if self.state_dtype is None else STATES[self.state_dtype]
        return state if self._seed is None else by_chance(state, self._seed)

    @property
    def _seed(self) -> int | None:
        """The seed of stochastic rounding of states."""
        how, _, seed = (self.state_rounding or NEAREST).partition(":")
        if how == NEAREST and not seed:
            return None
        wrong = how != STOCHASTIC or not (seed or "0").isdecimal() or len(seed) > 20 or int(seed or 0) >= 1 << 64
        if wrong or self.state_dtype not in FALLING:
            expected = f"{NEAREST}, {STOCHASTIC} or {STOCHASTIC}:N, N below 2**64"
            expected = expected if wrong else f"--state-dtype {either(FALLING)}"
            raise BadInput("--state-rounding", found=self.state_rounding, expected=expected)
        return int(seed or 0)

    @property
    def prompt_buckets(self) -> tuple[int, ...] | None:
        """The numbers of packed rows for which forwards with prompts are captured."""
        if self.prompt_graphs is None:
            return None
        words = [word.strip() for word in self.prompt_graphs.split(",")]
        if not all(word.isdecimal() and 0 < int(word) <= MOST_ROWS for word in words):
            raise BadInput("--prompt-graphs", found=repr(self.prompt_graphs),
                           expected=f"numbers of tokens from 1 to {MOST_ROWS}, as in 16,64")  # fmt: skip
        return tuple(sorted({int(word) for word in words}))

    @property
    def stresses(self) -> dict[str, int]:
        """The kinds of stress, each with its seed."""
        found = dict[str, int]()
        for word in [] if self.stress is None else self.stress.split(","):
            name, has_seed, seed = word.strip().partition(":")
            seeded = not has_seed or (name == "jitter" and seed.isdecimal() and len(seed) < 20)
            if name not in STRESSES or not seeded or name in found:
                raise BadInput("--stress", found=repr(self.stress), expected=f"some of {', '.join(STRESSES)}, each "
                               "once, with commas between; jitter:N has the seed N")  # fmt: skip
            found[name] = int(seed or 0)
        return found

    @property
    def kv(self) -> Storage | None:
        """The storage of KV; None means the dtype of activations."""
        return None if self.kv_dtype is None else KVS[self.kv_dtype]

    @property
    def kept(self) -> dict[str, Storage]:
        """The roundings of states in tracked prefixes, by their names in `rounds`."""
        named = (CHUNK, WIDTHS, self.chunk_dtype), (KEPT, KEEPS, self.kept_dtype)
        return {name: known[dtype] for name, known, dtype in named if dtype is not None}

    @property
    def apart(self) -> dict[str, Storage]:
        """The roundings that are no component's: of prefixes, and of a ring, by their names in `rounds`."""
        return self.kept | ({} if self.ring_dtype is None else {RING: WIDTHS[self.ring_dtype]})

    @property
    def mode(self) -> str:
        """The drafting mode of the engine, with the default filled in."""
        return mode_of(self.drafter or DEFAULTS.drafter)

    def proposer(self) -> Propose | None:
        """The proposer of external drafts; None if there is none."""
        return proposer(self.drafter or DEFAULTS.drafter)

    @classmethod
    def of(cls, **named: Any) -> "Setting":
        """A setting from options; None means that the option was not given."""
        return cls(**{name: value for name, value in named.items() if value is not None})

    def must_draft(self, config: ModelConfig) -> None:
        """Refuse a drafter that was named and runs MTP layers, if the model has none."""
        if self.drafter is not None and not config.mtp_layers and MODES[self.mode].heads:
            known = [name for name, facts in MODES.items() if not facts.heads and (not facts.block or config.block)]
            raise BadInput("--drafter", found=f"{self.drafter}, and a model without MTP layers",
                           expected=either((*known, *PROPOSERS)))  # fmt: skip

    def recorded(self, recording: Recording) -> "Setting":
        """The same setting, with the drafter of a recording if none was given."""
        return self if self.drafter else replace(self, drafter=recording.drafter)

    @property
    def name(self) -> str:
        """The name of the op set or engine in all messages."""
        return self.engine or self.ops

    @property
    def led(self) -> bool:
        """Whether it is an engine driven through callbacks."""
        return self.engine is not None

    def subject(self) -> Ops | Maker | ByVerbs:
        """The op set or the engine with that name; kernels are loaded for the device."""
        return self._with_keepers(*OPTIONS)

    def _with_keepers(self, *options: str) -> Ops | Maker | ByVerbs:
        """The subject; an op set gets the strategies that these options name."""
        wanted_on(self.device)
        found = self.handed or (find(self.ops) if self.engine is None else verbs.find(self.engine))
        for name in ("ranks", "stages", "dp"):
            if getattr(self, name) > 1 and not isinstance(found, Ops):
                raise BadInput(f"--{name}", found=f"{getattr(self, name)} with {self.name}",
                               expected="1: instep cuts the model for its own engine only")  # fmt: skip
        for name in options:
            if isinstance(found, Ops):
                found = with_keeper(found, name, getattr(self, name))
            elif getattr(self, name) not in OURS[OPTIONS[name]]:
                expected = "an op set; an --engine has its own way to commit"
                raise BadInput(f"--{name}", found=f"{getattr(self, name)} with {self.name}", expected=expected)
        return found

    def strategies(self, option: str) -> tuple[str, ...]:
        """The values that `--strategy` or `--conv` may have with this subject."""
        found = self.subject()
        names = tuple(known(OPTIONS[option], found) if isinstance(found, Ops) else OURS[OPTIONS[option]])
        if option == "strategy" and self.ring_dtype is not None:
            names = options.RINGS
        return tuple(name for name in names if (name, options.nearest(self.state)) not in options.LATE)

    def op_set(self) -> Ops:
        """The op set; refuses an engine of the user, and a set that moves labels and so computes no text."""
        found = self.subject()
        if not isinstance(found, Ops) or moves_labels(found):
            raise BadInput("ops", found=self.name, expected="an op set that computes: plain, triton, ...")
        return found

    def options(self, **otherwise: Any) -> Options:
        """The engine's options. otherwise: fields of `Options` with other values."""
        chosen: dict[str, Any] = {
            "device": self.device, "activation": self.activation, "state": self.state, "kv": self.kv,
            "kept": self.kept.get(KEPT), "chunk": self.kept.get(CHUNK),
            "ring": self.apart.get(RING), "layout": self.layout,
            "snapshot_layout": self.snapshot_layout, "strategy": self.strategy, "conv": self.conv,
            "drafter": self.mode, "graphs": self.graphs, "overlap": self.overlap, "guarded": self.guarded,
            "prompt_graphs": self.prompt_buckets, "experts": self.experts, **otherwise,
        }
        if not chosen["graphs"]:
            chosen["prompt_graphs"] = None
        return Options(**chosen)

    def words(self, *always: str) -> tuple[str, ...]:
        """The command-line options of this setting: the op set, values that are not defaults, and `always`."""
        words = ["--ops", in_a_shell(self.ops)] if self.engine is None else ["--engine", in_a_shell(self.engine)]
        for each in fields(self):
            if each.name in ("ops", "engine", "handed"):
                continue
            value, usual = getattr(self, each.name), each.default
            usual = DEFAULTS.drafter if each.name == "drafter" else usual
            if value is None or (value == usual and each.name not in always):
                continue
            name = each.name.replace("_", "-")
            value = in_a_shell(value) if each.name in ADDRESSED else value
            words += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
        return tuple(words)

    def data(self) -> dict[str, Any]:
        """The fields for a result file; None where an engine of the user decides."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "handed"}
        found["drafter"] = self.mode
        for name in GROUPED:
            if found[name] == 1:
                del found[name]  # files of engines with one rank have no such field
        for name, default in (("experts", DEFAULTS.experts), ("comm", IN_TURNS)):
            if self.ranks == 1 and found[name] == default:
                del found[name]
        for name in ("ring_dtype", "stress"):  # nor have files of a ring in one part, or of a run without stress
            if found[name] is None:
                del found[name]
        return found if self.engine is None else found | dict.fromkeys(UNTOLD)


def wide(activation: torch.dtype) -> torch.dtype:
    """The width of the computation of values that are stored in `activation`."""
    return torch.float64 if activation is torch.float64 else torch.float32


def device_here(name: str) -> str:
    """The name of a device, if this machine has it."""
    try:
        kind = torch.device(name).type
    except RuntimeError:  # torch raises for an unknown name or number
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise BadInput("--device", found=name, expected="cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device", found=name, expected="cpu", hint="no CUDA device is here; see `instep doctor`")
    return name


def may_be_stressed(device: str, comm: str) -> None:
    """Refuse stress where nothing runs at the same time as anything else, and in several processes."""
    if not device.startswith("cuda"):
        raise BadInput("--stress", found=f"--device {device}", expected="--device cuda",
                       hint="on a CPU nothing runs at the same time as anything else; --graphs emulates stale inputs "
                       "and freed memory there")  # fmt: skip
    if comm != IN_TURNS:
        raise BadInput("--stress", found=f"--comm {comm}", expected=f"{IN_TURNS}: one process is put under stress")


def moves_labels(ops: Ops | None) -> bool:
    """Whether the op set moves labels instead of computing, so that its hidden rows are integers."""
    return ops is not None and options.moves_labels(ops)
