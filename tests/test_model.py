"""The promises that model.py keeps, in float64, at random queries and gains unless a test speaks of initialisation.

B batch   T tokens   D width   L layers   N blocks   S = 2L / N sublayers a block   K sources   R routes of a read
"""

import copy
import dataclasses
import math

import pytest
import reference
import torch
from models import (
    EDITS,
    EVERY,
    ROUTED,
    TOPOLOGIES,
    build,
    edit,
    errors_against_reference,
    gradients,
    reference_parameters,
    rel,
    scatter,
    share,
    tiny,
    tokens,
    worst,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import model
from model import GPT, VARIANTS, Attention, DepthRead, ModelConfig

EXTRA_QUERIES = {
    "rd": ["query_v"],
    "average": ["query_v"],
    "frozen_v": ["query_v"],
    "q_kv": ["query_kv"],
    "q_k_v": ["query_k", "query_v"],
}
SIZES = {
    "S": dict(n_layer=16, d_model=576, n_head=9, d_mlp=2528),
    "M": dict(n_layer=24, d_model=832, n_head=13, d_mlp=3920),
}


# ---- 1. model.py is the equations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("L, N", TOPOLOGIES)
@pytest.mark.parametrize("variant", EVERY)
def test_model_equals_reference(variant, L, N):
    error, what = worst(errors_against_reference(variant, L, N))
    assert error < 1e-9, f"{what}: {error}"


def test_the_tests_know_every_variant():
    assert sorted(VARIANTS) == sorted(EVERY) == sorted([*reference.QUERY_OF_ROLE, "prenorm"])


def test_reference_sources():
    """The one place that holds reference.py to numbers written out by hand: L = 3, N = 2, embedding 100, o_j = 2^j."""
    config, embedding = tiny("block", n_layer=3, n_blocks=2), torch.tensor(100.0)
    outputs = [torch.tensor(2.0**j) for j in range(6)]
    read = [reference.sources_of_sublayer(i, embedding, outputs[:i], config) for i in range(6)]
    expected = [[100], [100, 1], [100, 3], [100, 7], [100, 7, 8], [100, 7, 24]]
    assert [[s.item() for s in sources] for sources in read] == expected


@pytest.mark.parametrize("variant", ["prenorm", "block", "rd"])
def test_second_derivatives(variant):
    """Of the loss, along a random direction of two parameters; attention by plain operations, which have them."""
    gpt = scatter(build(tiny(variant, n_layer=2)))
    idx, targets = tokens(gpt.config)
    params = reference_parameters(gpt)

    def second(loss, parameters):
        names = [
            "layers.1.attn.qkv.weight",
            "layers.1.attn_norm.weight" if variant == "prenorm" else "final_read.query",
        ]
        first = torch.autograd.grad(loss, [parameters[name] for name in names], create_graph=True)
        along = sum((g * torch.linspace(-1, 1, g.numel(), dtype=g.dtype).view_as(g)).sum() for g in first)
        return torch.autograd.grad(along, list(parameters.values()), allow_unused=True, materialize_grads=True)

    with sdpa_kernel(SDPBackend.MATH):
        got = second(gpt(idx, targets)[1], dict(gpt.named_parameters()))
    expected = second(reference.nll(reference.forward(params, gpt.config, idx)["logits"], targets), params)
    floor = 1e-3 * max(e.abs().max().item() for e in expected)
    for name, g, e in zip(params, got, expected, strict=True):
        assert (g - e).abs().max() < 1e-9 * max(e.abs().max().item(), floor), name


# ---- the same check, against deliberate faults of the read -----------------------------------------------------------


def unit(s, eps):
    return s / (s.square().mean(-1, keepdim=True) + eps).sqrt()


def make_read(
    key=lambda s, last, eps: unit(s, eps),
    logit=lambda l, D: l,
    weights=lambda l: l.exp() / l.exp().sum(0),
    value=lambda s, last, eps: s,
    norm=lambda h, route, gain, eps: gain * unit(h, eps),
):
    """model.py's depth_read, written again with every step replaceable. `last` is true of the newest source alone."""

    def read(sources, queries, key_gain, eps, pre_norm=None):
        inputs, alphas, K = [], [], len(sources)
        lasts = [k == K - 1 and K > 1 for k in range(K)]
        for route, w in enumerate(queries):
            keys = torch.stack([key(s, last, eps) for s, last in zip(sources, lasts)])
            values = torch.stack([value(s, last, eps) for s, last in zip(sources, lasts)])
            alpha = weights(logit(keys @ (w * key_gain), len(w)))
            h = torch.einsum("kbt,kbtd->btd", alpha, values)
            inputs.append(h if pre_norm is None else norm(h, route, pre_norm.weight, eps))
            alphas.append(alpha)
        return inputs, alphas

    return read


def last_weighed_alone(l):
    """The newest source's weight is sigmoid of its own logit, where it should be compared with the others."""
    if len(l) == 1:
        return torch.ones_like(l)
    beta = l[-1:].sigmoid()
    return torch.cat([(1 - beta) * l[:-1].softmax(0), beta])


def with_arguments(change):
    """depth_read, given other arguments: change(sources, queries, key_gain, norm) -> these four."""

    def read(sources, queries, key_gain, eps, norm=None, original=model.depth_read):
        sources, queries, key_gain, norm = change(sources, queries, key_gain, norm)
        return original(sources, queries, key_gain, eps, norm)

    return read


def of_the_call_before(place):
    """depth_read, whose argument at `place` (of sources, queries, key_gain, norm) is that of the call before."""
    before = []

    def change(*arguments):
        before.append(arguments[place])
        alike = len(before) > 1 and (place == 3 or len(before[-2]) == len(before[-1]))
        kept = before[-2] if alike else before[-1]
        return [*arguments[:place], kept, *arguments[place + 1 :]]

    return with_arguments(change)


FAULTS = {  # fault: (a variant that shows it, the read)
    "logits doubled": ("block", make_read(logit=lambda l, D: 2 * l)),
    "logits divided by sqrt(D)": ("block", make_read(logit=lambda l, D: l / D**0.5)),
    "keys not normalised": ("block", make_read(key=lambda s, last, eps: s)),
    "newest key not normalised": ("block", make_read(key=lambda s, last, eps: s if last else unit(s, eps))),
    "key gain dropped": ("block", with_arguments(lambda s, w, g, n: (s, w, torch.ones_like(g), n))),
    "key gain of another read": ("block", of_the_call_before(2)),
    "queries of another read": ("block", of_the_call_before(1)),
    "values normalised": ("block", make_read(value=lambda s, last, eps: unit(s, eps))),
    "newest value normalised": ("block", make_read(value=lambda s, last, eps: unit(s, eps) if last else s)),
    "newest source weighed alone": ("block", make_read(weights=last_weighed_alone)),
    "weights not divided by their sum": ("block", make_read(weights=torch.exp)),
    "mixtures not normalised": ("block", with_arguments(lambda s, w, g, n: (s, w, g, None))),
    "second mixture not normalised": (
        "rd",
        make_read(norm=lambda h, route, gain, eps: h if route == 1 else gain * unit(h, eps)),
    ),
    "norm gain dropped": ("block", make_read(norm=lambda h, route, gain, eps: unit(h, eps))),
    "norm gain of another sublayer": ("block", of_the_call_before(3)),
    "newest source left out": ("block", with_arguments(lambda s, w, g, n: (s[:-1] or s, w, g, n))),
    "newest finished block left out": (
        "block",
        with_arguments(lambda s, w, g, n: ([*s[:-2], s[-1]] if len(s) > 2 else s, w, g, n)),
    ),
    "embedding left out": ("block", with_arguments(lambda s, w, g, n: (s[1:] or s, w, g, n))),
    "value query unused": ("rd", with_arguments(lambda s, w, g, n: (s, [w[0]] * len(w), g, n))),
    "routes swapped": ("rd", with_arguments(lambda s, w, g, n: (s, w[::-1], g, n))),
}
GRADIENT_FAULTS = {  # the values are right
    "nothing through the rms of the keys": make_read(
        key=lambda s, last, eps: s * (unit(s, eps) / s).detach(),
    ),
    "nothing through the keys": make_read(key=lambda s, last, eps: unit(s, eps).detach()),
    "nothing through the values": make_read(value=lambda s, last, eps: s.detach()),
    "nothing through the newest value": make_read(value=lambda s, last, eps: s.detach() if last else s),
    "nothing through the softmax's sum": make_read(weights=lambda l: l.exp() / l.exp().sum(0).detach()),
    "nothing through the rms of the mixture": make_read(
        norm=lambda h, route, gain, eps: gain * h * (unit(h, eps) / h).detach()
    ),
    "no gradient of the key gain": with_arguments(lambda s, w, g, n: (s, w, g.detach(), n)),
    "no gradient of the norm gain": with_arguments(
        lambda s, w, g, n: (s, w, g, lambda h: model.rms_norm(h, n.weight.detach(), n.eps))
    ),
}


@pytest.mark.parametrize("variant", ["block", "rd", "average"])
def test_without_a_fault_the_read_written_again_passes(variant, monkeypatch):
    monkeypatch.setattr(model, "depth_read", make_read())
    error, what = worst(errors_against_reference(variant))
    assert error < 1e-9, f"{what}: {error}"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_read_shows(fault, monkeypatch):
    variant, read = FAULTS[fault]
    monkeypatch.setattr(model, "depth_read", read)
    assert errors_against_reference(variant)["logits"] > 1e-6


@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
def test_a_fault_of_the_gradients_shows(fault, monkeypatch):
    monkeypatch.setattr(model, "depth_read", GRADIENT_FAULTS[fault])
    errors = errors_against_reference("rd")
    assert errors["logits"] < 1e-9 and worst(errors)[0] > 1e-6


# ---- and against faults of what stands around the read ---------------------------------------------------------------


WRITE = GPT.write


def finishes(gpt, i):
    """Whether sublayer i is the last of its block."""
    return (i + 1) % gpt.config.sublayers_per_block == 0


def a_finished_block_goes_on_as_the_running_sum(gpt, i, output, sources):
    return [*sources[:-1], sources[-1] + output] if i > 0 else WRITE(gpt, i, output, sources)


def a_finished_block_stands_twice(gpt, i, output, sources):
    written = WRITE(gpt, i, output, sources)
    return [*written, written[-1]] if finishes(gpt, i) else written


def the_running_sum_is_the_last_output(gpt, i, output, sources):
    return [*WRITE(gpt, i, output, sources)[:-1], output]


def a_block_is_finished_one_sublayer_early(gpt, i, *arguments):
    return WRITE(gpt, i + 1, *arguments) if i else WRITE(gpt, i, *arguments)


def the_embedding_is_added_into_block_1(gpt, i, output, sources):
    written = WRITE(gpt, i, output, sources)
    first = finishes(gpt, i) and len(written) == 2
    return [written[0], written[0] + written[1]] if first else written


def a_block_is_finished_without_its_last_output(gpt, i, output, sources):
    return sources if finishes(gpt, i) else WRITE(gpt, i, output, sources)


@pytest.mark.parametrize(
    "fault",
    [
        a_finished_block_goes_on_as_the_running_sum,
        a_finished_block_stands_twice,
        the_running_sum_is_the_last_output,
        a_block_is_finished_one_sublayer_early,
        the_embedding_is_added_into_block_1,
        a_block_is_finished_without_its_last_output,
    ],
)
def test_a_fault_of_the_block_sums_shows(fault, monkeypatch):
    monkeypatch.setattr(GPT, "write", fault)
    assert errors_against_reference("block")["logits"] > 1e-6


def test_a_value_route_that_feeds_the_keys_shows(monkeypatch):
    init = Attention.__init__

    def faulty(self, config):
        init(self, config)
        self.rows = [config.d_model, 2 * config.d_model]

    monkeypatch.setattr(Attention, "__init__", faulty)
    assert errors_against_reference("rd")["logits"] > 1e-6


def not_averaged(self, sources, norm, read):
    queries = [getattr(self, name) for name in self.names]
    return read(sources, queries, self.key_norm.weight, self.key_norm.eps, norm)


def averaged_after_the_norm(self, sources, norm, read):
    inputs, alphas = not_averaged(self, sources, norm, read)
    return [sum(inputs) / len(inputs)] * len(inputs), alphas


@pytest.mark.parametrize("forward", [not_averaged, averaged_after_the_norm])
def test_a_faulty_average_shows(forward, monkeypatch):
    monkeypatch.setattr(DepthRead, "forward", forward)
    assert errors_against_reference("average")["logits"] > 1e-6


# ---- what a hacker edits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("variant", ["block", "rd"])
def test_an_edit_of_the_read_is_one_place_and_gradients_follow(variant, name, monkeypatch):
    snippet, edited, function, replacement = EDITS[name]
    edit(snippet, edited, monkeypatch)
    assert errors_against_reference(variant)["logits"] > 1e-6  # it is another model
    monkeypatch.setattr(reference, function, replacement)
    error, what = worst(errors_against_reference(variant))
    assert error < 1e-9, f"{what}: {error}"


# ---- 2. at initialisation every variant is prenorm -------------------------------------------------------------------


@pytest.mark.parametrize("L, N", TOPOLOGIES)
@pytest.mark.parametrize("variant", ROUTED)
def test_init_equals_prenorm(variant, L, N):
    """Zero queries mix uniformly: the residual stream over K, and RMSNorm cancels the scale but for norm_eps."""
    routed = build(tiny(variant, n_layer=L, n_blocks=N, norm_eps=1e-30))
    prenorm, missing = share(routed, build(tiny("prenorm", n_layer=L, n_blocks=N, norm_eps=1e-30), seed=9))
    assert not missing
    idx, targets = tokens(routed.config)
    assert rel(routed(idx)[0], prenorm(idx)[0]) < 1e-11
    assert rel(routed(idx, targets)[1], prenorm(idx, targets)[1]) < 1e-11


# ---- 3. two routes with one query are one route ----------------------------------------------------------------------


def with_equal_queries(variant, block):
    """A model of `variant` with block's parameters; each query_v is its read's query."""
    gpt, missing = share(block, build(dataclasses.replace(block.config, variant=variant), seed=9))
    assert missing == [f"layers.{l}.attn_read.query_v" for l in range(block.config.n_layer)]
    with torch.no_grad():
        for layer in gpt.layers:
            layer.attn_read.query_v.copy_(layer.attn_read.query)
    return gpt


@pytest.mark.parametrize("L, N", [(3, 2), (4, 4), (2, 4)])
def test_rd_with_equal_queries_is_block(L, N):
    block = scatter(build(tiny("block", n_layer=L, n_blocks=N)))
    rd = with_equal_queries("rd", block)
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
    """AdamW on the matrices with decay, on vectors without (or on all with). Returns each step's gradient norm."""
    matrices = [p for p in gpt.parameters() if p.dim() > 1 or decay_all]
    vectors = [p for p in gpt.parameters() if not (p.dim() > 1 or decay_all)]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=eps)
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


