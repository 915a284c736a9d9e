"""Drawing a request's tokens: the specification, which each side implements separately.

Leaves out every computation.

Probabilities of a row of logits x
  1. top_k: of all tokens in order of falling logit, equal ones by rising id, the first top_k are kept.
  2. Each has the weight exp(x / temperature); its probability is its part of all kept weights.
  3. top_p: in the same order, the shortest prefix whose probabilities sum to at least top_p is kept.
  4. Again each probability is the weight's part of all kept weights.
  Temperature and top_p are rounded to fp32 first.
  Mirrors: SGLang and FlashInfer with `top_k_first`. Differs: they keep every token that is equal to the last kept
           one; here one order of all tokens decides.

The choice at a node of a window (a decode row and a last prefill chunk are a window of one node)
  The probabilities of the node's children are cumulated in window order; a token that two of them have counts once.
  The first child whose sum is above the node's uniform gives the choice: its token. If there is none, the final uniform
  draws from the probabilities without the children's tokens, cumulated by id: the first token whose sum is above it.
  Each uniform is relative to the total of the sums it is compared with.
  So the walk from the root to the child that was chosen, as long as there is one, with the last choice as bonus, is
  target-only rejection sampling: `own` of a verified window are these choices, and acceptance is as for an argmax.
"""

from collections.abc import Iterator

import msgspec

UNIFORM = 2.0**-24  # every uniform is a multiple of it, below 1: so it is exact in fp32 and in JSON
# Within these ranges fp32 suffices: a logit over a temperature stays finite, a top_k is exact, and a top_p is not 0.
TEMPERATURES = (0.001, 1000.0)  # the smallest and the largest temperature above 0
MOST_KEPT = 2**24  # the largest top_k
LEAST_PART = 2.0**-126  # the smallest top_p: a device may round a smaller number of fp32 to 0, which keeps no token


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the target's choices of a request are drawn. With temperature 0 they are its argmax instead.

    top_k, top_p  None: all tokens (as with a top_k as large as the vocabulary, and with a top_p of 1)
    """

    temperature: float
    top_k: int | None = None
    top_p: float | None = None

    @property
    def draws(self) -> bool:
        return self.temperature > 0

    def wrong(self) -> Iterator[tuple[str, object, str]]:
        """Field, found and expected value of every invalid field."""
        low, high = TEMPERATURES
        if not (self.temperature == 0 or low <= self.temperature <= high):
            yield "temperature", self.temperature, f"0, or {low} to {high}"
        if self.top_k is not None and not 1 <= self.top_k <= MOST_KEPT:
            yield "top_k", self.top_k, f"at least 1, and at most {MOST_KEPT}"
        if self.top_p is not None and not LEAST_PART <= self.top_p <= 1:
            yield "top_p", self.top_p, f"at least {LEAST_PART}, and at most 1"
