"""A layer of attention over latents (MLA) in paged memory: ops and views only.

Leaves out: pages, which come with the batch, and the expansion of latents, which is a part of the op `attend_latents`.
"""

from dataclasses import dataclass
from functools import partial

from instep_reference.contract.config import LATENT_EPS, ModelConfig
from instep_reference.contract.place_names import Place

from .. import weights as w
from ..ops.fused import linears, store_rows
from ..ops.op_protocols import Ops
from ..packed_batch import Batch
from .layer import StoringLayer
from .residual import Residual


@dataclass(frozen=True)
class LatentLayer(StoringLayer[w.LatentWeights]):
    """A layer of attention over latents. Calling it runs it.

    keys    [pages, page_size, 1, S]: the part of a key that all heads share
    values  [pages, page_size, 1, R]: the latent, from which values and the other part of keys are expanded
    """

    @classmethod
    def read(cls, stored: w.Stored, prefix: str, layer: int, config: ModelConfig) -> w.LatentWeights:
        return w.latent(stored, prefix, config)

    def __call__(self, ops: Ops, hidden: Residual, batch: Batch, stage: str) -> Residual:
        """Map hidden [N, D] -> [N, D]."""
        at = partial(Place, stage, self.layer)
        weights, config = self.weights, self.config
        rows, x = hidden.normed(ops, self.norm, config.eps, at("normed"))  # [N, D]
        shared, latent = config.stored_rows
        projected = None
        if config.rotary_dim:
            projected, raw = linears(
                ops, x=x, weight=weights.inputs, to=(at("projected"), at("key_raw")),
                shapes=((config.heads, config.head_dim + 1), (1, latent[1] + shared[1])),
            )  # [N, heads, head_dim + 1]: query, then gate; [N, 1, R + S]
            assert ops.latent_inputs is not None, "checked when the engine was built"
            query, key, value = ops.latent_inputs(
                projected=projected, key_raw=raw, positions=batch.positions, norm=weights.norm, eps=LATENT_EPS,
                rotary_dim=config.rotary_dim, theta=config.rope_theta, to=(at("query"), at("key"), at("value")),
            )  # [N, heads, head_dim], [N, 1, S], [N, 1, R]
        else:
            raw, query, key = linears(
                ops, x=x, weight=weights.inputs, shapes=(latent, (config.heads, config.head_dim), shared),
                to=(at("key_raw"), at("query"), at("key")),
            )  # [N, 1, R], [N, heads, head_dim], [N, 1, S]
            value = ops.norm(x=raw, weight=weights.norm, eps=LATENT_EPS, to=at("value"))  # [N, 1, R]
        # Stored before they are read: a row also attends to itself and to the rows before it in this launch.
        for stored, pool in ((key, self.keys), (value, self.values)):
            store_rows(ops, rows=stored, units=pool, locations=batch.locations)
        assert ops.attend_latents is not None, "checked when the engine was built"
        attended = ops.attend_latents(
            query=query, pages=batch.pages(self.keys, self.values), up=weights.up, to=at("attended"),
        )  # [N, heads, value_width]
        if projected is not None:
            attended = ops.output_gate(attended=attended, projected=projected, to=at("opened"))
        mixer = ops.linear(x=attended, weight=weights.o, shape=(config.hidden,), to=at("mixer"))  # [N, D]
        return self.half(ops, rows, mixer, stage)
