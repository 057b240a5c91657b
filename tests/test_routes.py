"""lib/routes.py: divergence and entropy against their sums by hand, route statistics against the routes of models."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toy_runs import random_gpt

from lib import routes
from lib.routes import attention_sources, average_routes, entropy, js_divergence, route_statistics

LN2 = math.log(2)

# ---- divergence and entropy ------------------------------------------------------------------------------------------


def kl_by_hand(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q) if a > 0)


def js_by_hand(p, q):
    """JS of two distributions (K,)."""
    m = [(a + b) / 2 for a, b in zip(p, q)]
    return (kl_by_hand(p, m) + kl_by_hand(q, m)) / 2


def entropy_by_hand(p):
    return -sum(a * math.log(a) for a in p if a > 0)


def distributions(seed, K=5, count=200):
    """(K, count): random ones, a third of them with zeros."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(K, 0.5), count).T
    p[rng.integers(0, K, count // 3), np.arange(count // 3)] = 0
    return p / p.sum(0)


def test_js_divergence_is_its_definition():
    p, q = distributions(0), distributions(1)
    found = js_divergence(p, q)
    np.testing.assert_allclose(found, [js_by_hand(*columns) for columns in zip(p.T, q.T)], atol=1e-14)
    np.testing.assert_array_equal(found, js_divergence(q, p))
    half = math.log(4 / 3) / 2 + (math.log(2 / 3) + math.log(2)) / 4
    assert js_divergence([1, 0], [0.5, 0.5]) == pytest.approx(half, rel=1e-14)


def test_js_divergence_at_its_ends():
    p = distributions(2)
    assert (js_divergence(p, p) == 0).all()
    assert js_divergence([1, 0], [0, 1]) == LN2
    assert js_divergence([0.1, 0.9, 0, 0], [0, 0, 0.3, 0.7]) == pytest.approx(LN2, rel=1e-15)
    ends = [([1, 0], [1, 0]), ([1.0], [1.0]), ([5e-324, 1], [0, 1]), ([1e-300, 1], [1, 1e-300]), ([0, 0, 1], [0, 1, 0])]
    for a, b in ends:
        assert 0 <= js_divergence(a, b) <= LN2


def test_js_divergence_of_saturated_float32_routes():
    logits = torch.randn(6, 2, 50, generator=torch.Generator().manual_seed(0)) * 40
    js = js_divergence(logits.softmax(0).numpy(), (logits + 1e-6).softmax(0).numpy())
    assert js.dtype == np.float64 and js.shape == (2, 50) and (js >= 0).all() and (js < 1e-6).all()


def test_entropy_is_its_definition():
    p = distributions(3)
    np.testing.assert_allclose(entropy(p), [entropy_by_hand(column) for column in p.T], atol=1e-14)
    assert entropy([1, 0, 0]) == 0 and entropy(np.full(4, 0.25)) == pytest.approx(math.log(4))


# ---- sources ---------------------------------------------------------------------------------------------------------

COLUMNS = {  # (n_layer, n_blocks): for each layer the columns of its attention's sources among b_0, ..., b_N, p
    (2, 1): [[0], [0, 2]],
    (3, 2): [[0], [0, 3], [0, 1, 3]],
    (3, 3): [[0], [0, 1], [0, 1, 2]],
    (4, 2): [[0], [0, 3], [0, 1], [0, 1, 3]],
    (3, 6): [[0], [0, 1, 2], [0, 1, 2, 3, 4]],
    (6, 4): [[0], [0, 5], [0, 1, 5], [0, 1, 2], [0, 1, 2, 5], [0, 1, 2, 3, 5]],
}


@pytest.mark.parametrize("L, N", COLUMNS)
def test_sources_have_their_columns(L, N):
    gpt = random_gpt("rd", n_layer=L, n_blocks=N)
    assert [attention_sources(layer, gpt.config) for layer in range(L)] == COLUMNS[L, N]
    layers = gpt.routes(torch.zeros(1, 4, dtype=torch.long))
    assert [len(layer["qk"]) for layer in layers[:-1]] == [len(columns) for columns in COLUMNS[L, N]]


# ---- route statistics ------------------------------------------------------------------------------------------------


def windows_of(count, context=16):
    return np.random.default_rng(0).integers(0, 97, (count, context))


def check_mean_over_tokens():
    """Two routes that swap their sources from token to token have equal means and are as far apart as can be."""
    swap = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # (K, B, T)
    layers = [{"qk": torch.ones(1, 1, 2), "v": torch.ones(1, 1, 2)}, {"qk": swap, "v": 1 - swap}, {"final": swap}]
    fake = SimpleNamespace(
        config=SimpleNamespace(n_layer=2, n_blocks=2, sublayers_per_block=2),  # layer 1 reads b_0 and b_1
        variant=SimpleNamespace(groups=("qk", "v")),
        routes=lambda idx: layers,
        tok_emb=SimpleNamespace(weight=torch.zeros(1)),
    )
    found = route_statistics(fake, np.zeros((1, 2), np.int64))
    assert found["js"][0] == 0 and found["js"][1] == LN2
    np.testing.assert_array_equal(found["profile"]["qk"][1], [0.5, 0.5, np.nan, np.nan])
    np.testing.assert_array_equal(found["entropy"]["v"], [0, 0])


def test_divergence_is_the_mean_over_tokens_not_that_of_the_means(monkeypatch):
    check_mean_over_tokens()
    for name in ("js_divergence", "entropy"):
        per_token = getattr(routes, name)

        def of_the_mean(*alphas, per_token=per_token):
            means = [np.broadcast_to(alpha.mean((1, 2), keepdims=True), alpha.shape) for alpha in alphas]
            return per_token(*means)

        with monkeypatch.context() as mutated, pytest.raises(AssertionError):
            mutated.setattr(routes, name, of_the_mean)
            check_mean_over_tokens()


@pytest.mark.parametrize(
    "variant, pair", [("rd", ("qk", "v")), ("q_kv", ("q", "kv")), ("q_k_v", ("q", "v")), ("frozen_v", ("qk", "v"))]
)
def test_routes_of_a_model(variant, pair):
    gpt = random_gpt(variant)
    windows = windows_of(5)
    found = route_statistics(gpt, windows, tokens_a_pass=32)
    assert tuple(found["of_q_and_v"]) == pair
    layers = gpt.routes(torch.from_numpy(windows))
    for layer in range(gpt.config.n_layer):
        p, q = (layers[layer][group].double().numpy().reshape(-1, windows.size) for group in pair)
        js = np.mean([js_by_hand(*columns) for columns in zip(p.T, q.T)])
        assert found["js"][layer] == pytest.approx(js, abs=1e-6)
        of_v = np.mean([entropy_by_hand(column) for column in q.T])
        assert found["entropy"][pair[1]][layer] == pytest.approx(of_v, abs=1e-6)
        profile = found["profile"][pair[0]][layer]
        assert np.flatnonzero(np.isfinite(profile)).tolist() == attention_sources(layer, gpt.config)
        np.testing.assert_allclose(profile[np.isfinite(profile)], p.mean(1), atol=1e-6)
    assert found["js"][0] == 0 and (found["js"][1:] > 1e-4).all()


def test_tied_routes_are_equal_and_one_group_has_no_divergence():
    assert (route_statistics(random_gpt("tied"), windows_of(2))["js"] == 0).all()
    assert route_statistics(random_gpt("block"), windows_of(2))["js"] is None


def test_average_over_runs():
    runs = [{"step": 8, **route_statistics(random_gpt("rd", seed), windows_of(2))} for seed in (1, 2, 3)]
    average = average_routes(runs)
    assert average["sources"] == ["b_0", "b_1", "b_2", "b_3", "p"] and (average["step"], average["n"]) == (8, 3)
    np.testing.assert_allclose(average["js"], sum(run["js"] for run in runs) / 3)
    np.testing.assert_allclose(average["entropy"]["v"], sum(run["entropy"]["v"] for run in runs) / 3)
    per_run = [run["js"].sum() / 3 for run in runs]
    assert average["js_over_layers"]["mean"] == pytest.approx(np.mean(per_run))
    assert 0 < min(per_run) < max(per_run) < LN2
    assert average["js_without_layer_0"]["mean"] == pytest.approx(np.mean(per_run) * 3 / 2)  # layer 0 has none
    for weights in average["profile_over_layers"].values():
        assert weights.sum() == pytest.approx(1, abs=1e-5)
    one_layer = [{"step": 8, **route_statistics(random_gpt("rd", n_layer=1, n_blocks=1), windows_of(2))}]
    assert average_routes(one_layer)["js_without_layer_0"] is None
    of_block = average_routes([{"step": 8, **route_statistics(random_gpt("block"), windows_of(2))}])
    assert "js" not in of_block and list(of_block["profile"]) == ["qkv"]
