"""Call the callbacks of an external engine: an exception or an answer of a wrong type is the engine's own finding.

Every tensor is copied to the host, so later writes of the engine do not change it.
Leaves out: when a callback is called (`engine_from_verbs.py`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from instep_optimized.memory.budget import conv_window, state_block
from instep_reference.attention import AttentionMemory
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import AFTER_LAYERS, COMPONENTS, Place, See
from instep_reference.gdn import GdnMemory
from instep_reference.short_conv import ConvMemory
from instep_reference.trunk import empty_memory

from ...watch.visible_places import FEEDS
from ..declared_rounding import EVERY
from ..guarded_calls import WrongType, calling, must, must_hold
from .verbs import PAIRS, Tokens, declaration, product_of

T = TypeVar("T")
Layers = dict[int, torch.Tensor]
ANY = -1  # as the length of an axis
GIVEN = ("logits", "final")  # keys of what `step` gives


@dataclass
class Said:
    """The results of a step, by request; picks: the argmax of its logits. Empty: no step ran."""

    logits: dict[str, torch.Tensor] = field(default_factory=dict)
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    picks: dict[str, torch.Tensor] = field(default_factory=dict)
    layers: dict[str, Layers] = field(default_factory=dict)


class Asked:
    """feeds: the components that are shown (`shown.FEEDS`), limited by `declares` if it is given. Logits and final rows
    are known after the first step that could show them.
    """

    def __init__(self, made: Any, make: object, config: ModelConfig) -> None:
        self.made, self.config = made, config
        said = declaration(made, make)
        self.rounds = rounds_of(said.get("rounds", {}))
        self.products = {form: product_of(one) for form, one in dict(said.get("products", {})).items()}
        self.once = said.get("once", ())
        self.exact = bool(said.get("order", False))
        self.only = None if "shows" not in said else frozenset(said["shows"])
        self._shows: dict[str, bool] = {} if self.only is None else {key: key in self.only for key in GIVEN}
        # A recording may have states of these layers alone, and only after events at which its `has_state` is true.
        self.state_layers: Collection[int] | None = getattr(made, "state_layers", None)

    @property
    def feeds(self) -> frozenset[str]:
        verbs = {feed for feed in FEEDS if self.has(feed)} | {key for key, shown in self._shows.items() if shown}
        return frozenset(verbs if self.exact else verbs - {"regions"})

    def has(self, verb: str) -> bool:
        """Whether there is the verb, and the one without which it has no meaning; and whether it is to be shown."""
        if verb in FEEDS and self.only is not None and verb not in self.only:
            return False
        pair = next((pair for pair in PAIRS if verb in pair), (verb,))
        return all(callable(getattr(self.made, one, None)) for one in pair)

    def verb(self, name: str, *given: Any) -> Any:
        with calling(name):
            return getattr(self.made, name)(*given)

    def step(self, rows: Sequence[Tokens], wanted: Collection[str]) -> Said:
        """wanted: the requests whose logits are compared."""
        found, said = self.verb("step", tuple(rows)), Said()
        with calling("step"):
            must(isinstance(found, Mapping), "step", found, 'a dict with "logits", "final" or both')
            unknown = [key for key in found if key not in GIVEN]
            must(not unknown, "step: keys", unknown, " and ".join(map(repr, GIVEN)))
            for row in rows:
                count, every = len(row.tokens), {len(row.tokens)}
                either = {*every, 1} if row.kind == "prefill" else every
                if row.request in wanted and self._shown(found, "logits"):
                    rows_of = self._rows(found, "logits", row, either, self.config.vocab)
                    said.logits[row.request] = rows_of if row.kind == "verify" else rows_of[-1:]
                    said.picks[row.request] = said.logits[row.request].argmax(-1)
                if self._shown(found, "final"):
                    said.final[row.request] = self._rows(found, "final", row, either, self.config.hidden)
                if self.has("layers"):
                    said.layers[row.request] = self._layers(row.request, count)
        return said

    def _shown(self, found: Mapping[str, Any], key: str) -> bool:
        """Whether the engine shows this: the first step that could show it decides, and later steps must do the
        same.
        """
        shown = self._shows.setdefault(key, found.get(key) is not None)
        if shown and found.get(key) is None:
            raise WrongType(f'step left out "{key}", which it has shown before or declares to show')
        return shown

    def _rows(self, found: Mapping[str, Any], key: str, row: Tokens, counts: set[int], width: int) -> torch.Tensor:
        what = f'step: {key} of "{row.request}"'
        must(isinstance(found[key], Mapping), f"step: {key}", found[key], "requests with their rows")
        many = " or ".join(map(str, sorted(counts, reverse=True)))
        return copied(what, found[key].get(row.request), [counts, {width}], f"[{many}, {width}]")

    def _layers(self, request: str, count: int) -> Layers:
        given = self.verb("layers", request)
        must(isinstance(given, Mapping), "layers", given, "layers with their hidden rows")
        known = set(range(len(self.config.layers)))
        must(set(given) <= known, "layers", sorted(map(str, given)), f"layers of the model, 0 to {max(known)}")
        width = self.config.hidden
        return {layer: copied(f'layers: layer {layer} of "{request}"', rows, [{count}, {width}], f"[{count}, {width}]")
                for layer, rows in given.items()}  # fmt: skip

    def state(self, request: str) -> tuple[Layers, Layers] | None:
        """Conv windows [C, W-1] and recurrent states [HV, K, V] of every GDN layer; None: not recorded here.

        The state of a layer that has none is not read.
        """
        if not self.has("state"):
            return {}, {}
        if self.state_layers is not None and not self.made.has_state(request):
            return None
        shapes = conv_window(self.config), state_block(self.config)
        every = sorted({*self.config.recurrent, *self.config.convolving})
        conv, state = self._pair("state", request, every, shapes, self.state_layers)
        return conv, {layer: one for layer, one in state.items() if layer in self.config.recurrent}

    def kv(self, request: str) -> tuple[Layers, Layers]:
        """Keys and values [L, kv_heads, head_dim] of every attention layer. L is compared, and so is free here."""
        if not self.has("kv"):
            return {}, {}
        keys, values = ((ANY, *row) for row in self.config.stored_rows)
        return self._pair("kv", request, self.config.attending, (keys, values))

    def nothing(self) -> tuple[Layers, ...]:
        """The state of a request before its first token: zeros in every GDN layer, and no KV entries."""
        conv, state = (dict[int, torch.Tensor]() for _ in range(2))
        keys = dict[int, torch.Tensor]()
        for layer, mixer in enumerate(self.config.mixers):
            memory = empty_memory(self.config, mixer, torch.float32)
            if isinstance(memory, GdnMemory):
                conv[layer], state[layer] = memory.window, memory.state
            elif isinstance(memory, ConvMemory):
                conv[layer] = memory.window
            elif isinstance(memory, AttentionMemory):
                keys[layer] = memory.keys
        return conv, state, keys, dict(keys)

    def _pair(
        self, verb: str, request: str, every: Sequence[int], shapes: tuple[tuple[int, ...], ...],
        chosen: Collection[int] | None = None,
    ) -> tuple[Layers, Layers]:
        """every: the layers that have such memory; chosen: those that are shown, None: all of them."""
        given = self.verb(verb, request)
        with calling(verb):
            layers = [layer for layer in every if chosen is None or layer in chosen]
            kind = " or ".join(dict.fromkeys(self.config.mixers[layer] for layer in every))
            must(isinstance(given, Mapping), verb, given, f"{kind} layers with two tensors each")
            must(set(given) == set(layers), verb, sorted(map(str, given)), f"the {kind} layers {layers}")
            pairs = {layer: given[layer] for layer in layers}
            for layer, pair in pairs.items():
                right = isinstance(pair, Sequence | tuple) and len(pair) == 2
                must(right, f"{verb}: layer {layer}", pair, "two tensors")
            one, other = (
                {layer: copied(f"{verb}: layer {layer}", pair[number], [{size} for size in shape], str(list(shape)))
                 for layer, pair in pairs.items()}
                for number, shape in enumerate(shapes)
            )  # fmt: skip
        return one, other

    def draft(self, requests: tuple[str, ...], num_steps: int, picks: tuple[tuple[int, ...], ...]) -> list[list[int]]:
        found = self.verb("draft", requests, num_steps, picks)
        with calling("draft"):
            rows = found.tolist() if isinstance(found, torch.Tensor) else [list(row) for row in found]
            right = len(rows) == len(requests) and all(
                len(row) in (len(mine), num_steps) and all(isinstance(token, int) for token in row)
                for row, mine in zip(rows, picks, strict=True)
            )
            must(right, "draft", found, f"{len(requests)} lines of {num_steps} tokens, or of as many as were given")
        return [row[: len(mine)] for row, mine in zip(rows, picks, strict=True)]  # windows have own widths

    def watch(self, see: See) -> None:
        if not self.has("watch"):
            return

        def seen(place: Any, tensor: torch.Tensor) -> torch.Tensor:
            right = isinstance(place, tuple) and len(place) == 3 and place[2] in COMPONENTS
            must(right, "see: place", place, "(stage, layer, component)")
            at = Place(*place)
            return tensor if at.layer == AFTER_LAYERS else see(at, tensor)  # those are what `step` gives

        self.verb("watch", seen)

    def shown_or(self, verb: str, nothing: T, *given: Any) -> T:
        """The result of a memory callback; nothing if there is none, or if its units are numbered differently."""
        told = self.has(verb) and (self.exact or verb in ("slots", "pages"))
        return self.verb(verb, *given) if told else nothing


def rounds_of(said: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """Component -> the dtype in which it is stored; "*" covers every component that is not named."""
    said = dict(said)
    every = said.pop(EVERY, None)
    return {**({} if every is None else dict.fromkeys(COMPONENTS, every)), **said}


def copied(what: str, found: Any, axes: Sequence[set[int]], expected: str) -> torch.Tensor:
    """A copy on the host of a tensor, or of what numpy has, if it is shaped so."""
    if not isinstance(found, torch.Tensor) and hasattr(found, "__array__"):
        found = torch.from_numpy(found.__array__())
    must_hold(what, found, whole=False)
    right = found.dim() == len(axes) and all(
        size in known or ANY in known for size, known in zip(found.shape, axes, strict=True)
    )
    must(right, what, found, f"a tensor {expected}")
    copy: torch.Tensor = found.detach().to("cpu", copy=True)
    return copy
