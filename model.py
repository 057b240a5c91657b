"""The whole model: a Pre-Norm decoder whose sublayers read depth through Block AttnRes or RD-AttnRes.

Papers: Block Attention Residuals (Block AttnRes, arXiv:2603.15031), Role-Decoupled Attention Residuals (RD-AttnRes,
arXiv:2608.01075). Trunk: RMSNorm, RoPE, causal attention, SwiGLU, no biases, no dropout, head tied to the embedding.

Shapes:  B batch   T tokens   D width   L layers   H hidden width of the MLP   K depth sources of a read   R routes of one or more reads
         V padded vocabulary

In the code                     In the equations
sublayer i = 0 .. 2L-1          attention where i is even, MLP where i is odd
finished  [b_0, ..., b_{n-1}]   b_0 the token embedding; b_n, n >= 1, the sum of the outputs of the sublayers in block n
running   p                     the sum of the outputs so far in the current block; None before its first
sources   s_1 .. s_K            finished, and running where there is one: what a sublayer may read; with 1 / rms(s_k)
query     w   (D,)              a depth route's learned query, zero at the start: its mixture is then uniform
gain      g   (D,)              key_norm.weight: one a read, shared by its routes
direction g * w  (D,)           what the logits project a normalised source on
alphas    alpha  (K, B, T)      softmax over the sources, for each token
lse, beta        (B, T)         log-sum-exp of the finished sources' logits; the share of the running sum, which joins last
mixture   h   (B, T, D)         sum_k alpha_k s_k
"""

import math
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# ---- variants: one entry each ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """How the attention sublayers read depth. `groups` partitions the roles q, k, v in order; a group has one route."""

    groups: tuple[str, ...] = ("qkv",)
    routed: bool = True  # False: no reads at all, x <- x + f(RMSNorm(x))
    tied: bool = False  # every group uses the first one's query
    averaged: bool = False  # every group's mixture is replaced by the mean of all
    frozen: bool = False  # the queries after the first stay zero: uniform mixtures


VARIANTS = {
    "prenorm": Variant(routed=False),  # the standard residual stream
    "block": Variant(),  # the parent, Block AttnRes; with n_blocks = 2 n_layer it is Full AttnRes
    "rd": Variant(("qk", "v")),  # RD-AttnRes: the values have a depth route of their own
    "tied": Variant(("qk", "v"), tied=True),  # control: the parent exactly
    "average": Variant(("qk", "v"), averaged=True),  # control: two routes executed, one input
    "frozen_v": Variant(("qk", "v"), frozen=True),  # control: a uniform value route
    "q_kv": Variant(("q", "kv")),  # beyond the paper: is it the values that want their own depth?
    "q_k_v": Variant(("q", "k", "v")),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and variant. Raises ValueError for sizes that do not fit together."""

    vocab_size: int = 50257  # GPT-2 BPE
    n_layer: int = 16
    n_head: int = 9
    d_model: int = 576
    d_mlp: int = 2528
    context: int = 1024
    n_blocks: int = 8
    variant: str = "rd"
    norm_eps: float = 1e-8  # mixtures are small at initialisation: 1e-6 would already set block apart from prenorm
    rope_theta: float = 10000.0
    init_std: float = 0.02

    def __post_init__(self):
        for name in ("vocab_size", "n_layer", "n_head", "d_model", "d_mlp", "context", "n_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.variant not in VARIANTS:
            raise ValueError(f"variant {self.variant!r} is none of {', '.join(VARIANTS)}")
        if self.d_model % (2 * self.n_head):
            raise ValueError(f"d_model = {self.d_model} must be n_head = {self.n_head} heads of an even width (RoPE turns pairs)")
        if 2 * self.n_layer % self.n_blocks:
            raise ValueError(f"n_blocks = {self.n_blocks} must divide the 2 n_layer = {2 * self.n_layer} sublayers")

    @property
    def padded_vocab(self):
        """Rows of the embedding and of the logits: the next multiple of 64. The padding stays in the loss, as in nanoGPT."""
        return -(-self.vocab_size // 64) * 64

    @property
    def block_size(self):
        """S, consecutive sublayers a block."""
        return 2 * self.n_layer // self.n_blocks


# ---- depth reads -----------------------------------------------------------------------------------------------------


def wide(x):
    """`x` in float32 at least: norms, softmax and mixtures are never computed in half precision."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """y = g * x / sqrt(mean(x^2) + eps), over the last dimension; computed in float32 at least, returned in x's dtype."""

    def __init__(self, config):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.d_model))

    def forward(self, x):
        return F.rms_norm(wide(x), self.weight.shape, wide(self.weight), self.eps).to(x.dtype)


