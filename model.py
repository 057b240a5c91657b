"""A Pre-Norm decoder whose sublayers read depth: the residual stream, Block AttnRes, RD-AttnRes and its controls.

Papers: Block Attention Residuals (Block AttnRes, arXiv:2603.15031); Role-Decoupled Attention Residuals (RD-AttnRes,
arXiv:2608.01075). Trunk: RMSNorm, RoPE, causal attention, SwiGLU, no biases, no dropout, head tied to the embedding.

A read stands before every sublayer and before the head. It has one route per group of the roles q, k, v: a query, its
weights and its mixture.

    B batch   T tokens   D width   L layers   N blocks   S = 2L / N sublayers per block   K sources, R routes of a read

In the code              In the equations; K x (B, T, D) is a list of K tensors
sublayer i = 0 .. 2L-1   attention where i is even, MLP where i is odd; S of them in a row are block n = 1 .. N
sources    K x (B, T, D) s_1, ..., s_K: the embedding b_0, the sum of the outputs of each finished block b_1, b_2, ...,
                         and last, once the current block has an output, their sum so far p
queries    R x (D,)      w: one learned vector per route, zero at the start: its mixture is then uniform
key_gain   (D,)          g: the gain of the RMSNorm on the keys, one per read, shared by its routes
alphas     R x (K, B, T) alpha: the weights of the sources, per token
inputs     R x (B, T, D) x: RMSNorm of the mixtures h, what the sublayer computes from
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


def depth_read(sources, queries, key_gain, eps, norm=None):
    """Softmax mixtures of depth: K sources (B, T, D), R queries (D,) -> R mixtures (B, T, D), R alphas (K, B, T).

        rms(s) = sqrt(mean(s^2) + eps)      l_k = w . (g * s_k / rms(s_k))      alpha = softmax over k of l
        h = sum_k alpha_k s_k               x = norm(h)

    There is no 1/sqrt(D), and the sources are not normalised in the mixture. With `norm`, the sublayer's pre-norm, x
    is returned, else h. All is computed in float32 at least; what is returned has the sources' dtype.
    """
    s = [at_least_float32(source) for source in sources]
    rms = [(s_k.square().mean(-1) + eps).sqrt() for s_k in s]
    inputs, alphas = [], []
    for w in queries:
        l = torch.stack([(w * key_gain * s_k).sum(-1) / rms_k for s_k, rms_k in zip(s, rms)])
        alpha = l.softmax(0)
        h = sum(alpha_k[..., None] * s_k for alpha_k, s_k in zip(alpha, s))
        inputs.append((h if norm is None else norm(h)).to(sources[0].dtype))
        alphas.append(alpha)
    return inputs, alphas


def rms_norm(x, gain, eps):
    """gain * x / sqrt(mean(x^2) + eps) over the last dimension, in float32 at least, returned in x's dtype."""
    return F.rms_norm(at_least_float32(x), gain.shape, at_least_float32(gain), eps).to(x.dtype)


