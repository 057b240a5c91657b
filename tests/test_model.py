"""The promises that model.py keeps, in float64, at random queries and gains unless a test speaks of initialisation.

B batch   T tokens   D width   L layers   N blocks   S = 2L / N sublayers a block   K sources of a read
"""
import copy
import dataclasses
import math
import sys
import types
from pathlib import Path

import pytest
import torch

import model as model_py
import reference
from model import GPT, VARIANTS, ModelConfig

ROUTED = ["block", "rd", "tied", "average", "frozen_v", "q_kv", "q_k_v"]
EVERY = ["prenorm"] + ROUTED
LAYERS_AND_BLOCKS = [(2, 4), (3, 6),  # N = 2L: Full AttnRes, S = 1
                     (2, 1), (2, 2), (4, 2),  # one block; blocks of whole layers
                     (3, 2), (3, 1)]  # S = 3 and 6: blocks that begin at an MLP
EXTRA_QUERIES = {"rd": ["query_v"], "average": ["query_v"], "frozen_v": ["query_v"], "q_kv": ["query_kv"], "q_k_v": ["query_k", "query_v"]}
ROUTE_NAMES = {"block": ["qkv"], "rd": ["qk", "v"], "tied": ["qk", "v"], "average": ["qk", "v"], "frozen_v": ["qk", "v"],
               "q_kv": ["q", "kv"], "q_k_v": ["q", "k", "v"]}
SIZES = {"S": dict(n_layer=16, d_model=576, n_head=9, d_mlp=2528), "M": dict(n_layer=24, d_model=832, n_head=13, d_mlp=3920)}


def tiny(variant, **changes):
    """A config whose initialisation is loud enough for attention, softmax and MLP to be far from linear."""
    return ModelConfig(**(dict(vocab_size=50, n_layer=3, n_head=2, d_model=16, d_mlp=24, context=12, n_blocks=2, variant=variant,
                               norm_eps=1e-8, rope_theta=100.0, init_std=0.3) | changes))


def build(config, seed=1, module=model_py):
    torch.manual_seed(seed)
    return module.GPT(config).double()


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


def rel(got, expected):
    """Largest absolute difference over the largest magnitude expected."""
    return ((got - expected).abs().max() / expected.abs().max()).item()


def share(source, target):
    """Give target the parameters that it shares with source, by name as a user would."""
    missing = target.load_state_dict(source.state_dict(), strict=False).missing_keys
    return target, missing


# ---- 1. model.py is the equations ----

def errors_against_reference(module, variant, L, N, seed=1):
    """Relative errors of logits, loss, every route and every gradient of module.GPT against tests/reference.py: {what: float}."""
    config = tiny(variant, n_layer=L, n_blocks=N)
    gpt = scatter(build(module.ModelConfig(**dataclasses.asdict(config)), seed, module), seed + 1)
    idx, targets = tokens(config)

    params = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in gpt.named_parameters()}
    expected = reference.forward(params, config, idx)
    expected_loss = reference.nll(expected["logits"], targets)
    expected_loss.backward()
    loss = gpt(idx, targets)[1]
    loss.backward()

    errors = {"logits": rel(gpt(idx)[0], expected["logits"]), "loss": rel(loss, expected_loss)}
    # Some gradients are zero by construction (a query with one source to choose from), hence a floor under their scale.
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


def worst(errors):
    """The largest error; a NaN is the largest of all."""
    return max((math.inf if math.isnan(e) else e, what) for what, e in errors.items())


@pytest.mark.parametrize("L, N", LAYERS_AND_BLOCKS)
@pytest.mark.parametrize("variant", EVERY)
def test_model_equals_reference(variant, L, N):
    error, what = worst(errors_against_reference(model_py, variant, L, N))
    assert error < 1e-9, f"{what}: {error}"


def test_the_tests_know_every_variant():
    assert sorted(VARIANTS) == sorted(EVERY) == sorted(list(reference.QUERY_OF_ROLE) + ["prenorm"])


def test_reference_sources():
    """The one place where reference.py itself is held to numbers written out by hand: L = 3, N = 2, embedding 100, o_j = 2^j."""
    config = tiny("block", n_layer=3, n_blocks=2)
    outputs = [torch.tensor(2.0 ** j) for j in range(6)]
    read = [[s.item() for s in reference.sources_of_sublayer(i, torch.tensor(100.0), outputs[:i], config)] for i in range(6)]
    assert read == [[100], [100, 1], [100, 3], [100, 7], [100, 7, 8], [100, 7, 24]]