def inverse_rms(x, eps):
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Source(NamedTuple):
    """A depth state (B, T, D) and r = 1 / rms of it (B, T, 1), taken once for all reads; None where nothing is routed.

    r carries no gradient, so nothing but the reads may use it: d(r s) = r ds - r^3 s (s . ds) / D has a part that goes through r, and
    their backwards have that part.
    """

    state: torch.Tensor
    inverse_rms: torch.Tensor | None


def make_source(state, config):
    return Source(state, inverse_rms(wide(state.detach()), config.norm_eps) if VARIANTS[config.variant].routed else None)


# All S sublayers of a block read the same finished sources. So a read has two phases, and both are exact:
#
#     1. when a block begins, for all its routes in one pass over the finished sources:
#            l_k = w . (g * s_k / rms(s_k))     lse = log sum_k exp(l_k)     h' = sum_k exp(l_k - lse) s_k
#     2. in each sublayer that has a running sum p, which joins the softmax late:
#            beta = sigmoid(l_p - lse)          h = (1 - beta) h' + beta p
#
# A block's first sublayer has no p yet: phase 1 completes its read, and normalises it.
#
# Reads are bound by memory: phase 1 alone takes the sources from it, once for S sublayers, as a list that is never stacked.
# Backward is in closed form, and keeps the sources and scalars a token: autograd would keep a product a source and route.
# On a CPU, in float32 or float64, train.py sets a model's read_finished to fused.py's: the same to rounding, one pass over memory each way.


def unrounded(like):
    """A context without autocast: it would run the matmuls of the reads in bf16, in a compiled backward too."""
    return torch.autocast(like.device.type, enabled=False)


def project(s, directions):
    """w . s of R directions w (R, D) with a state s (B, T, D) -> (B, T, R), in float32 at least. Equal directions: bitwise equal columns."""
    if torch.compiler.is_compiling():  # the compiler fuses products and sums with what else reads s, but no matmul
        return torch.stack([(wide(s) * w).sum(-1) for w in directions], -1)
    with unrounded(s):
        return torch.stack([wide(s) @ w for w in directions], -1)


def outer(scalars, s):
    """Sum over tokens of scalars (B, T, R) times a state (B, T, D) -> (R, D). Equal scalars: bitwise equal rows."""
    with unrounded(s):
        return torch.stack([column.flatten() @ wide(s).flatten(0, 1) for column in scalars.unbind(-1)])


def combine(scalars, directions):
    """scalars (B, T, R) and directions (R, D) -> sum over R (B, T, D)."""
    if torch.compiler.is_compiling():
        return sum(c[..., None] * w for c, w in zip(scalars.unbind(-1), directions))
    with unrounded(directions):
        return scalars @ directions


def state_gradient(s, r, directions, logits, d_logits, alphas, d_mixtures):
    """Gradient of s (B, T, D) with r = 1 / rms(s) (B, T, 1), through R logits l = r (w . s), w a direction, and as a part of R mixtures:

    sum over R of alpha G + dl r w, less sum over R of dl l r^2 s / D, which is what goes through r. In s's dtype.
    """
    d_state = combine(d_logits * r, directions) - (d_logits * logits).sum(-1, keepdim=True) * (r * r / s.shape[-1]) * wide(s)
    for d, alpha in zip(d_mixtures, alphas.unbind(-1)):
        d_state = torch.addcmul(d_state, alpha[..., None], d)
    return d_state.to(s.dtype)


