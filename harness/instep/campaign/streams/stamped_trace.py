"""A trace in stamps, and a model made by hand that holds them: every token is the stamp of its request and position.

A draft that its commit accepts gets the stamp of the token that it becomes; every other draft is stamped as rejected,
at the position of its depth. A request that loads the saved state of another request has the other's prompt, and so the
other's stamps. Two rejected siblings have equal stamps.

The code of a stamp is a row of small integers, which are exact in every dtype down to bf16. It differs in every head
and layer, so a row that was read from a wrong head or layer is visible. In the model, a token's embedding is one-hot in
its key and in every digit. Mixers and MLPs add nothing, so each layer sees the embedding itself. A GDN layer writes the
token's code at the key of the token's position: keys are one-hot and large, beta is 1, nothing decays. So the delta
rule replaces row p % 16 of a state by the code of position p. Attention layers hold the code as their values. In the
draft head, value head 0 holds the code of the next token, and head 1 that of the row's own token. Leaves out: text. The
choices of such a model mean nothing, so all choices are forced.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch
from msgspec.structs import replace

from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.checkpoint_tensor_shapes import expected_shapes
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import committed_paths, facts, named, restores
from instep_reference.contract.recurrences import RECURRENCES

from ...trace.event_rules import EventRules
from ...trace.file import Trace
from ...trace.header import Model
from ...trace.tree_shape import depths

DIGIT = 16  # values of a digit; a column holds 1 to 16, so that 0 is nothing
DIGITS = ("request", "position % 16", "position // 16", "rejected")
WIDTH = 16  # columns of a code: digits, head, layer, two constants, and all that once more, backwards
KEYS = 16  # keys: a state holds the last 16 positions, one row each
MOST_REQUESTS, MOST_POSITIONS = DIGIT, DIGIT * DIGIT


@dataclass(frozen=True)
class Stamp:
    """`request`: its number in the order of admission."""

    request: int
    position: int
    rejected: bool = False

    @property
    def token(self) -> int:
        """Its id in the vocabulary."""
        return (self.request * MOST_POSITIONS + self.position) * 2 + self.rejected

    @classmethod
    def of(cls, token: int) -> "Stamp":
        number, rejected = divmod(token, 2)
        return cls(*divmod(number, MOST_POSITIONS), bool(rejected))

    @property
    def digits(self) -> tuple[int, ...]:
        return (self.request, self.position % DIGIT, self.position // DIGIT, int(self.rejected))

    @property
    def key(self) -> int:
        return self.position % KEYS


def vocabulary(requests: int) -> int:
    """The number of tokens that this many requests need."""
    if requests > MOST_REQUESTS:
        raise BadInput("trace", found=f"{requests} requests", expected=f"at most {MOST_REQUESTS} for exact streams")
    return requests * MOST_POSITIONS * 2


def columns(head: int, layer: int) -> tuple[tuple[str, int], ...]:
    """The content of each column of a code: ("digit", which) or ("constant", its value)."""
    once = [*(("digit", which) for which in range(len(DIGITS))), ("constant", head + 1), ("constant", layer + 1),
            ("constant", 1), ("constant", 2)]  # fmt: skip
    return (*once, *reversed(once))


def code(stamp: Stamp, head: int, layer: int) -> list[int]:
    """The row of numbers for a stamp in this head of this layer."""
    return [stamp.digits[n] + 1 if kind == "digit" else n for kind, n in columns(head, layer)]


def decoded(row: torch.Tensor, head: int, layer: int) -> Stamp | None:
    """The stamp of a row [16]; None if the row is no code, as where a number is no whole one or not finite."""
    numbers: list[float] = row.double().tolist()
    if not all(number.is_integer() for number in numbers):
        return None
    request, low, high, rejected = (int(number) - 1 for number in numbers[: len(DIGITS)])
    if not (0 <= request < DIGIT and 0 <= low < DIGIT and 0 <= high < DIGIT and rejected in (0, 1)):
        return None
    stamp = Stamp(request, high * DIGIT + low, bool(rejected))
    return stamp if numbers == code(stamp, head, layer) else None


LANE = KEYS + len(DIGITS) * DIGIT  # one-hot features of one token
HIDDEN = 2 * LANE  # the second lane is for the draft head, which joins the hidden row with the next token
ONES = 1 + len(DIGITS)  # how many features of a token are 1
LOUD = 20.0  # in fp32 sigmoid(20) is 1 and softplus(-20) is 0; as a key it is large against every epsilon


USUAL = next(iter(RECURRENCES))
# Only by the delta rule a token replaces the code that a state has at its key. An outer product adds its own to it.
STAMPED = tuple(row.name for row in RECURRENCES.values() if row.update == "delta")


def config(requests: int, *, mtp_layers: int = 1, recurrence: str = USUAL) -> ModelConfig:
    """Three layers with a recurrence, then one attention layer; two value heads per key head, K = V = 16."""
    return ModelConfig(
        model_type="qwen3_5", vocab=vocabulary(requests), hidden=HIDDEN,
        layers=((recurrence, "mlp"),) * 3 + (("attention", "mlp"),), eps=1e-6, tied=True,
        key_heads=2, value_heads=4, key_dim=KEYS, value_dim=WIDTH, conv_width=4, output_gate="silu",
        heads=2, kv_heads=2, head_dim=WIDTH, rotary_dim=4, rope_theta=10000.0,
        intermediate=8, experts=0, experts_per_token=0, expert_intermediate=0, shared_intermediate=0, norm_topk=True,
        mtp_layers=mtp_layers,
    )  # fmt: skip


def stream_checkpoint(made: ModelConfig) -> Checkpoint:
    """The weights, in bf16 as released ones. A tensor that is not set here is 0 and adds nothing."""
    tensors = {name: torch.zeros(size) for name, size in expected_shapes(made).items()}
    tensors["model.embed_tokens.weight"] = _embedding(made)
    tensors["model.norm.weight"] += _unit(ONES)
    for layer in range(len(made.layers)):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] += _unit(ONES)
        recurrent = layer in made.recurrent
        tensors |= _recurrence(made, f"{at}.linear_attn", layer) if recurrent else _values(at, layer, (0, 0))
    if made.mtp_layers:
        tensors |= _draft(made, tensors)
    stored = {name: tensor if name.endswith("A_log") else tensor.bfloat16() for name, tensor in tensors.items()}
    digest = hashlib.sha256(f"stream {made.mixers}".encode())
    for name, tensor in sorted(stored.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.float().numpy().tobytes())
    return Checkpoint(made, MappingProxyType(stored), digest.hexdigest())


def _embedding(made: ModelConfig) -> torch.Tensor:
    table = torch.zeros(made.vocab, HIDDEN)
    for token in range(made.vocab):
        stamp = Stamp.of(token)
        table[token, stamp.key] = 1
        for which, digit in enumerate(stamp.digits):
            table[token, _feature(which, digit)] = 1
    return table


def _feature(which: int, digit: int, lane: int = 0) -> int:
    return lane * LANE + KEYS + which * DIGIT + digit


def _unit(ones: int) -> float:
    """The stored norm weight w (used as 1 + w) with which a row with this many ones does not change."""
    return math.sqrt(ones / HIDDEN) - 1


def _recurrence(made: ModelConfig, at: str, layer: int) -> dict[str, torch.Tensor]:
    keys = made.key_heads * made.key_dim
    key = torch.zeros(keys, HIDDEN)
    for head in range(made.key_heads):
        key[head * KEYS : (head + 1) * KEYS, :KEYS] = LOUD * torch.eye(KEYS)
    value = torch.cat([_coder(head, layer, before_silu) for head in range(made.value_heads)])
    conv = torch.zeros(2 * keys + made.value_heads * made.value_dim, 1, made.conv_width)
    conv[:, 0, -1] = 1  # the token itself
    always, decays = (torch.zeros(prod(made.lengths(axes)), HIDDEN) for axes in (("HV",), made.recurrence.gate))
    always[:, :KEYS] = decays[:, :KEYS] = 1  # a token has exactly one key
    return {
        f"{at}.in_proj_qkv.weight": torch.cat((key, key, value)), f"{at}.conv1d.weight": conv,
        f"{at}.in_proj_b.weight": LOUD * always, f"{at}.in_proj_a.weight": -2 * LOUD * decays,
    }


def _values(at: str, layer: int, lanes: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The weights of values. lanes: for each value head the lane whose code it holds."""
    coders = [_coder(head, layer, lambda value: value, lane) for head, lane in enumerate(lanes)]
    return {f"{at}.self_attn.v_proj.weight": torch.cat(coders)}