# ---- the same check, against deliberate faults ----

SOURCE = Path(model_py.__file__).read_text()
FAULTS = {  # fault: (a variant that shows it, a snippet that stands in model.py exactly once, what replaces it)
    "logits doubled": ("block", "torch.stack([project(s, directions) * r for", "torch.stack([2 * project(s, directions) * r for"),
    "logits divided by sqrt(D)": (
        "block", "torch.stack([project(s, directions) * r for", "torch.stack([project(s, directions) * r / s.shape[-1] ** 0.5 for"),
    "keys not normalised": ("block", "torch.stack([project(s, directions) * r for", "torch.stack([project(s, directions) for"),
    "running key not normalised": ("block", "logits = project(p, directions) * r\n", "logits = project(p, directions)\n"),
    "key gain dropped": ("block", "wide(self.key_norm.weight) * torch.stack", "torch.stack"),
    "sources normalised in the mixture": (
        "block", "for s, of_source in zip(states[1:], alphas[1:]):", "for s, of_source in zip([s * r for s, r in zip(states, inverses)][1:], alphas[1:]):"),
    "first mixture of a block not normalised": ("block", "[*first_read.inputs(mixtures[:groups], norm), ", "[*mixtures[:groups], "),
    "norm of another sublayer": ("block", "reads[sublayer : sublayer + S], norms[sublayer])", "reads[sublayer : sublayer + S], norms[sublayer - 1])"),
    "running sum normalised in the mixture": ("block", "torch.lerp(mixture, wide(p), ", "torch.lerp(mixture, wide(p) * r, "),
    "running sum weighed as one source alone": ("block", "torch.sigmoid(logits - lse)", "torch.sigmoid(logits)"),
    "finished block goes on as the running sum": (
        "block", "finished, running = [*finished, running], None", "finished, running = [*finished, running], running"),
    "newest finished block left out": ("block", "self.read_finished(finished, reads[", "self.read_finished(finished[:-1] or finished, reads["),
    "running sum left out": ("block", "return self.inputs(mixtures, norm), betas", "return self.inputs(partial.mixtures, norm), betas"),
    "running sum is the last output": ("block", "output if running is None else running.state + output", "output"),
    "block finished one sublayer early": ("block", "at == S - 1", "at == S - 2"),
    "embedding added into block 1": (
        "block", "(finished, reads[sublayer : sublayer + S], ",
        "(finished if len(finished) != 2 else [finished[0], make_source(finished[1].state + embedding, self.config)], reads[sublayer : sublayer + S], "),
    "reads of a block in another order": ("block", "reads[sublayer : sublayer + S], ", "reads[sublayer : sublayer + S][::-1], "),
    "value route fed to K": ("rd", "[len(group) * D for group in VARIANTS[config.variant].groups]", "[D, 2 * D]"),
    "value query unused": ("rd", "wide(getattr(self, name)) for", "wide(self.query) for"),
    "mixtures not averaged": ("average", "if self.averaged and", "if False and"),
}
GRADIENT_FAULTS = {  # of the closed-form backward: only a gradient shows them
    "sum over the sources left out": ("rd", "(d_alphas - (alphas * d_alphas).sum(0) + d_lse)", "(d_alphas + d_lse)"),
    "lse without a gradient": ("rd", "(d_alphas - (alphas * d_alphas).sum(0) + d_lse)", "(d_alphas - (alphas * d_alphas).sum(0))"),
    "nothing through the inverse rms": ("rd", "- (d_logits * logits).sum(-1, keepdim=True) * (r * r", "- 0 * (d_logits * logits).sum(-1, keepdim=True) * (r * r"),
    "through the inverse rms of the wrong sign": ("rd", "- (d_logits * logits).sum(-1, keepdim=True) * (r * r", "+ (d_logits * logits).sum(-1, keepdim=True) * (r * r"),
    "directions without the inverse rms": ("rd", "outer(d_logit * r, s)", "outer(d_logit, s)"),
    "states without the logits' part": ("rd", "combine(d_logits * r, directions)", "combine(0 * d_logits, directions)"),
    "states without the mixtures' part": ("rd", "directions, logit, d_logit, alpha, d_mixtures)", "directions, logit, d_logit, 0 * alpha, d_mixtures)"),
    "running logit without 1 - beta": ("rd", "(d * (wide(p) - h)).sum(-1)", "(d * (wide(p) - 2 * h)).sum(-1)"),
    "running lse of the wrong sign": ("rd", "outer(d_logits * r, p), -d_logits,", "outer(d_logits * r, p), d_logits,"),
    "running sum without the mixtures' part": ("rd", "directions, logits, d_logits, betas, d_merged)", "directions, logits, d_logits, 0 * betas, d_merged)"),
    "running sum without the logits' part": ("rd", "directions, logits, d_logits, betas, d_merged)", "directions, logits, 0 * d_logits, betas, d_merged)"),
    "mixture's share not 1 - beta": ("rd", "d - beta[..., None] * d for", "d for"),
}


