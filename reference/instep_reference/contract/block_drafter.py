"""The configuration of a block drafter: a small model that reads rows of the target and drafts a block at once.

Its folder has a `config.json`, in which no other field may be, and `model.safetensors`. Leaves out: the computation
(`draft/` of either side).
"""

from pathlib import Path
from typing import Literal

import msgspec

from .errors import BadInput

FOLDER = "block"  # of the drafter, in the folder of the target's checkpoint
PREFIX = "block."  # of the names of its tensors among those of the target


class BlockDrafter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of the file, under the names of DFlash drafters (SGLang 0.5.23, `dflash_utils.py`).

    target_layer_ids  the layers of the target whose rows are read, ascending: the rows after each layer
    mask_token_id     the token of every row of a block after the root
    vocab_size, hidden_size  those of the target, whose embedding and lm_head it uses

    Its layers are attention layers with an output gate and a dense MLP, as in the target.
    """

    model_type: Literal["block_drafter"]
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    target_layer_ids: tuple[int, ...]
    mask_token_id: int

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @classmethod
    def read(cls, path: Path, vocab: int, hidden: int, layers: int) -> "BlockDrafter":
        """Read the file. vocab, hidden, layers: of the target."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            raise BadInput(str(path), found="no such file", expected="the configuration of a block drafter",
                           hint=f"the drafter of a model is in its folder {FOLDER}/") from None  # fmt: skip
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadInput(str(path), found=error, expected="the configuration of a block drafter") from None
        found.check(str(path), vocab, hidden, layers)
        return found

    def check(self, field: str, vocab: int, hidden: int, layers: int) -> None:
        """Refuse numbers that contradict each other or the target."""
        ids, heads, groups = self.target_layer_ids, self.num_attention_heads, self.num_key_value_heads
        rules: tuple[tuple[str, object, bool, str], ...] = (
            ("vocab_size", self.vocab_size, self.vocab_size == vocab, f"{vocab}, as in the target"),
            ("hidden_size", self.hidden_size, self.hidden_size == hidden, f"{hidden}, as in the target"),
            *((name, getattr(self, name), getattr(self, name) > 0, "above 0") for name in (
                "num_hidden_layers", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps",
                "rope_theta")),
            ("num_attention_heads", heads, heads > 0 and not heads % max(1, groups), f"a multiple of {groups}, the "
             "number of key heads"),
            ("partial_rotary_factor", self.partial_rotary_factor,
             2 <= self.rotary_dim <= self.head_dim and not self.rotary_dim % 2,
             f"an even number of channels, 2 to {self.head_dim}, of head_dim"),
            ("target_layer_ids", list(ids), bool(ids) and list(ids) == sorted({*ids}) and ids[0] >= 0
             and ids[-1] < layers, f"ascending layers of the target, 0 to {layers - 1}"),
            ("mask_token_id", self.mask_token_id, 0 <= self.mask_token_id < vocab, f"a token below {vocab}"),
        )  # fmt: skip
        for name, found, holds, expected in rules:
            if not holds:
                raise BadInput(f"{field}: {name}", found=found, expected=expected)