def at_least_float32(x):
    """Norms, softmax and mixtures are never computed in half precision."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class Variant:
    """How the attention sublayers read depth. `groups` cuts 'qkv' into pieces; each piece has one route."""

    groups: tuple[str, ...] = ("qkv",)
    routed: bool = True  # False: no reads, x <- x + f(RMSNorm(x))
    tied: bool = False  # every group uses the first one's query
    averaged: bool = False  # every group's mixture is replaced by the mean of all
    frozen: bool = False  # the queries after the first stay zero: uniform mixtures

    def __post_init__(self):
        if "".join(self.groups) != "qkv":
            raise ValueError(f"groups {self.groups} must cut 'qkv', the rows of qkv.weight, such as ('qk', 'v')")


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
            raise ValueError(f"d_model = {self.d_model} must be n_head = {self.n_head} heads of an even width (RoPE)")
        if 2 * self.n_layer % self.n_blocks:
            raise ValueError(f"n_blocks = {self.n_blocks} must divide the 2 n_layer = {2 * self.n_layer} sublayers")

    @property
    def padded_vocab(self):
        """Rows of the embedding and the logits: the next multiple of 64. The padding is in the loss, as in nanoGPT."""
        return -(-self.vocab_size // 64) * 64

    @property
    def sublayers_per_block(self):
        """S."""
        return 2 * self.n_layer // self.n_blocks


class RMSNorm(nn.Module):
    """rms_norm with a learned gain, one at the start."""

    def __init__(self, config):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.d_model))

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class DepthRead(nn.Module):
    """A read with one route per role group. The first group's query is `query`, a further one's `query_<group>`."""

    def __init__(self, config, groups):
        super().__init__()
        self.variant = variant = VARIANTS[config.variant]
        self.key_norm = RMSNorm(config)  # its gain alone is used here: depth_read normalises the keys
        self.names = ["query" if group == groups[0] or variant.tied else f"query_{group}" for group in groups]
        for name in dict.fromkeys(self.names):
            trained = name == "query" or not variant.frozen
            self.register_parameter(name, nn.Parameter(torch.zeros(config.d_model), requires_grad=trained))

    def forward(self, sources, norm, read=depth_read):
        """K sources (B, T, D) -> inputs, `norm` of each group's mixture, and alphas."""
        queries = [getattr(self, name) for name in self.names]
        averaged = self.variant.averaged and len(queries) > 1  # not in reads of one route, the MLP's and the head's
        key_gain, eps = self.key_norm.weight, self.key_norm.eps
        inputs, alphas = read(sources, queries, key_gain, eps, None if averaged else norm)
        return [norm(sum(inputs) / len(inputs))] * len(inputs) if averaged else inputs, alphas


class StreamRead(nn.Module):
    """What prenorm has in place of a DepthRead: its one source is the residual stream."""

    def forward(self, sources, norm, read=None):
        return [norm(sources[-1])], []


class Attention(nn.Module):
    """Causal attention whose roles may have different inputs: q, k and v are projected from the x of their group."""

    def __init__(self, config):
        super().__init__()
        D = config.d_model
        self.n_head = config.n_head
        self.rows = [len(group) * D for group in VARIANTS[config.variant].groups]  # of qkv.weight, per group
        self.qkv = nn.Linear(D, 3 * D, bias=False)  # rows: q, k, v; within a role, heads are contiguous
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, inputs, rope, cache=None):
        """One input (B, T, D) a group -> (B, T, D). cache: a dict with this layer's past keys and values."""
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