def load_model(source, monkeypatch):
    """Source text of a model -> a fresh module, which is not model.py's."""
    module = types.ModuleType("model_under_fault")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    exec(compile(source, module.__name__, "exec"), module.__dict__)
    return module


def errors_with(fault, monkeypatch):
    """The reference check's errors on model.py's text with one deliberate fault."""
    variant, snippet, replacement = fault
    assert SOURCE.count(snippet) == 1, f"{snippet!r} no longer stands in model.py exactly once: give this fault what replaced it"
    return errors_against_reference(load_model(SOURCE.replace(snippet, replacement), monkeypatch), variant, L=3, N=2)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_the_reference_check_red(fault, monkeypatch):
    assert errors_with(FAULTS[fault], monkeypatch)["logits"] > 1e-6


@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
def test_a_fault_of_the_backward_turns_the_gradients_red(fault, monkeypatch):
    errors = errors_with(GRADIENT_FAULTS[fault], monkeypatch)
    assert errors["logits"] < 1e-9 and worst(errors)[0] > 1e-6


@pytest.mark.parametrize("variant", sorted({variant for variant, _, _ in FAULTS.values()}))
def test_without_a_fault_the_reloaded_text_passes(variant, monkeypatch):
    error, what = worst(errors_against_reference(load_model(SOURCE, monkeypatch), variant, L=3, N=2))
    assert error < 1e-9, f"{what}: {error}"


# ---- 2. at initialisation every variant is prenorm ----

@pytest.mark.parametrize("L, N", LAYERS_AND_BLOCKS)
@pytest.mark.parametrize("variant", ROUTED)
def test_init_equals_prenorm(variant, L, N):
    """Zero queries mix uniformly: the residual stream over K, and RMSNorm cancels the scale but for norm_eps."""
    routed = build(tiny(variant, n_layer=L, n_blocks=N, norm_eps=1e-30))
    prenorm, missing = share(routed, build(tiny("prenorm", n_layer=L, n_blocks=N, norm_eps=1e-30), seed=9))
    assert not missing
    idx, targets = tokens(routed.config)
    assert rel(routed(idx)[0], prenorm(idx)[0]) < 1e-11
    assert rel(routed(idx, targets)[1], prenorm(idx, targets)[1]) < 1e-11


# ---- 3. two routes with one query are one route ----

@pytest.mark.parametrize("L, N", [(3, 2), (4, 4), (2, 4)])
def test_rd_with_equal_queries_is_block(L, N):
    block = scatter(build(tiny("block", n_layer=L, n_blocks=N)))
    rd, missing = share(block, build(tiny("rd", n_layer=L, n_blocks=N), seed=9))
    assert missing == [f"layers.{l}.attn_read.query_v" for l in range(L)]
    with torch.no_grad():
        for layer in rd.layers:
            layer.attn_read.query_v.copy_(layer.attn_read.query)
    idx, targets = tokens(block.config)
    assert rel(rd(idx)[0], block(idx)[0]) < 1e-11
    losses = [gpt(idx, targets)[1] for gpt in (rd, block)]
    assert rel(*losses) < 1e-11
    for loss in losses:
        loss.backward()
    of_rd, of_block = gradients(rd), gradients(block)
    for name, gradient in of_block.items():
        got = of_rd[name]
        if name.endswith("attn_read.query"):
            got = got + of_rd[name.replace("query", "query_v")]
        assert (got - gradient).abs().max() < 1e-11, name