def first_order(backward):
    """A backward in closed form, which has no derivative itself. once_differentiable alone would not always say so."""

    once = once_differentiable(backward)

    def checked(ctx, *gradients):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise RuntimeError("the depth reads have first derivatives only: no create_graph=True through them")
        return once(ctx, *gradients)

    return checked


class MixFinished(torch.autograd.Function):
    """Phase 1: directions g * w (R, D), K states and their K inverse rms -> lse (B, T, R), logits (K, B, T, R), R times h' (B, T, D).

    With G = dL/dh':  da_k = G . s_k     dl_k = alpha_k (da_k - sum_j alpha_j da_j + dlse)     ds_k = state_gradient
    and, summed over tokens, d(g w) = sum_k dl_k r_k s_k. logits have no gradient: they are for looking at.
    """

    @staticmethod
    def forward(ctx, directions, K, *sources):
        states, inverses = sources[:K], sources[K:]
        logits = torch.stack([project(s, directions) * r for s, r in zip(states, inverses)])
        lse = logits.logsumexp(0)
        alphas = (logits - lse).exp()
        mixtures = [wide(states[0]) * alpha[..., None] for alpha in alphas[0].unbind(-1)]
        for s, of_source in zip(states[1:], alphas[1:]):
            for mixture, alpha in zip(mixtures, of_source.unbind(-1)):
                mixture.addcmul_(alpha[..., None], wide(s))
        ctx.save_for_backward(directions, logits, lse, *sources)
        ctx.mark_non_differentiable(logits)
        return lse, logits, *mixtures

    @staticmethod
    @first_order
    def backward(ctx, d_lse, _, *d_mixtures):
        directions, logits, lse, *sources = ctx.saved_tensors
        states, inverses = sources[: len(logits)], sources[len(logits) :]
        alphas = (logits - lse).exp()
        d_alphas = torch.stack([torch.stack([(d * wide(s)).sum(-1) for d in d_mixtures], -1) for s in states])
        d_logits = alphas * (d_alphas - (alphas * d_alphas).sum(0) + d_lse)
        d_directions = sum(outer(d_logit * r, s) for s, r, d_logit in zip(states, inverses, d_logits))
        each = zip(states, inverses, logits, d_logits, alphas)
        d_states = [state_gradient(s, r, directions, logit, d_logit, alpha, d_mixtures) for s, r, logit, d_logit, alpha in each]
        return d_directions, None, *d_states, *[None] * len(inverses)


class MergeRunning(torch.autograd.Function):
    """Phase 2: directions (R, D), lse (B, T, R), p (B, T, D), its inverse rms, R times h' -> betas (B, T, R), R times h (B, T, D).

    With G = dL/dh:  dl_p = beta G . (p - h)     dlse = -dl_p     dh' = (1 - beta) G     dp = state_gradient, with beta for alpha.
    """

    @staticmethod
    def forward(ctx, directions, lse, p, r, *mixtures):
        logits = project(p, directions) * r
        betas = torch.sigmoid(logits - lse)
        merged = [torch.lerp(mixture, wide(p), beta[..., None]) for mixture, beta in zip(mixtures, betas.unbind(-1))]
        ctx.save_for_backward(directions, p, r, logits, betas, *merged)
        ctx.mark_non_differentiable(betas)
        return betas, *merged

    @staticmethod
    @first_order
    def backward(ctx, _, *d_merged):
        directions, p, r, logits, betas, *merged = ctx.saved_tensors
        d_logits = betas * torch.stack([(d * (wide(p) - h)).sum(-1) for d, h in zip(d_merged, merged)], -1)
        d_p = state_gradient(p, r, directions, logits, d_logits, betas, d_merged)
        d_mixtures = [d - beta[..., None] * d for d, beta in zip(d_merged, betas.unbind(-1))]
        return outer(d_logits * r, p), -d_logits, d_p, None, *d_mixtures