def _draft(made: ModelConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """fc puts the next token's features into lane 0 and the hidden row's into lane 1."""
    fc = torch.zeros_like(tensors["mtp.fc.weight"])
    fc[:LANE, :LANE] = fc[LANE:, HIDDEN : HIDDEN + LANE] = torch.eye(LANE)
    found = {"mtp.fc.weight": fc, "mtp.norm.weight": tensors["mtp.norm.weight"] + _unit(2 * ONES)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        found[f"mtp.{name}.weight"] = tensors[f"mtp.{name}.weight"] + _unit(ONES)
    for layer in range(made.mtp_layers):
        at = f"mtp.layers.{layer}"
        name = f"{at}.input_layernorm.weight"
        found |= {name: tensors[name] + _unit(2 * ONES), **_values(at, layer, (0, 1))}
    return found


def _coder(head: int, layer: int, stored: Callable[[float], float], lane: int = 0) -> torch.Tensor:
    """The matrix [16, D] from features to the columns of a code. stored(y): the number to store so that y is read."""
    weight = torch.zeros(WIDTH, HIDDEN)
    for column, (kind, number) in enumerate(columns(head, layer)):
        if kind == "constant":
            weight[column, lane * LANE : lane * LANE + KEYS] = stored(float(number))
            continue
        for digit in range(DIGIT):
            weight[column, _feature(number, digit, lane)] = stored(float(digit + 1))
    return weight


def before_silu(value: float) -> float:
    """The x with x sigmoid(x) = value, for a value of at least 1, by a few steps of Newton's method."""
    x = value
    for _ in range(8):
        gate = 1 / (1 + math.exp(-x))
        x -= (x * gate - value) / (gate * (1 + x * (1 - gate)))
    return x


@dataclass(frozen=True)
class Held:
    """A request by the trace: all known tokens, of which the first `length` are committed, and its window, if any."""

    tokens: tuple[int, ...]
    length: int
    window: tuple[int, ...]


@dataclass(frozen=True)
class Labelled:
    """The trace in stamps. names: request number -> name; held: for every event, what each live request then holds."""

    trace: Trace
    config: ModelConfig
    names: tuple[str, ...]
    held: tuple[Mapping[str, Held], ...]


def relabelled(trace: Trace, recurrence: str = USUAL) -> Labelled:
    """The trace in stamps, for the model of this file with as many requests, and this recurrence."""
    trace.header.must_have_one_engine(f"{trace.path.name} line 1")
    events, names = trace.events, tuple(event.request for event in trace.events if isinstance(event, e.Admit))
    made = config(len(names), mtp_layers=min(trace.header.heads, 1), recurrence=recurrence)
    digest = stream_checkpoint(made).digest
    model = Model("in memory", digest, digest, made.vocab, made.mtp_layers)
    header = replace(trace.header, checkpoint=model, stop=None)
    rules, said, held = EventRules(header), list[e.AnyEvent](), list[Mapping[str, Held]]()
    writer = _Writer(events, _prompts(events))
    for index, event in enumerate(events):
        said.append(writer.stamped(index, event, rules))
        rules.apply(said[-1], trace.where(index))
        live = rules.table.live
        held.append({name: Held((*one.prompt, *one.said), one.length, one.window) for name, one in live.items()})
    return Labelled(Trace(trace.path, header, tuple(said), {}, ""), made, names, tuple(held))


def _prompts(events: Sequence[e.AnyEvent]) -> dict[int, int]:
    """Request number, in the order of admission -> the number of the request whose prompt it has."""
    owner, number, live, saved = dict[int, int](), -1, dict[str, int](), dict[str, int]()
    for event in events:
        if isinstance(event, e.Admit):
            number += 1
            live[event.request] = owner[number] = number
        request, name = (getattr(event, field, "") for field in ("request", "name"))
        match facts(event).copy:
            case "keep" if name:
                saved[name] = owner[live[request]]
            case "drop":
                saved.pop(name, None)
            case "restore" if name in saved:  # else it is a prefix
                owner[live[request]] = saved[name]
    return owner


@dataclass
class _Writer:
    """Goes through the events once. `numbers`: live request -> its number."""

    events: Sequence[e.AnyEvent]
    prompts: Mapping[int, int]

    def __post_init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.texts: list[tuple[int, ...]] = []  # the stamped prompts, in order of admission

    def stamped(self, index: int, event: e.AnyEvent, rules: EventRules) -> e.AnyEvent:
        match event:
            case e.Admit():
                number = self.numbers[event.request] = len(self.texts)
                owner, prefix = self.prompts[number], self._prefix(index, event.request, rules)
                own = (*prefix, *(_token(number, at) for at in range(len(prefix), len(event.prompt))))
                self.texts.append(own if owner == number else self.texts[owner])
                return replace(event, prompt=self.texts[number])
            case e.Draft():
                return self._draft(index, event, rules)
            case e.Forward():
                rows = (replace(row, root=self._root(row, rules)) for row in event.rows)
                return replace(event, rows=tuple(rows))
            case e.Commit():
                return self._commit(event, rules)
        return event

    def _prefix(self, index: int, name: str, rules: EventRules) -> tuple[int, ...]:
        """The stamps of the prefix that a request is given next; none, where it is given none."""
        for event in self.events[index + 1 :]:
            if restores(event) == name and (kept := rules.table.saved.get(getattr(event, "name", ""))):
                return kept.prompt if kept.prefix else ()
            if name in named(event):
                break
        return ()

    def _draft(self, index: int, event: e.Draft, rules: EventRules) -> e.Draft:
        picks, given = [], event.picks or ()
        shapes = event.parents or [range(len(drafts)) for drafts in given]
        for name, drafts, parents in zip(event.requests, given, shapes, strict=True):
            begin, accepted = rules.table.live[name].length, self._accepted(index, name)
            depth = depths((-1, *parents))[1:]
            picks.append(tuple(
                _token(self.numbers[name], begin + depth[n], n + 1 not in accepted) for n in range(len(drafts))))
        return replace(event, picks=tuple(picks), own=False)  # no drafter proposes stamps

    def _accepted(self, index: int, name: str) -> tuple[int, ...]:
        """The nodes of this event's drafts that the request's next commit accepts."""
        for event in self.events[index + 1 :]:
            if isinstance(event, e.Abort) and event.request == name:
                return ()
            if isinstance(event, e.Commit) and name in event.requests and event.accepted is not None:
                return committed_paths(event)[event.requests.index(name)].nodes
        return ()

    def _root(self, row: e.Row, rules: EventRules) -> int | None:
        if row.root is None:
            return None
        return _token(self.numbers[row.request], rules.table.live[row.request].length + row.tokens)

    def _commit(self, event: e.Commit, rules: EventRules) -> e.Commit:
        paths = []
        cut = committed_paths(event)
        for name, path, kept in zip(event.requests, event.accepted or (), cut, strict=True):
            at = rules.table.live[name].length + 1 + len(kept.nodes)
            paths.append(replace(path, bonus=_token(self.numbers[name], at)))
        return replace(event, accepted=tuple(paths))


def _token(request: int, position: int, rejected: bool = False) -> int:
    if position >= MOST_POSITIONS:
        raise BadInput("trace", found=f"position {position}", expected=f"under {MOST_POSITIONS} for exact streams")
    return Stamp(request, position, rejected).token