def train(gpt, steps=30, clip=None, eps=1e-8, decay_all=False, lr=3e-3):
    """AdamW on the matrices with decay, on vectors without (or on all with). Returns the global gradient norm of every step."""
    matrices = [p for p in gpt.parameters() if p.dim() > 1 or decay_all]
    vectors = [p for p in gpt.parameters() if not (p.dim() > 1 or decay_all)]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)],
                                  lr=lr, betas=(0.9, 0.95), eps=eps)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        gpt(*tokens(gpt.config, seed=100 + step))[1].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(gpt.parameters(), math.inf if clip is None else clip).item())
        optimizer.step()
    return norms


def apart(a, b):
    """Largest absolute difference between parameters of the same name."""
    b = dict(b.named_parameters())
    return max((p - b[name]).abs().max().item() for name, p in a.named_parameters() if name in b)


def test_tied_trains_as_block():
    block = scatter(build(tiny("block")))
    start = copy.deepcopy(block)
    tied, missing = share(block, build(tiny("tied"), seed=9))
    assert not missing and len(tied.state_dict()) == len(block.state_dict())
    train(block), train(tied)
    assert apart(block, start) > 1e-2  # it did move
    assert apart(tied, block) < 1e-10


# ---- 4. the average control cannot differ from its parent ----

def test_average_gradients_are_halves_of_blocks():
    """Equal queries read equal mixtures; each route then carries half of the gradient, and the other gradients are block's."""
    block = scatter(build(tiny("block")))
    average, _ = share(block, build(tiny("average"), seed=9))
    with torch.no_grad():
        for layer in average.layers:
            layer.attn_read.query_v.copy_(layer.attn_read.query)
    idx, targets = tokens(block.config)
    assert rel(average(idx)[0], block(idx)[0]) < 1e-12  # not bitwise: block projects q, k, v in one product, average in two
    for gpt in (block, average):
        gpt(idx, targets)[1].backward()
    of_average = gradients(average)
    squares_of_queries = 0.0
    for name, gradient in gradients(block).items():
        if name.endswith("attn_read.query"):
            squares_of_queries += gradient.square().sum().item()
            assert torch.equal(of_average[name], of_average[name.replace("query", "query_v")]), name
            gradient = gradient / 2
        assert (of_average[name] - gradient).abs().max() < 1e-13, name
    # Two halves have half the square of the whole: the global norm, and with it clipping, is where average can differ.
    square_of_norm = {gpt: sum(g.square().sum().item() for g in gradients(gpt).values()) for gpt in (block, average)}
    assert square_of_norm[average] == pytest.approx(square_of_norm[block] - squares_of_queries / 2, rel=1e-12)
    assert squares_of_queries > 1e-6 * square_of_norm[block]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_average_trains_as_block_from_zero_queries(clip, record_property):
    block, average = build(tiny("block")), build(tiny("average"))
    start = copy.deepcopy(block)
    norms = train(block, clip=clip, eps=1e-30)
    train(average, clip=clip, eps=1e-30)
    for layer in average.layers:
        assert torch.equal(layer.attn_read.query, layer.attn_read.query_v)
    assert any(layer.attn_read.query.abs().max() > 1e-2 for layer in average.layers)  # the queries did leave zero

    deviation, moved = apart(average, block), apart(block, start)
    record_property("deviation", deviation)
    print(f"average against block after 30 steps, clip {clip}: parameters differ by at most {deviation:.2e} and moved by {moved:.2e}")
    if clip is None:
        assert deviation < 1e-10
    else:  # the smaller global norm is clipped less: another trajectory, but still a trajectory of block
        assert min(norms) > clip
        assert 1e-10 < deviation < 0.1 * moved
    idx, _ = tokens(block.config, seed=7)
    block_with_its_query, missing = share(average, build(tiny("block"), seed=9))
    assert not missing
    assert rel(average(idx)[0], block_with_its_query(idx)[0]) < 1e-12


def test_average_with_queries_apart_is_not_block():
    """Only the start at zero makes it block: the mean of two mixtures is not the mixture of any one of its queries, nor of their mean."""
    average = scatter(build(tiny("average")))
    idx, _ = tokens(average.config)
    for pick in (lambda q, v: q, lambda q, v: v, lambda q, v: (q + v) / 2):
        block, _ = share(average, build(tiny("block"), seed=9))
        with torch.no_grad():
            for mine, theirs in zip(block.layers, average.layers):
                mine.attn_read.query.copy_(pick(theirs.attn_read.query, theirs.attn_read.query_v))
        assert rel(block(idx)[0], average(idx)[0]) > 1e-2