class Partial(NamedTuple):
    """A read after phase 1, for its R routes."""

    directions: torch.Tensor  # (R, D)
    lse: torch.Tensor  # (B, T, R)
    mixtures: list  # R times h' (B, T, D), in float32 at least; for a block's first read, which needs no phase 2, its sublayer's inputs


def mix_finished(directions, states, inverses, first_read, norm):
    """What MixFinished gives, the first read's mixtures already its sublayer's inputs, by `norm`, and the states for later reads.

    The states are those that came in. Another mix_finished may give outputs of its own, to have the later reads' gradients arrive there.
    """
    lse, logits, *mixtures = MixFinished.apply(directions, len(states), *states, *inverses)
    groups = len(first_read.queries)
    return lse, logits, [*first_read.inputs(mixtures[:groups], norm), *mixtures[groups:]], states


def read_finished(finished, reads, norm, mix=mix_finished):
    """Phase 1 for a block's reads, `norm` the first one's -> a Partial a read, logits (K, B, T, R) a read, the sources for later reads."""
    states, inverses = zip(*finished)
    directions = [read.directions() for read in reads]
    routes = [len(d) for d in directions]
    lse, logits, mixtures, states = mix(torch.cat(directions), states, inverses, reads[0], norm)
    starts = [sum(routes[:i]) for i in range(len(routes))]
    partials = [Partial(d, l, mixtures[at : at + R]) for d, l, at, R in zip(directions, lse.split(routes, -1), starts, routes)]
    return partials, logits.split(routes, -1), [Source(s, r) for s, r in zip(states, inverses)]


class DepthRead(nn.Module):
    """One learned softmax mixture of the depth sources a group (Block AttnRes; RD-AttnRes gives the values a second one):

        l_k = w . (g * s_k / rms(s_k))      alpha = softmax over k of l      h = sum_k alpha_k s_k

    There is no 1/sqrt(D), and the sources themselves are not normalised.
    """

    def __init__(self, config, groups=("all",)):
        super().__init__()
        variant = VARIANTS[config.variant]
        self.averaged = variant.averaged
        self.key_norm = RMSNorm(config)  # for its gain; the norm itself is the source's, the same for all reads
        self.queries = []  # names; a group that is tied shares the first one's
        for group in groups:
            first = group == groups[0]
            self.queries.append("query" if first or variant.tied else f"query_{group}")
            query = nn.Parameter(torch.zeros(config.d_model), requires_grad=first or not variant.frozen)
            if self.queries[-1] not in self._parameters:
                self.register_parameter(self.queries[-1], query)

    def directions(self):
        """g * w of each group (R, D)."""
        return wide(self.key_norm.weight) * torch.stack([wide(getattr(self, name)) for name in self.queries])

    def inputs(self, mixtures, norm):
        """R mixtures (B, T, D) -> what the sublayer takes, RMSNorm of each; half where the weights are: model.bfloat16()."""
        if self.averaged and len(mixtures) > 1:
            mixtures = [sum(mixtures) / len(mixtures)] * len(mixtures)
        return [norm(h.to(norm.weight.dtype)) for h in mixtures]

    def forward(self, partial, running, norm):
        """Phase 2 -> a list of inputs (B, T, D), one a group, and betas (B, T, R), None where there is no running sum."""
        if running is None:
            return partial.mixtures, None
        betas, *mixtures = MergeRunning.apply(partial.directions, partial.lse, *running, *partial.mixtures)
        return self.inputs(mixtures, norm), betas


def whole_alphas(logits, partial, betas):
    """logits of phase 1 (K, B, T, R) and betas of phase 2, if any -> R alphas over all sources (K or K + 1, B, T)."""
    alphas = (logits - partial.lse).exp()
    if betas is not None:
        alphas = torch.cat([alphas * (1 - betas), betas[None]])
    return list(alphas.unbind(-1))


class StreamRead(nn.Module):
    """What prenorm has in place of a depth read: its one source, the residual stream."""

    def forward(self, partial, running, norm):
        return [norm(running.state)], None


