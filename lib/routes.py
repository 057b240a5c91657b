"""Route statistics: what a model's attention reads attend to over depth, and how far its routes stand apart.

Shapes:  L layers   N blocks   K depth sources of a read   B windows   T tokens per window
Divergences and entropies are nats (natural logarithm).
"""

import math

import numpy as np

from lib.paired import mean_and_sd


def js_divergence(p, q):
    """Jensen-Shannon divergence of the distributions p, q (K, ...) over axis 0 -> (...), nats, float64:

        JS = 1/2 sum_k p_k ln(p_k / m_k) + 1/2 sum_k q_k ln(q_k / m_k)      m = (p + q) / 2      0 ln 0 = 0

    Exactly 0 where p = q, ln 2 where they share no source, never outside.
    """
    from scipy.special import rel_entr  # scipy's jensenshannon is NaN where rounding makes the sum negative

    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    twice_m = p + q  # m itself would underflow to 0 beside a subnormal p
    return np.clip((rel_entr(2 * p, twice_m) + rel_entr(2 * q, twice_m)).sum(0) / 4, 0.0, math.log(2))


def entropy(p):
    """-sum_k p_k ln p_k of the distributions p (K, ...) over axis 0 -> (...), nats, float64; 0 ln 0 = 0."""
    from scipy.special import entr

    return np.maximum(entr(np.asarray(p, np.float64)).sum(0), 0.0)


def attention_sources(layer, config):
    """Columns, among b_0, ..., b_N, p, of the K sources that the attention of a layer reads."""
    sublayer = 2 * layer
    finished = list(range(sublayer // config.sublayers_per_block + 1))
    return finished + ([config.n_blocks + 1] if sublayer % config.sublayers_per_block else [])


def route_statistics(gpt, windows, tokens_a_pass=4096):
    """What the attention reads of `gpt` attend to on the token ids `windows` (B, T), averaged over all tokens:

    groups          the role groups with a route each
    of_q_and_v      the groups that hold q and v
    js (L,)         divergence of those two: per token first, then averaged; None for one group
    entropy         {group: (L,)}
    profile         {group: (L, N + 2)} mean weight of b_0, ..., b_N, p; NaN where the read has no such source
    """
    import torch

    config, groups = gpt.config, gpt.variant.groups
    of_q, of_v = (next(group for group in groups if role in group) for role in "qv")
    js, device = np.zeros(config.n_layer), gpt.tok_emb.weight.device
    entropies = {group: np.zeros(config.n_layer) for group in groups}
    profiles = {group: np.full((config.n_layer, config.n_blocks + 2), np.nan) for group in groups}
    step = max(1, tokens_a_pass // windows.shape[1])
    for first in range(0, len(windows), step):
        layers = gpt.routes(torch.from_numpy(windows[first : first + step]).to(device))[:-1]  # the last is the head's
        for layer, alphas in enumerate(layers):
            alphas = {group: alphas[group].cpu().numpy().astype(np.float64) for group in groups}
            columns = attention_sources(layer, config)
            assert len(columns) == len(alphas[of_q]), "the sources of a read are not those of the block table"
            js[layer] += js_divergence(alphas[of_q], alphas[of_v]).sum()
            for group, alpha_KBT in alphas.items():
                entropies[group][layer] += entropy(alpha_KBT).sum()
                profiles[group][layer, columns] = np.nan_to_num(profiles[group][layer, columns]) + alpha_KBT.sum((1, 2))
    return {
        "groups": list(groups),
        "of_q_and_v": [of_q, of_v],
        "js": js / windows.size if len(groups) > 1 else None,
        "entropy": {group: total / windows.size for group, total in entropies.items()},
        "profile": {group: total / windows.size for group, total in profiles.items()},
    }


def average_routes(measured):
    """Means over the runs of one variant, each an entry {run, seed, step, **route_statistics} at the same step."""
    groups = measured[0]["groups"]
    average = {key: measured[0][key] for key in ("groups", "of_q_and_v", "step")}
    average |= {"n": len(measured), "runs": measured}
    for key in ("entropy", "profile"):
        average[key] = {group: np.mean([entry[key][group] for entry in measured], 0) for group in groups}
    # over layers, a source that a layer lacks weighs nothing there: a profile sums to one
    average["profile_over_layers"] = {group: np.nan_to_num(rows).mean(0) for group, rows in average["profile"].items()}
    L, columns = average["profile"][groups[0]].shape
    average["sources"] = [f"b_{n}" for n in range(columns - 1)] + ["p"]
    if len(groups) > 1:
        average["js"] = np.mean([entry["js"] for entry in measured], 0)
        average["js_over_layers"] = mean_and_sd([entry["js"].mean() for entry in measured])
        # layer 0 has one source, so no divergence
        average["js_without_layer_0"] = mean_and_sd([entry["js"][1:].mean() for entry in measured]) if L > 1 else None
    return average


def decoupled(routes):
    """Of {variant: average_routes}, the variants whose q and v have a route each."""
    return {variant: entry for variant, entry in routes.items() if "js" in entry}


def both_names(entry):
    """The two groups whose divergence is measured, as text: QK and V."""
    return " and ".join(group.upper() for group in entry["of_q_and_v"])