@pytest.mark.slow
def test_tied_trains_as_block():
    block = scatter(build(tiny("block")))
    start = copy.deepcopy(block)
    tied, missing = share(block, build(tiny("tied"), seed=9))
    assert not missing and len(tied.state_dict()) == len(block.state_dict())
    train(block), train(tied)
    assert apart(block, start) > 1e-2  # it did move
    assert apart(tied, block) < 1e-10


# ---- 4. the average control cannot differ from its parent ------------------------------------------------------------


def test_average_gradients_are_halves_of_blocks():
    """Equal queries read equal mixtures: each route has half of the gradient, and the other gradients are block's."""
    block = scatter(build(tiny("block")))
    average = with_equal_queries("average", block)
    idx, targets = tokens(block.config)
    assert rel(average(idx)[0], block(idx)[0]) < 1e-12  # block projects q, k, v in one product, average in two
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
    # Two halves have half the square of the whole. So the global norm, and clipping by it, is where average can differ.
    squares = {gpt: sum(g.square().sum().item() for g in gradients(gpt).values()) for gpt in (block, average)}
    assert squares[average] == pytest.approx(squares[block] - squares_of_queries / 2, rel=1e-12)
    assert squares_of_queries > 1e-6 * squares[block]


@pytest.mark.slow
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
    print(f"average against block, 30 steps, clip {clip}: parameters apart {deviation:.2e}, moved {moved:.2e}")
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
    """Zero queries at the start make it block: the mean of two mixtures is the mixture of no query of these."""
    average = scatter(build(tiny("average")))
    idx, _ = tokens(average.config)
    for pick in (lambda q, v: q, lambda q, v: v, lambda q, v: (q + v) / 2):
        block, _ = share(average, build(tiny("block"), seed=9))
        with torch.no_grad():
            for mine, theirs in zip(block.layers, average.layers):
                mine.attn_read.query.copy_(pick(theirs.attn_read.query, theirs.attn_read.query_v))
        assert rel(block(idx)[0], average(idx)[0]) > 1e-2