# ---- sublayers -------------------------------------------------------------------------------------------------------


def rope_angles(start, length, config, like):
    """cos, sin (length, head_dim / 2) for positions start .. start + length - 1; f_j = theta^(-2j / head_dim)."""
    head_dim = config.d_model // config.n_head
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequencies = config.rope_theta ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim)
    angles = torch.arange(start, start + length, device=like.device, dtype=dtype)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x, rope):
    """RoPE on halves: (a, b) -> (a cos - b sin, b cos + a sin). x (B, heads, T, head_dim)."""
    cos, sin = rope
    a, b = wide(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head attention whose roles may read different inputs: Q, K, V are projected from the x of their group."""

    def __init__(self, config):
        super().__init__()
        D = config.d_model
        self.n_head = config.n_head
        self.rows = [len(group) * D for group in VARIANTS[config.variant].groups]  # of qkv.weight, a group
        self.qkv = nn.Linear(D, 3 * D, bias=False)  # rows: q, k, v; within a role, heads are contiguous
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, inputs, rope, cache=None):
        """inputs: one (B, T, D) a group. cache: a dict that holds this layer's past keys and values, for generation."""
        B, T, D = inputs[0].shape
        weights = self.qkv.weight.split(self.rows)
        roles = [role for x, weight in zip(inputs, weights) for role in F.linear(x, weight).split(D, -1)]
        q, k, v = (role.view(B, T, self.n_head, -1).transpose(1, 2) for role in roles)
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache["k"], cache["v"] = k, v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)  # T = 1 with a past: that token sees all of it
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate) * up)."""

    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_mlp, bias=False)  # rows: gate, up
        self.down = nn.Linear(config.d_mlp, config.d_model, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """Two sublayers. Each reads depth, normalises, computes, and writes its output back: p <- p + output."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        variant = VARIANTS[config.variant]
        self.attn_read = DepthRead(config, variant.groups) if variant.routed else StreamRead()
        self.attn_norm = RMSNorm(config)  # one gain for all groups
        self.attn = Attention(config)
        self.mlp_read = DepthRead(config) if variant.routed else StreamRead()
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config)

    def attend(self, partial, running, rope, cache=None):
        """The attention sublayer -> the new running sum and the read's betas."""
        inputs, betas = self.attn_read(partial, running, self.attn_norm)
        return self.write(self.attn(inputs, rope, cache), running), betas

    def transform(self, partial, running):
        """The MLP sublayer -> the new running sum and the read's betas."""
        (x,), betas = self.mlp_read(partial, running, self.mlp_norm)
        return self.write(self.mlp(x), running), betas

    def write(self, output, running):
        return make_source(output if running is None else running.state + output, self.config)


# ---- the model -------------------------------------------------------------------------------------------------------