# ---- 5. same seed, same shared parameters ----

def names_of(variant, L):
    """The parameter names that checkpoints and tools rely on."""
    names = {"tok_emb.weight", "final_norm.weight"}
    for l in range(L):
        names |= {f"layers.{l}.{name}.weight" for name in ("attn_norm", "attn.qkv", "attn.out", "mlp_norm", "mlp.gate_up", "mlp.down")}
    if variant != "prenorm":
        for read in ["final_read"] + [f"layers.{l}.{kind}_read" for l in range(L) for kind in ("attn", "mlp")]:
            names |= {f"{read}.query", f"{read}.key_norm.weight"}
        names |= {f"layers.{l}.attn_read.{extra}" for l in range(L) for extra in EXTRA_QUERIES.get(variant, [])}
    return names


@pytest.mark.parametrize("variant", EVERY)
def test_same_seed_same_shared_parameters(variant):
    config = tiny(variant)
    L, D = config.n_layer, config.d_model
    gpt, block = build(config, seed=5), build(tiny("block"), seed=5)
    mine, blocks = dict(gpt.named_parameters()), dict(block.named_parameters())
    assert set(mine) == set(gpt.state_dict()) == names_of(variant, L)
    shared = set(mine) & set(blocks)
    assert shared == (names_of("prenorm", L) if variant == "prenorm" else set(blocks))
    for name in shared:
        assert torch.equal(mine[name], blocks[name]), name
    assert not torch.equal(mine["tok_emb.weight"], build(config, seed=6).tok_emb.weight)
    more = sum(p.numel() for p in mine.values()) - sum(p.numel() for p in blocks.values())
    assert more == (-2 * D * (2 * L + 1) if variant == "prenorm" else len(EXTRA_QUERIES.get(variant, [])) * L * D)


@pytest.mark.parametrize("variant", EVERY)
def test_initial_values(variant):
    config = tiny(variant, d_model=32, d_mlp=64, vocab_size=64, init_std=0.02)
    for name, parameter in build(config).named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.zeros_like(parameter) if "query" in name else torch.ones_like(parameter)), name
        else:
            std = 0.02 / (math.sqrt(2 * config.n_layer) if name.endswith(("out.weight", "down.weight")) else 1)
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
            assert parameter.mean().abs() < 5 * std / math.sqrt(parameter.numel()), name


# ---- 6. the frozen route ----

def test_frozen_query_stays_zero():
    gpt = build(tiny("frozen_v"))
    train(gpt, decay_all=True)
    for l, layer in enumerate(gpt.layers):
        assert not layer.attn_read.query_v.requires_grad and layer.attn_read.query_v.grad is None
        assert layer.attn_read.query_v.abs().max() == 0
        assert (layer.attn_read.query.abs().max() > 0) == (l > 0)  # layer 0 has one source and nothing to choose
    route = gpt.routes(tokens(gpt.config)[0])[-2]["v"]
    assert torch.allclose(route, torch.full_like(route, 1 / len(route)), atol=1e-15)


# ---- limits of the closed-form backward, and half precision without autocast ----

@pytest.mark.parametrize("name", ["tok_emb.weight", "layers.1.attn_read.query", "final_read.query"])
@pytest.mark.parametrize("variant", ["block", "rd"])
def test_a_second_derivative_is_an_error_and_not_a_wrong_number(variant, name):
    gpt = scatter(build(tiny(variant)))
    loss, parameter = gpt(*tokens(gpt.config))[1], dict(gpt.named_parameters())[name]
    with pytest.raises(RuntimeError, match="the depth reads have first derivatives only"):
        torch.autograd.grad(loss, [parameter], create_graph=True)


@pytest.mark.parametrize("variant", EVERY)
def test_a_model_in_bfloat16_runs_and_is_near(variant):
    gpt = scatter(build(tiny(variant)))
    idx, targets = tokens(gpt.config)
    half = copy.deepcopy(gpt).bfloat16()
    loss = half(idx, targets)[1]
    loss.backward()
    assert half(idx)[0].dtype == torch.bfloat16 and loss.item() == pytest.approx(gpt(idx, targets)[1].item(), rel=0.05)
    assert all(torch.isfinite(p.grad).all() for p in half.parameters() if p.grad is not None)