# ---- 5. same seed, same shared parameters ----------------------------------------------------------------------------


def names_of(variant, L):
    """The parameter names that checkpoints and tools rely on."""
    of_layer = ["attn_norm", "attn.qkv", "attn.out", "mlp_norm", "mlp.gate_up", "mlp.down"]
    names = {"tok_emb.weight", "final_norm.weight"}
    names |= {f"layers.{l}.{name}.weight" for l in range(L) for name in of_layer}
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
            expected = torch.zeros_like(parameter) if "query" in name else torch.ones_like(parameter)
            assert torch.equal(parameter, expected), name
        else:
            writes = name.endswith(("out.weight", "down.weight"))
            std = 0.02 / (math.sqrt(2 * config.n_layer) if writes else 1)
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
            assert parameter.mean().abs() < 5 * std / math.sqrt(parameter.numel()), name


# ---- 6. the frozen route ---------------------------------------------------------------------------------------------


def test_frozen_query_stays_zero():
    gpt = build(tiny("frozen_v"))
    train(gpt, decay_all=True)
    for l, layer in enumerate(gpt.layers):
        assert not layer.attn_read.query_v.requires_grad and layer.attn_read.query_v.grad is None
        assert layer.attn_read.query_v.abs().max() == 0
        assert (layer.attn_read.query.abs().max() > 0) == (l > 0)  # layer 0 has one source and nothing to choose
    route = gpt.routes(tokens(gpt.config)[0])[-2]["v"]
    assert torch.allclose(route, torch.full_like(route, 1 / len(route)), atol=1e-15)


