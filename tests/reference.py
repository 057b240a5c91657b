"""A slow second opinion: the model written from the equations alone. It imports nothing from model.py.

Papers: Block AttnRes arXiv:2603.15031, role-decoupled routes (RD-AttnRes) arXiv:2608.01075, RMSNorm arXiv:1910.07467,
RoPE arXiv:2104.09864 (on halves), SwiGLU arXiv:2002.05202. Everything is elementary torch in the dtype of `params`,
float64 in the tests, and autograd gives the reference gradients. Nothing is cached, fused, grouped or running.

    B batch   T tokens   D width   L layers   N blocks   S = 2L / N sublayers a block   K sources of a read
    H heads   E = D / H head width   F width of the MLP   V padded vocabulary

Sublayer i = 0 .. 2L-1 is attention if i is even, MLP if odd. Its output is o_i (B, T, D), its block n = i // S, from 0:

    b_0 = embedding                            b_m = sum of o_j over the sublayers j of the m-th block, m = 1 .. N
    p   = sum of o_j, nS <= j < i              the current block so far; absent for the first sublayer of a block
    sources of sublayer i                      [b_0, ..., b_n] and then p, if present
    sources of the output head                 [b_0, ..., b_N]

A read with route query w (D,) and key gain g (D,), the gain shared by all routes of the read:

    rms(s) = sqrt(mean(s^2) + eps)     l_k = w . (g * s_k / rms(s_k))     alpha = softmax_k(l)     h = sum_k alpha_k s_k

Attention reads once for each of the roles q, k and v. Roles with one query compute the same mixture.
"""

import math

import torch

# The query parameter that each of the roles q, k, v reads with. UNIFORM never learns: every source counts 1/K.
UNIFORM = "uniform"
QUERY_OF_ROLE = {
    "block": {"q": "query", "k": "query", "v": "query"},
    "rd": {"q": "query", "k": "query", "v": "query_v"},
    "tied": {"q": "query", "k": "query", "v": "query"},
    "average": {"q": "query", "k": "query", "v": "query_v"},
    "frozen_v": {"q": "query", "k": "query", "v": UNIFORM},
    "q_kv": {"q": "query", "k": "query_kv", "v": "query_kv"},
    "q_k_v": {"q": "query", "k": "query_k", "v": "query_v"},
}
# The names under which routes are reported, and the role whose weights each reports.
REPORTED_ROUTES = {
    "block": {"qkv": "q"},
    "rd": {"qk": "q", "v": "v"},
    "tied": {"qk": "q", "v": "v"},
    "average": {"qk": "q", "v": "v"},
    "frozen_v": {"qk": "q", "v": "v"},
    "q_kv": {"q": "q", "kv": "k"},
    "q_k_v": {"q": "q", "k": "k", "v": "v"},
}


def forward(params, config, idx):
    """params {name: tensor}, a config like ModelConfig, idx (B, T) -> {"logits": (B, T, V), "routes": [...]}.

    "routes" has one dict a layer, {route name: alpha (K, B, T), "mlp": alpha}, then {"final": alpha}. prenorm has none.
    """
    L, eps = config.n_layer, config.norm_eps
    embedding = params["tok_emb.weight"][idx]
    outputs = []  # o_0 .. o_{i-1}: every sublayer's output, kept apart until somebody needs a sum
    routes = []

    for i in range(2 * L):
        layer, is_attention = f"layers.{i // 2}.", i % 2 == 0
        kind = "attn" if is_attention else "mlp"
        norm_gain = params[f"{layer}{kind}_norm.weight"]

        if config.variant == "prenorm":
            stream = total([embedding] + outputs)
            inputs = {role: stream for role in "qkv"} if is_attention else stream
        else:
            sources = sources_of_sublayer(i, embedding, outputs, config)
            read = f"{layer}{kind}_read."
            key_gain = params[read + "key_norm.weight"]
            if is_attention:
                inputs, alphas = {}, {}
                for role, query in QUERY_OF_ROLE[config.variant].items():
                    if query == UNIFORM:
                        alphas[role] = uniform_weights(sources)
                    else:
                        alphas[role] = route_weights(params[read + query], key_gain, sources, eps)
                    inputs[role] = mixture(alphas[role], sources)
                if config.variant == "average":  # every role gets the mean of the two mixtures
                    mean = (inputs["q"] + inputs["v"]) / 2
                    inputs = {role: mean for role in "qkv"}
                routes.append({name: alphas[role] for name, role in REPORTED_ROUTES[config.variant].items()})
            else:
                alpha = route_weights(params[read + "query"], key_gain, sources, eps)
                inputs = mixture(alpha, sources)
                routes[-1]["mlp"] = alpha

        if is_attention:
            x = {role: rms_norm(inputs[role], norm_gain, eps) for role in "qkv"}
            w_qkv, w_out = params[layer + "attn.qkv.weight"], params[layer + "attn.out.weight"]
            outputs.append(attention(x["q"], x["k"], x["v"], w_qkv, w_out, config))
        else:
            x = rms_norm(inputs, norm_gain, eps)
            w_gate_up, w_down = params[layer + "mlp.gate_up.weight"], params[layer + "mlp.down.weight"]
            outputs.append(mlp(x, w_gate_up, w_down, config))

    if config.variant == "prenorm":
        h = total([embedding] + outputs)
    else:
        sources = [embedding] + [block_sum(n, outputs, config) for n in range(config.n_blocks)]
        alpha = route_weights(params["final_read.query"], params["final_read.key_norm.weight"], sources, eps)
        h = mixture(alpha, sources)
        routes.append({"final": alpha})
    logits = rms_norm(h, params["final_norm.weight"], eps) @ params["tok_emb.weight"].T  # the head is the embedding
    return {"logits": logits, "routes": routes}