@pytest.mark.parametrize("shape", [(3,), (1, 0), (1, 2, 3)])
def test_generation_refuses_ids_of_another_shape(shape):
    with pytest.raises(ValueError, match="generation continues ids"):
        build(tiny("rd")).generate(torch.zeros(shape, dtype=torch.long), 2)


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -1.0])
def test_generation_refuses_a_temperature_that_is_none(temperature):
    gpt = build(tiny("rd"))
    with pytest.raises(ValueError, match="temperature = .* must be 0 or more, and finite"):
        gpt.generate(tokens(gpt.config)[0], 2, temperature=temperature)
    tiniest = [gpt.generate(tokens(gpt.config)[0], 4, temperature=t) for t in (0, 1e-320)]
    assert torch.equal(*tiniest)


# ---- sizes ----

@pytest.mark.parametrize("size, millions, extra", [("S", 120.2, 9_216), ("M", 343.2, 19_968)])
def test_sizes(size, millions, extra):
    def count(variant):
        with torch.device("meta"):
            gpt = GPT(ModelConfig(vocab_size=50257, context=1024, n_blocks=8, variant=variant, **SIZES[size]))
        return sum(p.numel() for p in gpt.parameters())
    assert count("rd") == pytest.approx(millions * 1e6, rel=0.002)
    assert count("rd") - count("block") == extra


@pytest.mark.parametrize("vocab_size, padded", [(50257, 50304), (64, 64), (65, 128), (1, 64)])
def test_padded_vocab(vocab_size, padded):
    assert tiny("rd", vocab_size=vocab_size).padded_vocab == padded


# ---- what users get wrong ----

@pytest.mark.parametrize("changes, words", [
    (dict(n_layer=3, n_blocks=4), ["n_blocks"]),
    (dict(n_layer=3, n_blocks=12), ["n_blocks"]),  # fewer than one sublayer a block
    (dict(d_model=16, n_head=3), ["d_model", "n_head"]),
    (dict(d_model=18, n_head=6), ["d_model", "n_head"]),  # heads of width 3 have no halves to rotate
    (dict(variant="rdd"), ["rdd"] + EVERY),
])
def test_a_config_that_cannot_be_built_says_why(changes, words):
    with pytest.raises(ValueError) as error:
        GPT(tiny(**(dict(variant="rd") | changes)))
    for word in words:
        assert word in str(error.value)


def test_more_tokens_than_the_context_is_an_error():
    gpt = build(tiny("rd"))
    with pytest.raises(ValueError, match="context"):
        gpt(*tokens(gpt.config, T=gpt.config.context + 1))


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny("rd").n_layer = 4


# ---- the interface ----

@pytest.mark.parametrize("variant", ROUTED)
def test_routes(variant):
    config = tiny(variant, n_layer=3, n_blocks=2)
    idx, _ = tokens(config)
    for dtype in (torch.float32, torch.float64):
        routes = scatter(build(config)).to(dtype).routes(idx)
        assert [list(r) for r in routes] == 3 * [ROUTE_NAMES[variant] + ["mlp"]] + [["final"]]
        sources = [[len(alpha) for alpha in r.values()] for r in routes]
        groups = len(ROUTE_NAMES[variant])  # S = 3: the second block begins at sublayer 3, an MLP
        assert sources == [groups * [1] + [2], groups * [2] + [2], groups * [3] + [3], [3]]
        for alpha in (alpha for r in routes for alpha in r.values()):
            assert alpha.dtype == dtype and alpha.shape[1:] == idx.shape and (alpha >= 0).all()
            assert torch.allclose(alpha.sum(0), torch.ones(idx.shape, dtype=dtype), atol=1e-6)


def test_prenorm_has_no_routes():
    with pytest.raises((ValueError, RuntimeError), match="prenorm"):
        build(tiny("prenorm")).routes(tokens(tiny("prenorm"))[0])


@pytest.mark.parametrize("variant", EVERY)
def test_logits_and_loss(variant):
    """Logits at every position over every padded row; the loss counts no target of -100; float64 stays float64."""
    gpt = scatter(build(tiny(variant)))
    idx, targets = tokens(gpt.config)
    logits, loss = gpt(idx)
    assert loss is None and logits.shape == (*idx.shape, gpt.config.padded_vocab) and logits.dtype == torch.float64
    targets[0, :3] = targets[1, 5] = -100
    loss = gpt(idx, targets)[1]
    assert loss.shape == () and loss.dtype == torch.float64
    assert rel(loss, reference.nll(logits, targets)) < 1e-12