# ---- sizes -----------------------------------------------------------------------------------------------------------


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


# ---- what users get wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(n_layer=3, n_blocks=4), ["n_blocks"]),
        (dict(n_layer=3, n_blocks=12), ["n_blocks"]),  # fewer than one sublayer a block
        (dict(n_layer=0), ["n_layer", "at least 1"]),
        (dict(context=0), ["context", "at least 1"]),
        (dict(d_model=16, n_head=3), ["d_model", "n_head"]),
        (dict(d_model=18, n_head=6), ["d_model", "n_head"]),  # heads of width 3 have no halves to rotate
        (dict(variant="rdd"), ["rdd", *EVERY]),
    ],
)
def test_a_config_that_cannot_be_built_says_why(changes, words):
    with pytest.raises(ValueError) as error:
        GPT(tiny(**(dict(variant="rd") | changes)))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("groups", [("qk",), ("v", "qk"), ("q", "k", "k", "v")])
def test_groups_that_do_not_cut_qkv_are_an_error(groups):
    with pytest.raises(ValueError, match="must cut 'qkv'"):
        model.Variant(groups)


def test_more_tokens_than_the_context_is_an_error():
    gpt = build(tiny("rd"))
    with pytest.raises(ValueError, match="context"):
        gpt(*tokens(gpt.config, T=gpt.config.context + 1))


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny("rd").n_layer = 4


