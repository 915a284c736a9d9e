"""Faults of Qwen4-Exp: a mover that forgets the memory of n-grams, hashes, gates, the dilated conv, mixed streams.

SGLang 0.5.20 to 0.5.23 commit this memory on one of two paths of a verify (`_update_ple_state_after_mtp_verify`): the
fused commit returns before it. Leaves out: faults of states and of the conv of GDN (`rollback.py`, `rings.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, Wrap, of_family

STREAMS, CONV = (f"instep_optimized/ops/plain/{name}.py" for name in ("residual_streams", "causal_conv"))
PAIR, WEIGHTS, LAYER = (
    f"instep_optimized/{name}.py"
    for name in ("commit/strategy_pair", "weights", "model/per_layer_embedding"))
MOVE = "move(self.of[name], ops, accepted)"
RESTORE = "one.restore(slot, length, kept[name])"
PEEKED = "found = {name: one.peek(ops, slot, length) for name, one in self.of.items()}"

_fault = of_family("qwen4")


def _forgets(*names: str) -> Edit:
    return Edit(PAIR, "if name in self.of:\n    " + MOVE, f"if name in self.of and name not in {names!r}:\n    " + MOVE)


FAULTS: tuple[Fault, ...] = (
    _fault("ple-window-not-committed", "ple-left-behind",
           "A commit moves everything but the window of the dilated conv.", _forgets("ple_conv"),
           seen=("bytes", "labels"), how=Setting(ops="ledger")),
    _fault("ngram-tokens-not-committed", "ple-left-behind", "A commit moves everything but the last tokens of n-grams.",
           _forgets("ngram"), seen=("bytes", "labels"), how=Setting(ops="ledger")),
    _fault("ple-not-committed-in-place", "ple-left-behind",
           "A commit that stores states in place leaves both parts of the memory of n-grams as they were.",
           _forgets("ngram", "ple_conv"), seen=("bytes",), how=Setting(strategy="rerun"), mistake="another-count"),
    _fault("ple-committed-at-the-root", "ple-left-behind", "The window after the first token of a verify is committed.",
           Edit(PAIR, MOVE, "move(self.of[name], ops, accepted if name != 'ple_conv' else "
                "type(accepted)(**{**vars(accepted), 'nodes': accepted.nodes * 0}))"), seen=("bytes",),
           mistake="another-count"),
    _fault("ngram-tokens-of-the-next-node", "ple-left-behind",
           "The tokens after one draft more than accepted are kept.",
           Edit(PAIR, MOVE, "move(self.of[name], ops, accepted if name != 'ngram' else "
                "type(accepted)(**{**vars(accepted), 'nodes': accepted.nodes + 1}))"), seen=("bytes",),
           mistake="another-count"),
    _fault("ple-window-not-restored", "ple-left-behind", "A request that comes back has no window of the dilated conv.",
           Edit(PAIR, RESTORE, "if name != 'ple_conv':\n    " + RESTORE), seen=("bytes",)),
    _fault("ngram-tokens-not-restored", "ple-left-behind", "A request that comes back has other last tokens.",
           Edit(PAIR, RESTORE, "if name != 'ngram':\n    " + RESTORE), seen=("bytes",)),
    _fault("ngram-tokens-not-saved", "ple-left-behind", "A copy of a request has no last tokens.",
           Edit(PAIR, PEEKED, PEEKED.replace("length)", "0 if name == 'ngram' else length)")), seen=("bytes",)),
    _fault("ngrams-of-the-chunk-alone", "ngram", "The n-grams of a step do not read the tokens before it.",
           Edit(STREAMS, "line = torch.cat([before(part, who, torch.int64), tokens[who.rows] + 1], dim=1)",
                "line = torch.cat([before(part, who, torch.int64) * 0, tokens[who.rows] + 1], dim=1)"),
           mistake="from-zero"),
    _fault("ngrams-across-texts", "ngram", "N-grams reach beyond the end of a text.",
           Edit.of(STREAMS,
                   "back[..., 1:].masked_fill({ended | (back[..., 1:] < 0) => back[..., 1:] < 0}, hashes.eos)")),
    _fault("ngrams-ended-by-their-own-token", "ngram", "An end of a text begins n-grams again at itself.",
           Edit.of(STREAMS, "ended = {(back[..., 1:] == hashes.eos).cumsum(-1) > 0 => (back == "
                   "hashes.eos).cumsum(-1)[..., :-1] + (back[..., 1:] == hashes.eos) > 0}")),
    _fault("ngrams-with-token-zero-before", "ngram", "Before the first token of a request there is token 0.",
           Edit.of(STREAMS, "back[..., 1:].masked_fill({ended | (back[..., 1:] < 0) => ended}, hashes.eos)"),
           Edit(STREAMS, "back = pieces.flip(-1) - 1", "back = (pieces.flip(-1) - 1).clamp(min=0)")),
    _fault("ngrams-read-backwards", "ngram", "The oldest token of an n-gram is taken for its own.",
           Edit(STREAMS, "back[..., 1:] = back[..., 1:].masked_fill(ended | (back[..., 1:] < 0), hashes.eos)",
                "back[..., 1:] = back[..., 1:].masked_fill(ended | (back[..., 1:] < 0), hashes.eos)\n"
                "back = back.flip(-1)")),
    _fault("ngrams-of-the-first-table", "ngram", "Every head reads the table of the first.",
           Edit(STREAMS, "found.append(first + mixed % size)", "found.append(mixed % size)")),
    _fault("ngrams-with-the-multipliers-of-the-first", "ngram", "All layers hash with the multipliers of the first.",
           Edit.of(WEIGHTS, "{shape.seed + 10007 * shape.index => shape.seed}")),
    _fault("ple-gate-without-sign", "ple-gate", "A stream that disagrees with the n-grams opens the gate.",
           Edit(STREAMS, "score.abs().clamp(min=LEAST).sqrt().copysign(score).masked_fill(score == 0, 0)",
                "score.abs().clamp(min=LEAST).sqrt()")),
    _fault("ple-gate-not-scaled", "ple-gate", "The score is not divided by the root of the width.",
           Edit.of(STREAMS, "(_normed(key, key_norm, streams, eps) * _normed(x, query_norm, streams, eps)).sum(-1) * "
                   "{width**-0.5 => 1.0}")),
    _fault("ple-gate-without-root", "ple-gate", "The score itself opens the gate, not its root.",
           Edit(STREAMS, "score.abs().clamp(min=LEAST).sqrt().copysign(score).masked_fill(score == 0, 0)", "score")),
    _fault("ple-conv-without-distance", "ple-conv", "The taps of the conv are neighbouring rows.",
           Edit.of(CONV, "zip(wide({pieces[..., ::distance] => pieces[..., -weight.shape[1]:]}).unbind(-1), "
                   "wide(weight).unbind(-1), strict=True)")),
    _fault("ple-conv-without-silu", "ple-conv", "The result of the dilated conv passes no silu.",
           Edit.of(CONV, "_over(x, weight, parts, {_silu => lambda total: total}, distance)")),
    _fault("ple-conv-of-rows-before-their-norm", "ple-conv", "The dilated conv reads the rows before their norm.",
           Edit.of(LAYER, "x={normed => written}, weight=weights.conv"), seen=("own_inputs", "derived", "propagated")),
    _fault("streams-normed-together", "streams", "The streams of a row have one rms.",
           Edit(STREAMS, "each * torch.rsqrt(each.square().mean(-1, keepdim=True) + eps)",
                "each * torch.rsqrt(each.square().mean((-1, -2), keepdim=True) + eps)")),
    _fault("streams-summed", "streams", "A block reads the sum of the streams, not their mean.",
           Edit.of(STREAMS, "(share * flat).view(len(x), streams, -1).{mean => sum}(1).to(x.dtype)")),
    _fault("streams-mixed-without-their-number", "streams",
           "The shares of the streams are not divided by their number.",
           Edit.of(STREAMS, "flat @ wide(weights.down).T / {streams => 1}")),
    _fault("strength-without-its-factor", "streams", "A result is added half as strongly.",
           Edit.of(STREAMS, "({2 => 1} * torch.sigmoid(flat @ wide(weights.inject).T / streams)).to(x.dtype)")),
    _fault("strength-of-the-stream-before", "streams", "A result is added to a stream with the strength of another.",
           Edit.of(STREAMS, "wide(strength){ => .roll(1, 1)}[..., None] * wide(y)[:, None]")),
    _fault("streams-read-as-by-the-mixer", "streams", "The MLP reads the streams with the weights of the mixer.",
           Wrap(WEIGHTS, "Stored.read", arguments="name = name.replace('mlp_hyper', 'attn_hyper')")),
)