def nll(logits, targets):
    """logits (B, T, V), targets (B, T) -> mean of log sum exp(logits) - logits[target] in nats. -100 is no target."""
    terms = []
    for b in range(targets.shape[0]):
        for t in range(targets.shape[1]):
            if targets[b, t] != -100:
                terms.append(torch.logsumexp(logits[b, t], dim=0) - logits[b, t, targets[b, t]])
    return total(terms) / len(terms)


# ---- sources ---------------------------------------------------------------------------------------------------------


def sublayers_of_block(n, config):
    """The indices of the sublayers in the n-th block, n = 0 .. N-1."""
    S = 2 * config.n_layer // config.n_blocks
    return range(n * S, (n + 1) * S)


def block_sum(n, outputs, config):
    """Sum of the outputs of the n-th block, n = 0 .. N-1: (B, T, D). The embedding has no part in it."""
    return total([outputs[j] for j in sublayers_of_block(n, config)])


def sources_of_sublayer(i, embedding, outputs, config):
    """The K tensors (B, T, D) that sublayer i may read, given the outputs of the sublayers before it."""
    n = next(n for n in range(config.n_blocks) if i in sublayers_of_block(n, config))
    sources = [embedding] + [block_sum(m, outputs, config) for m in range(n)]
    current = [outputs[j] for j in sublayers_of_block(n, config) if j < i]
    if current:
        sources.append(total(current))
    return sources


def total(tensors):
    """Sum of a non-empty list, without the 0 that Python's sum() starts from."""
    result = tensors[0]
    for tensor in tensors[1:]:
        result = result + tensor
    return result


# ---- the depth read --------------------------------------------------------------------------------------------------


def route_weights(query, key_gain, sources, eps):
    """query (D,), key_gain (D,), K sources (B, T, D) -> alpha (K, B, T), which sums to one over K."""
    l = []
    for s in sources:
        rms = torch.sqrt((s * s).mean(dim=-1, keepdim=True) + eps)
        l.append((query * key_gain * s / rms).sum(dim=-1))
    return torch.stack(softmax(l))


def uniform_weights(sources):
    """K sources (B, T, D) -> alpha (K, B, T), 1/K everywhere."""
    return torch.stack([torch.ones_like(s[..., 0]) / len(sources) for s in sources])


def mixture(alpha, sources):
    """alpha (K, B, T), K sources (B, T, D) -> sum_k alpha_k s_k (B, T, D): the sources themselves, not normalised."""
    return total([alpha[k].unsqueeze(-1) * s for k, s in enumerate(sources)])


def softmax(l):
    """A list of K tensors of one shape -> the list of exp(l_k) / sum_k exp(l_k)."""
    highest = torch.stack([x.detach() for x in l]).amax(dim=0)  # a shift changes nothing but the overflow
    e = [torch.exp(x - highest) for x in l]
    return [x / total(e) for x in e]


# ---- sublayers -------------------------------------------------------------------------------------------------------


def rms_norm(x, gain, eps):
    """x (..., D), gain (D,) -> gain * x / sqrt(mean(x^2) + eps)."""
    return gain * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def rotate(x, position, theta):
    """x (B, E) at one position: halves (a, b) -> (a cos - b sin, b cos + a sin), angle_j = position theta^(-2j / E)."""
    E = x.shape[-1]
    a, b = x[:, : E // 2], x[:, E // 2 :]
    angle = torch.tensor([position * theta ** (-2 * j / E) for j in range(E // 2)], dtype=x.dtype)
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(x_q, x_k, x_v, w_qkv, w_out, config):
    """x_q, x_k, x_v (B, T, D), w_qkv (3D, D; rows q, k, v), w_out (D, D) -> (B, T, D). Causal, scores over sqrt(E)."""
    B, T, D = x_q.shape
    E = D // config.n_head
    q, k, v = x_q @ w_qkv[:D].T, x_k @ w_qkv[D : 2 * D].T, x_v @ w_qkv[2 * D :].T
    heads = []
    for h in range(config.n_head):
        rows = slice(h * E, (h + 1) * E)
        q_T = [rotate(q[:, t, rows], t, config.rope_theta) for t in range(T)]
        k_T = [rotate(k[:, t, rows], t, config.rope_theta) for t in range(T)]
        y_T = []
        for t in range(T):
            past = range(t + 1)  # a token sees itself and what came before it
            weight = softmax([(q_T[t] * k_T[u]).sum(dim=-1) / math.sqrt(E) for u in past])
            y_T.append(total([weight[u].unsqueeze(-1) * v[:, u, rows] for u in past]))
        heads.append(torch.stack(y_T, dim=1))
    return torch.cat(heads, dim=-1) @ w_out.T


def mlp(x, w_gate_up, w_down, config):
    """x (B, T, D), w_gate_up (2F, D) with rows gate, up, w_down (D, F) -> down(silu(gate) * up) (B, T, D)."""
    gate, up = x @ w_gate_up[: config.d_mlp].T, x @ w_gate_up[config.d_mlp :].T
    return (gate / (1 + torch.exp(-gate)) * up) @ w_down.T