@pytest.mark.parametrize("shape", [(3,), (1, 0), (1, 2, 3)])
def test_token_ids_of_another_shape_are_an_error(shape):
    gpt, idx = build(tiny("rd")), torch.zeros(shape, dtype=torch.long)
    for call in (gpt, gpt.routes, lambda idx: gpt.generate(idx, 2)):
        with pytest.raises(ValueError, match="token ids of shape"):
            call(idx)


@pytest.mark.parametrize("options", [dict(temperature=t) for t in (math.nan, math.inf, -1.0)] + [dict(top_k=0)])
def test_generation_refuses_options_that_mean_nothing(options):
    gpt = build(tiny("rd"))
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        gpt.generate(tokens(gpt.config)[0], 2, **options)


# ---- the interface ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ROUTED)
def test_routes(variant):
    config = tiny(variant, n_layer=3, n_blocks=2)
    idx, _ = tokens(config)
    names = list(reference.REPORTED_ROUTES[variant])
    for dtype in (torch.float32, torch.float64):
        routes = scatter(build(config)).to(dtype).routes(idx)
        assert [list(r) for r in routes] == 3 * [[*names, "mlp"]] + [["final"]]
        sources = [[len(alpha) for alpha in r.values()] for r in routes]
        groups = len(names)  # S = 3: the second block begins at sublayer 3, an MLP
        assert sources == [groups * [1] + [2], groups * [2] + [2], groups * [3] + [3], [3]]
        for alpha in (alpha for r in routes for alpha in r.values()):
            assert alpha.dtype == dtype and alpha.shape[1:] == idx.shape and (alpha >= 0).all()
            assert torch.allclose(alpha.sum(0), torch.ones(idx.shape, dtype=dtype), atol=1e-6)