def rope_angles(config, like):
    """cos, sin (context, head_dim / 2) of position * f_j, f_j = theta^(-2j / head_dim), in float32 at least."""
    head_dim = config.d_model // config.n_head
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequencies = config.rope_theta ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim)
    angles = torch.arange(config.context, device=like.device, dtype=dtype)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x, rope):
    """RoPE on halves: (a, b) -> (a cos - b sin, b cos + a sin). x (B, heads, T, head_dim)."""
    (cos, sin), (a, b) = rope, at_least_float32(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate) * up). Two products, as the halves of one would be joined again in the backward."""

    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_mlp, bias=False)  # rows: gate, up
        self.down = nn.Linear(config.d_mlp, config.d_model, bias=False)

    def forward(self, x):
        gate, up = (F.linear(x, weight) for weight in self.gate_up.weight.chunk(2))
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """Two sublayers, attention and MLP, each with its read of depth and its pre-norm."""

    def __init__(self, config):
        super().__init__()
        variant = VARIANTS[config.variant]
        self.attn_read = DepthRead(config, variant.groups) if variant.routed else StreamRead()
        self.attn_norm = RMSNorm(config)  # one gain for all groups
        self.attn = Attention(config)
        self.mlp_read = DepthRead(config, ("mlp",)) if variant.routed else StreamRead()
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config)


class GPT(nn.Module):
    """The decoder. `read` computes its depth reads: depth_read, or a faster function of the same arguments."""

    def __init__(self, config):
        super().__init__()
        self.config, self.variant, self.read = config, VARIANTS[config.variant], depth_read
        self.tok_emb = nn.Embedding(config.padded_vocab, config.d_model)  # also the output head
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.final_read = DepthRead(config, ("final",)) if self.variant.routed else StreamRead()
        self.final_norm = RMSNorm(config)
        self.rope = rope_angles(config, self.tok_emb.weight)  # a table, or a compiled layer would take cosines anew
        self.init_weights()

    def _apply(self, fn, recurse=True):
        """What moves or casts the parameters moves RoPE's table too, without rounding it to less than float32."""
        super()._apply(fn, recurse)
        self.rope = rope_angles(self.config, self.tok_emb.weight)
        return self

    @torch.no_grad()
    def init_weights(self):
        """Matrices from N(0, init_std), those that write into a sum / sqrt(2L): the same draws in every variant."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes = name.endswith(("attn.out.weight", "mlp.down.weight"))
                parameter.normal_(0.0, self.config.init_std / (math.sqrt(2 * self.config.n_layer) if writes else 1.0))

    def write(self, i, output, sources):
        """Sublayer i writes back: p <- p + output. A block's first output is a new p; the p before it stays as b_n."""
        if self.variant.routed and i % self.config.sublayers_per_block == 0:
            return [*sources, output]
        return [*sources[:-1], sources[-1] + output]

    def states(self, idx, caches=None, start=0, read=None, trace=None):
        """Token ids (B, T) at positions start .. start + T - 1 -> final normalised states (B, T, D).
        caches: one dict per layer, for generation. trace: a list that takes each read's alphas (a kernel has none)."""
        if idx.ndim != 2 or not idx.numel():
            raise ValueError(f"token ids of shape {tuple(idx.shape)} are not (B, T) with at least one token")
        if start + idx.shape[1] > self.config.context:
            raise ValueError(f"{start + idx.shape[1]} tokens are more than the context of {self.config.context}")
        read, trace = read or self.read, [] if trace is None else trace
        b_0 = self.tok_emb(idx)
        if torch.is_autocast_enabled(idx.device.type):
            b_0 = b_0.to(torch.get_autocast_dtype(idx.device.type))  # so all sources are in bf16: half the bytes
        # the table is elsewhere in a model that was built on meta and had its weights assigned
        rope = self.rope if self.rope[0].device == idx.device else rope_angles(self.config, self.tok_emb.weight)
        sources, rope = [b_0], [x[start : start + idx.shape[1]] for x in rope]
        for i in range(2 * self.config.n_layer):
            layer = self.layers[i // 2]
            if i % 2 == 0:
                inputs, alphas = layer.attn_read(sources, layer.attn_norm, read)
                output = layer.attn(inputs, rope, caches and caches[i // 2])
            else:
                (x,), alphas = layer.mlp_read(sources, layer.mlp_norm, read)
                output = layer.mlp(x)
            sources = self.write(i, output, sources)
            trace.append(alphas)
        (x,), alphas = self.final_read(sources, self.final_norm, read)
        trace.append(alphas)
        return x

    def forward(self, idx, targets=None):
        """idx (B, T) -> (logits (B, T, padded_vocab), None); with targets (B, T), -100 for none -> (None, mean NLL)."""
        logits = F.linear(self.states(idx), self.tok_emb.weight)
        if targets is None:
            return logits, None
        return None, F.cross_entropy(at_least_float32(logits).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def routes(self, idx):
        """L dicts {group: alpha (K, B, T), ..., "mlp": alpha}, then {"final": alpha}; the last source is p, if any."""
        if not self.variant.routed:
            raise ValueError(f"variant {self.config.variant!r} has no depth routes: it reads the residual stream")
        self.states(idx, read=depth_read, trace=(trace := []))
        reads = iter(trace)
        layers = [dict(zip(self.variant.groups, next(reads))) | {"mlp": next(reads)[0]} for _ in self.layers]
        return [*layers, {"final": next(reads)[0]}]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Continue idx (B, T) by ids < vocab_size -> (B, T + max_new_tokens). Temperature 0 takes the likeliest."""
        if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature = {temperature} must be 0 or more and finite, top_k = {top_k} at least 1")
        caches, cached = [{} for _ in self.layers], 0
        for _ in range(max_new_tokens):
            if idx.shape[-1] <= self.config.context:
                states, cached = self.states(idx[..., cached:], caches, cached), idx.shape[-1]
            else:  # past the context positions move: all is recomputed
                states = self.states(idx[..., -self.config.context :])
            logits = at_least_float32(F.linear(states[:, -1], self.tok_emb.weight))[:, : self.config.vocab_size]
            token = logits.argmax(-1, keepdim=True)
            if temperature > 0:
                if top_k is not None and top_k < logits.shape[-1]:
                    logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
                p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
                token = torch.multinomial(p, 1, generator=generator)
            idx = torch.cat([idx, token], 1)
        return idx