@pytest.mark.parametrize("variant", EVERY)
def test_causal(variant):
    gpt = scatter(build(tiny(variant)))
    idx, _ = tokens(gpt.config, T=8)
    changed = idx.clone()
    changed[:, 5] = (changed[:, 5] + 1) % gpt.config.vocab_size
    difference = (gpt(changed)[0] - gpt(idx)[0]).abs().amax(dim=(0, 2))
    assert (difference[:5] < 1e-12).all() and (difference[5:] > 1e-6).all()


def greedy_with_and_without_cache(module, variant, prompt, new):
    """Two (3, prompt + new): by GPT.generate, and by a whole forward for each token over the last `context` ones."""
    gpt = scatter(build(module.ModelConfig(**dataclasses.asdict(tiny(variant))), module=module))
    expected, _ = tokens(gpt.config, B=3, T=prompt)
    generated = gpt.generate(expected, new, temperature=0)
    for _ in range(new):
        logits = gpt(expected[:, -gpt.config.context:])[0][:, -1, : gpt.config.vocab_size]
        expected = torch.cat([expected, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return generated, expected


@pytest.mark.parametrize("variant", EVERY)
@pytest.mark.parametrize("prompt, new", [(4, 6), (5, 16), (15, 4), (1, 1)])  # context is 12: inside, across, and begun beyond it
def test_generation_with_cache_is_generation_without(variant, prompt, new):
    generated, expected = greedy_with_and_without_cache(model_py, variant, prompt, new)
    assert torch.equal(generated, expected)


@pytest.mark.parametrize("snippet, replacement", [
    ("rope = rope_angles(start, ", "rope = rope_angles(0, "),
    ('torch.cat([cache["v"], v], 2)', 'torch.cat([v, cache["v"]], 2)'),
])
def test_a_faulty_cache_shows(snippet, replacement, monkeypatch):
    """Greedy text of a random model is varied enough for the test above to notice."""
    assert SOURCE.count(snippet) == 1, f"{snippet!r} no longer stands in model.py exactly once: give the test what replaced it"
    module = load_model(SOURCE.replace(snippet, replacement), monkeypatch)
    assert not torch.equal(*greedy_with_and_without_cache(module, "rd", prompt=4, new=6))


def test_sampling():
    """Draws are a function of the generator; top_k = 1 is greedy; top_k may exceed the vocabulary; nothing touches the global RNG."""
    gpt = scatter(build(tiny("rd")))
    idx, _ = tokens(gpt.config, T=4)
    def draw(seed, **options):
        return gpt.generate(idx, 8, generator=torch.Generator().manual_seed(seed), **options)
    before = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(draw(1, top_k=1), gpt.generate(idx, 8, temperature=0))
    assert torch.equal(draw(1, top_k=1000), draw(1))
    assert torch.equal(draw(1, temperature=1e-4), gpt.generate(idx, 8, temperature=0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [dict(temperature=0), dict(), dict(top_k=3), dict(temperature=2.0, top_k=1000)])
def test_no_padded_id_is_ever_generated(options):
    gpt = scatter(build(tiny("rd")))
    V = gpt.config.vocab_size
    with torch.no_grad():  # opposite rows: whatever the final state, one of them has a huge logit
        gpt.tok_emb.weight[V:] = 1e4 * torch.randn(gpt.config.d_model)
        gpt.tok_emb.weight[V::2] *= -1
    idx, _ = tokens(gpt.config, B=8)
    assert (gpt(idx)[0].argmax(dim=-1) >= V).all()
    assert gpt.generate(idx, 10, **options).max() < V


# ---- bf16 autocast ----

@pytest.mark.parametrize("variant", EVERY)
def test_bf16_autocast(variant, monkeypatch):
    gpt = scatter(build(tiny(variant))).float()
    idx, targets = tokens(gpt.config)
    expected = gpt(idx, targets)[1]
    sources, make_source = [], model_py.make_source
    monkeypatch.setattr(model_py, "make_source", lambda state, config: sources.append(state) or make_source(state, config))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = gpt(idx, targets)[1]
    assert sources and {s.dtype for s in sources} == {torch.bfloat16}  # prenorm's one source is its stream
    assert loss.dtype == torch.float32
    assert rel(loss, expected) < 0.05
    loss.backward()
    for name, parameter in gpt.named_parameters():
        assert parameter.grad is None or (parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all()), name