def test_prenorm_has_no_routes():
    with pytest.raises((ValueError, RuntimeError), match="prenorm"):
        build(tiny("prenorm")).routes(tokens(tiny("prenorm"))[0])


@pytest.mark.parametrize("variant", EVERY)
def test_logits_and_loss(variant):
    """Logits at every position over every padded row. The loss counts no target of -100. float64 stays float64."""
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


@pytest.mark.slow
@pytest.mark.parametrize("variant", EVERY)
def test_the_model_compiles_as_one_graph(variant):
    """In place, with the loss and the gradients of the model that is not compiled, and clean checkpoint keys."""
    gpt = scatter(build(tiny(variant, n_layer=1, n_blocks=2)))
    compiled = copy.deepcopy(gpt)
    torch._dynamo.reset()
    compiled.compile(fullgraph=True, dynamic=False, backend="eager")
    losses = [g(*tokens(gpt.config))[1] for g in (compiled, gpt)]
    assert rel(*losses) < 1e-12 and compiled.state_dict().keys() == gpt.state_dict().keys()
    for loss in losses:
        loss.backward()
    for name, gradient in gradients(gpt).items():
        got = gradients(compiled)[name]
        assert got is None if gradient is None else (got - gradient).abs().max() < 1e-12, name


# ---- generation ------------------------------------------------------------------------------------------------------