class GPT(nn.Module):
    read_finished = staticmethod(read_finished)

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.variant = VARIANTS[config.variant]
        self.tok_emb = nn.Embedding(config.padded_vocab, config.d_model)  # also the output head
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.final_read = DepthRead(config) if self.variant.routed else StreamRead()
        self.final_norm = RMSNorm(config)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Matrices from N(0, init_std), those that write into the sum divided by sqrt(2L); queries 0, gains 1.

        Only matrices draw from the global generator, and every variant has the same ones in the same order: after the same
        seed, the parameters that two variants share are bitwise equal.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes = name.endswith(("attn.out.weight", "mlp.down.weight"))
                parameter.normal_(0.0, self.config.init_std / (math.sqrt(2 * self.config.n_layer) if writes else 1.0))

    def states(self, idx, caches=None, start=0, trace=None):
        """Token ids (B, T) at positions start .. start + T - 1 -> final normalised states (B, T, D).

        caches: one dict a layer, filled and used by generation. trace: a list that collects each sublayer's alphas by group.
        """
        if idx.ndim != 2 or not idx.numel():
            raise ValueError(f"token ids of shape {tuple(idx.shape)} are not (B, T) with at least one token")
        if start + idx.shape[1] > self.config.context:
            raise ValueError(f"{start + idx.shape[1]} tokens are more than the context of {self.config.context}")
        embedding = self.tok_emb(idx)
        if torch.is_autocast_enabled(idx.device.type):
            embedding = embedding.to(torch.get_autocast_dtype(idx.device.type))  # sources in bf16: half the bytes of a read
        rope = rope_angles(start, idx.shape[1], self.config, self.tok_emb.weight)
        routed, S = self.variant.routed, self.config.block_size
        first = make_source(embedding, self.config)
        finished, running = ([first], None) if routed else ([], first)
        reads, norms = zip(*((read, norm) for l in self.layers for read, norm in ((l.attn_read, l.attn_norm), (l.mlp_read, l.mlp_norm))))
        partials, logits = [None] * S, None
        for sublayer, read in enumerate(reads):
            layer, at = self.layers[sublayer // 2], sublayer % S
            if routed and at == 0:
                partials, logits, finished = self.read_finished(finished, reads[sublayer : sublayer + S], norms[sublayer])
            if sublayer % 2 == 0:
                running, betas = layer.attend(partials[at], running, rope, caches and caches[sublayer // 2])
                names = self.variant.groups
            else:
                running, betas = layer.transform(partials[at], running)
                names = ("mlp",)
            if trace is not None:
                trace.append(dict(zip(names, whole_alphas(logits[at], partials[at], betas))))
            if routed and at == S - 1:
                finished, running = [*finished, running], None
        partial = None
        if routed:
            (partial,), logits, _ = self.read_finished(finished, [self.final_read], self.final_norm)
            if trace is not None:
                trace.append(dict(zip(["final"], whole_alphas(logits[0], partial, None))))
        (x,), _ = self.final_read(partial, running, self.final_norm)
        return x

    def loss(self, states, targets):
        logits = F.linear(states, self.tok_emb.weight)
        return F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten())

    def forward(self, idx, targets=None):
        """idx (B, T) -> (logits (B, T, V), None); with targets (B, T) -> (None, mean NLL in nats). Targets of -100 do not count."""
        states = self.states(idx)
        return (F.linear(states, self.tok_emb.weight), None) if targets is None else (None, self.loss(states, targets))

    @torch.no_grad()
    def routes(self, idx):
        """What each read attends to: a list of L dicts {group: alphas (K, B, T), ..., "mlp": alphas}, then {"final": alphas}.

        The K sources are b_0, b_1, ... and, last, the running sum where the read's block has an output already.
        """
        if not self.variant.routed:
            raise ValueError(f"variant {self.config.variant!r} has no depth routes: its sublayers read the residual stream")
        trace = []
        self.states(idx, trace=trace)
        *sublayers, final = trace
        return [attn | mlp for attn, mlp in zip(sublayers[::2], sublayers[1::2])] + [final]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Continue idx (B, T) by max_new_tokens ids < vocab_size -> (B, T + max_new_tokens). Temperature 0 takes the likeliest.

        Keys and values are cached while the text fits the context; past it, each token is predicted from the last `context`
        ones, recomputed, since their positions move.
        """
        if idx.ndim != 2 or idx.shape[1] == 0:
            raise ValueError(f"generation continues ids (B, T) of at least one token, not of shape {tuple(idx.shape)}")
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature = {temperature} must be 0 or more, and finite")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k = {top_k} must be at least 1")
        caches, cached = [{} for _ in self.layers], 0
        for _ in range(max_new_tokens):
            if idx.shape[1] <= self.config.context:
                states = self.states(idx[:, cached:], caches, cached)
                cached = idx.shape[1]
            else:
                states = self.states(idx[:, -self.config.context :])
            logits = wide(F.linear(states[:, -1], self.tok_emb.weight))[:, : self.config.vocab_size]
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                if top_k is not None and top_k < logits.shape[-1]:
                    logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
                token = torch.multinomial(((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1), 1, generator=generator)
            idx = torch.cat([idx, token], 1)
        return idx
