"""The reference's weights of a model, cast once: every run of the same model reads the same tensors.

A replay needs them in two widths and for two readers, and a process runs many replays of one model.
Leaves out: the weights themselves (`instep_reference.weights`), which must not be changed.
"""

import hashlib
from collections.abc import MutableMapping

import torch
from torch.utils.weak import WeakIdKeyDictionary

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.weights import Weights

from ..lru_cache import WEIGHTS

# A tensor: which version of it was read, and the digest of its bytes.
_DIGESTS: MutableMapping[torch.Tensor, tuple[int, bytes]] = WeakIdKeyDictionary()


def weights_of(checkpoint: Checkpoint, dtype: torch.dtype) -> Weights:
    """The weights on the CPU, in this width."""
    key = digest_of(checkpoint, "weights", dtype)
    found: Weights | None = WEIGHTS.get(key)
    if found is None:
        found = Weights.of(checkpoint, dtype)
        WEIGHTS.put(key, found)
    return found


def digest_of(checkpoint: Checkpoint, *said: object) -> bytes:
    """The digest of the model, from its bytes and its configuration, and of the run's other parameters, from their
    repr.
    """
    total = hashlib.sha256(repr((checkpoint.config, said)).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        total.update(repr((name, tensor.dtype, tensor.shape)).encode() + _digest(tensor))
    return total.digest()


def _digest(tensor: torch.Tensor) -> bytes:
    """The digest of its bytes, which are read again only after a write."""
    version = -1 if tensor.is_inference() else tensor._version
    known = _DIGESTS.get(tensor, (-1, b""))
    if known[0] == version >= 0:
        return known[1]
    bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    found = hashlib.sha256(bits.data).digest()
    _DIGESTS[tensor] = version, found
    return found