def greedy_with_and_without_cache(variant, prompt, new):
    """Two (3, prompt + new): by GPT.generate, and by a whole forward a token, over the last `context` tokens."""
    gpt = scatter(build(tiny(variant)))
    expected, _ = tokens(gpt.config, B=3, T=prompt)
    generated = gpt.generate(expected, new, temperature=0)
    for _ in range(new):
        logits = gpt(expected[:, -gpt.config.context :])[0][:, -1, : gpt.config.vocab_size]
        expected = torch.cat([expected, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return generated, expected


@pytest.mark.parametrize("prompt, new", [(4, 6), (5, 16), (15, 4), (1, 1)])  # context 12: in it, across it, beyond it
@pytest.mark.parametrize("variant", EVERY)
def test_generation_with_cache_is_generation_without(variant, prompt, new):
    assert torch.equal(*greedy_with_and_without_cache(variant, prompt, new))


def test_positions_that_start_at_zero_again_show(monkeypatch):
    """Greedy text of a random model is varied enough for the test above to notice."""
    forward = Attention.forward

    def faulty(self, inputs, rope, cache=None):
        cos, sin = rope
        at_zero = (torch.ones_like(cos), torch.zeros_like(sin))
        return forward(self, inputs, at_zero if cache else rope, cache)  # with a past there is one token

    monkeypatch.setattr(Attention, "forward", faulty)
    assert not torch.equal(*greedy_with_and_without_cache("rd", prompt=4, new=6))


def test_cached_values_in_another_order_show(monkeypatch):
    forward = Attention.forward

    def faulty(self, inputs, rope, cache=None):
        output = forward(self, inputs, rope, cache)
        if cache:
            cache["v"] = cache["v"].roll(1, 2)
        return output

    monkeypatch.setattr(Attention, "forward", faulty)
    assert not torch.equal(*greedy_with_and_without_cache("rd", prompt=4, new=6))


def test_sampling():
    """Draws are a function of the generator. top_k = 1 and tiny temperatures are greedy. The global RNG stays."""
    gpt = scatter(build(tiny("rd")))
    idx, _ = tokens(gpt.config, T=4)

    def draw(seed, **options):
        return gpt.generate(idx, 8, generator=torch.Generator().manual_seed(seed), **options)

    before = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(draw(1, top_k=1), gpt.generate(idx, 8, temperature=0))
    assert torch.equal(draw(1, top_k=1000), draw(1))  # more than there are
    for temperature in (1e-4, 1e-320):
        assert torch.equal(draw(1, temperature=temperature), gpt.generate(idx, 8, temperature=0))
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


# ---- half precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", EVERY)
def test_bf16_autocast(variant):
    """Sources, and prenorm's stream, are held in bf16; loss and gradients are float32 and near those of float32."""
    gpt, seen = scatter(build(tiny(variant))).float(), []
    idx, targets = tokens(gpt.config)
    expected = gpt(idx, targets)[1]

    def recording(sources, *arguments):
        seen.extend(s.dtype for s in sources)
        return model.depth_read(sources, *arguments)

    gpt.read = recording
    if variant == "prenorm":
        for norm in (m for m in gpt.modules() if isinstance(m, model.RMSNorm)):
            norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = gpt(idx, targets)[1]
    assert set(seen) == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert rel(loss, expected) < 0.05
    loss.backward()
    for name, gradient in gradients(gpt).items():
        assert gradient is None or (gradient.dtype == torch.float32 and gradient.isfinite().all()), name


@pytest.mark.parametrize("variant", EVERY)
def test_a_model_in_bfloat16_runs_and_is_near(variant):
    gpt = scatter(build(tiny(variant)))
    idx, targets = tokens(gpt.config)
    half = copy.deepcopy(gpt).bfloat16()
    loss = half(idx, targets)[1]
    loss.backward()
    assert half(idx)[0].dtype == torch.bfloat16
    assert loss.item() == pytest.approx(gpt(idx, targets)[1].item(), rel=0.05)
    assert all(g.isfinite().all() for g in gradients(half).values() if g is not None)


def test_a_model_built_on_meta_takes_assigned_weights():
    gpt = scatter(build(tiny("rd")))
    with torch.device("meta"):
        empty = GPT(gpt.config)
    empty.load_state_dict(gpt.state_dict(), assign=True)
    idx, _ = tokens(gpt.config)
    assert torch.equal(empty(idx)[0], gpt(idx)[0])
