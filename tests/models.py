"""Tiny models away from zero, their comparison with the reference, and edits of model.py's read.

B batch   T tokens   D width   L layers   N blocks   S = 2L / N sublayers a block   K sources   R routes of a read
"""

import inspect
import math

import pytest
import reference
import torch

import model
from model import GPT, ModelConfig

ROUTED = ["block", "rd", "tied", "average", "frozen_v", "q_kv", "q_k_v"]
EVERY = ["prenorm", *ROUTED]
LAYERS_AND_BLOCKS = [
    (2, 4),  # N = 2L: Full AttnRes, S = 1
    (3, 6),
    (2, 1),  # one block
    (2, 2),  # blocks of whole layers
    (4, 2),
    (3, 2),  # S = 3 and 6: blocks that begin at an MLP
    (3, 1),
]
# Three of them at every test: S = 1, blocks of whole layers, blocks that begin at an MLP.
FAST = [(3, 6), (4, 2), (3, 2)]
TOPOLOGIES = [pytest.param(*x, marks=[] if x in FAST else pytest.mark.slow) for x in LAYERS_AND_BLOCKS]


# ---- models ----------------------------------------------------------------------------------------------------------


def tiny(variant, **changes):
    """A config whose initialisation is loud enough for attention, softmax and MLP to be far from linear."""
    sizes = dict(vocab_size=50, n_layer=3, n_head=2, d_model=16, d_mlp=24, context=12, n_blocks=2)
    return ModelConfig(**(sizes | dict(variant=variant, norm_eps=1e-8, rope_theta=100.0, init_std=0.3) | changes))


def build(config, seed=1):
    torch.manual_seed(seed)
    return GPT(config).double()


def scatter(gpt, seed=2):
    """Draw every query and gain at random, both signs: nothing stays at the value that hides a fault. Returns gpt."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.dim() == 1 and parameter.requires_grad:  # a frozen query is zero by definition
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return gpt


def tokens(config, B=2, T=6, seed=3):
    """idx (B, T), targets (B, T): random ids of the true vocabulary."""
    window = torch.randint(config.vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return window[:, :-1].clone(), window[:, 1:].clone()


def gradients(gpt):
    return {name: parameter.grad for name, parameter in gpt.named_parameters()}


def share(source, target):
    """Give target the parameters that it shares with source, by name as a user would. Returns target, the rest."""
    missing = target.load_state_dict(source.state_dict(), strict=False).missing_keys
    return target, missing


# ---- comparisons -----------------------------------------------------------------------------------------------------


def rel(got, expected):
    """Largest absolute difference over the largest magnitude expected."""
    return ((got - expected).abs().max() / expected.abs().max()).item()


def worst(errors):
    """The largest error; a NaN is the largest of all."""
    return max((math.inf if math.isnan(e) else e, what) for what, e in errors.items())


def reference_parameters(gpt):
    """gpt's parameters as leaves of their own, for reference.forward."""
    return {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in gpt.named_parameters()}


def errors_against_reference(variant, L=3, N=2, read=None, seed=1):
    """Relative errors of logits, loss, every route and every gradient against tests/reference.py: {what: float}.

    read: what the model reads depth with in place of model.py's depth_read.
    """
    config = tiny(variant, n_layer=L, n_blocks=N)
    gpt = scatter(build(config, seed), seed + 1)
    gpt.read = read or gpt.read
    idx, targets = tokens(config, T=4)

    params = reference_parameters(gpt)
    expected = reference.forward(params, config, idx)
    expected_loss = reference.nll(expected["logits"], targets)
    expected_loss.backward()
    loss = gpt(idx, targets)[1]
    loss.backward()

    errors = {"logits": rel(gpt(idx)[0], expected["logits"]), "loss": rel(loss, expected_loss)}
    # Some gradients are zero by construction (a query with one source to choose from): their scale needs a floor.
    floor = 1e-3 * max(p.grad.abs().max().item() for p in params.values() if p.grad is not None)
    for name, parameter in gpt.named_parameters():
        zero = torch.zeros_like(parameter)
        got, want = (zero if g is None else g for g in (parameter.grad, params[name].grad))
        errors[f"gradient of {name}"] = (got - want).abs().max().item() / max(want.abs().max().item(), floor)
    if variant != "prenorm":
        routes = gpt.routes(idx)
        assert [r.keys() for r in routes] == [r.keys() for r in expected["routes"]]
        for l, (got, want) in enumerate(zip(routes, expected["routes"])):
            for name in want:
                same_sources = got[name].shape == want[name].shape
                errors[f"route {name} of layer {l}"] = rel(got[name], want[name]) if same_sources else math.inf
    return errors


# ---- edits of model.py's read, as a hacker makes them ----------------------------------------------------------------


def reference_logits(query, key_gain, sources, eps):
    """K logits (B, T): the first half of reference.route_weights."""
    l = []
    for s in sources:
        rms = torch.sqrt((s * s).mean(dim=-1, keepdim=True) + eps)
        l.append((query * key_gain * s / rms).sum(dim=-1))
    return l


def sigmoid_weights(query, key_gain, sources, eps):
    return torch.stack([1 / (1 + torch.exp(-l)) for l in reference_logits(query, key_gain, sources, eps)])


def cool_weights(query, key_gain, sources, eps):
    return torch.stack(reference.softmax([l / 0.7 for l in reference_logits(query, key_gain, sources, eps)]))


def half_weights(query, key_gain, sources, eps):
    return torch.stack(reference.softmax([l / 2 for l in reference_logits(query, key_gain, sources, eps)]))


def mixture_of_normalised(alpha, sources):
    terms = []
    for k, s in enumerate(sources):
        rms = torch.sqrt((s * s).mean(dim=-1, keepdim=True) + tiny("rd").norm_eps)
        terms.append(alpha[k].unsqueeze(-1) * s / rms)
    return reference.total(terms)


EDITS = {  # edit: (what stands in depth_read once, what replaces it, a function of reference.py, what replaces that)
    "sigmoid weights": ("l.softmax(0)", "l.sigmoid()", "route_weights", sigmoid_weights),
    "a temperature": ("l.softmax(0)", "(l / 0.7).softmax(0)", "route_weights", cool_weights),
    "halved logits": ("(w * key_gain * s_k)", "(0.5 * w * key_gain * s_k)", "route_weights", half_weights),
    "normalised values": (
        "alpha_k[..., None] * s_k for alpha_k, s_k in zip(alpha, s)",
        "(alpha_k / rms_k)[..., None] * s_k for alpha_k, s_k, rms_k in zip(alpha, s, rms)",
        "mixture",
        mixture_of_normalised,
    ),
}


def edit(snippet, replacement, monkeypatch):
    """Edit model.depth_read in its text, as a user would. That it is one place is the point."""
    source = inspect.getsource(model.depth_read)
    assert source.count(snippet) == 1, f"{snippet!r} must stand in model.depth_read once"
    namespace = dict(vars(model))
    exec(source.replace(snippet, replacement), namespace)
    monkeypatch.setattr(model, "depth_read", namespace["depth_read"])
