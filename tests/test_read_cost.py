"""lib/read_cost.py: the bytes that reads must move, and the stacked read that ours is compared with."""

import copy

import numpy as np
import pytest
import torch

from lib.config import TrainConfig
from lib.read_cost import plan_of, read_bytes, stacked_read, step_bytes
from model import GPT, DepthRead, ModelConfig, RMSNorm, depth_read

SIZES = dict(vocab_size=50, n_layer=2, n_head=2, d_model=16, d_mlp=24, n_blocks=2, context=16)


def plan(variant, **sizes):
    return plan_of(GPT(ModelConfig(**SIZES | dict(variant=variant) | sizes)))


def test_read_bytes_against_a_hand_count():
    # forward: 3 sources in, 2 mixtures out; backward: 3 sources and 2 gradients in, 3 gradients out: 13 (2, 5, 7)
    assert read_bytes(3, 2, 2, 5, 7, 4) == 13 * 280


def test_the_plan_of_a_pass_against_a_hand_count():
    # L 2, N 2, S 2: attention b0; MLP b0, p; attention b0, b1; MLP b0, b1, p; final b0, b1, b2
    assert plan("rd") == [(1, 2), (2, 1), (2, 2), (3, 1), (3, 1)]
    assert plan("prenorm") == [(1, 0)] * 5
    config = TrainConfig(d_model=16, context=16, batch_tokens=64, dtype="float32")
    assert step_bytes(config, plan("rd")) == (3 * (1 + 2 + 2 + 3 + 3) + 2 * 7) * 64 * 16 * 4
    more = step_bytes(config, plan("rd")) - step_bytes(config, plan("block"))
    assert more == 2 * 2 * 64 * 16 * 4  # one more route in two layers


@pytest.mark.parametrize("L, N, variant", [(3, 6, "rd"), (3, 2, "q_k_v"), (3, 1, "block"), (4, 2, "rd")])
def test_the_plan_is_the_models(L, N, variant):
    model = GPT(ModelConfig(**SIZES | dict(n_layer=L, n_blocks=N, variant=variant)))
    routes, expected = model.routes(torch.zeros(1, 4, dtype=torch.long)), []
    for layer in routes:
        attention = [alphas.shape[0] for group, alphas in layer.items() if group not in ("mlp", "final")]
        expected += [(attention[0], len(attention))] if attention else []
        expected += [(alphas.shape[0], 1) for group, alphas in layer.items() if group in ("mlp", "final")]
    assert plan_of(model) == expected and model.read is depth_read


def random_read(D, std=1.0, dtype=torch.float64):
    """A DepthRead of two routes and an RMSNorm, with random parameters."""
    config = ModelConfig(vocab_size=50, n_head=2, d_model=D, variant="rd")
    read, norm = DepthRead(config, ("qk", "v")), RMSNorm(config)
    for parameter in (*read.parameters(), *norm.parameters()):
        torch.nn.init.normal_(parameter, std=std)
    return read.to(dtype), norm.to(dtype)


def test_the_stacked_read_is_the_same_read():
    read, norm = random_read(16)
    sources = [torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    inputs = [*sources, *read.parameters(), norm.weight]
    weights = [torch.randn(2, 5, 16, dtype=torch.float64) for _ in range(2)]
    ours, stacked = read(sources, norm, depth_read)[0], stacked_read(read, sources, norm)
    torch.testing.assert_close(ours, stacked, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(outputs, inputs, weights) for outputs in (ours, stacked)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def our_read(read, sources, norm):
    return read(sources, norm, depth_read)[0]


def loop_read(read, sources, norm):
    """One softmax over all sources in float32, written as loops; the norm of the mixture in the sources' dtype."""
    s, mixtures = [source.float() for source in sources], []
    for name in ("query", "query_v"):
        direction = read.key_norm.weight * getattr(read, name)
        logits = [(x * direction).sum(-1) * (x.square().mean(-1) + read.key_norm.eps).rsqrt() for x in s]
        alphas = torch.stack(logits).softmax(0)
        mixtures.append(norm(sum(alpha[..., None] * x for alpha, x in zip(alphas, s))).to(sources[0].dtype))
    return mixtures


def errors_in_bf16(function, seed):
    """Relative errors, in the 2-norm, of inputs and gradients of one bf16 read against the stacked one in float64."""
    torch.manual_seed(seed)
    modules = random_read(64, std=0.5, dtype=torch.float32)
    states = [(torch.randn(2, 33, 64) * 2.0**k).bfloat16() for k in range(5)]
    weights, results = [torch.randn(2, 33, 64).bfloat16().double() for _ in range(2)], []
    for dtype, f in ((torch.bfloat16, function), (torch.float64, stacked_read)):
        wide = dtype == torch.float64
        read, norm = (copy.deepcopy(m).double() if wide else m for m in modules)
        sources = [s.detach().to(dtype).requires_grad_() for s in states]
        with torch.autocast("cpu", torch.bfloat16, enabled=not wide):
            outputs = f(read, sources, norm)
        inputs = [*sources, *read.parameters(), norm.weight]
        gradients = torch.autograd.grad(outputs, inputs, [w.to(x.dtype) for w, x in zip(weights, outputs)])
        results.append([t.double() for t in (*outputs, *gradients)])
    return np.array([((got - exact).norm() / exact.norm()).item() for got, exact in zip(*results)])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_our_read_in_bf16_is_as_exact_as_float32_arithmetic_allows(compiled):
    """As exact as loops in float32 from bf16 sources, and, by far, more than the stacked read that autocast runs."""
    ours = torch.compile(our_read, backend="aot_eager") if compiled else our_read
    ours, loop, stacked = (
        np.mean([errors_in_bf16(f, s) for s in range(5)], 0) for f in (ours, loop_read, stacked_read)
    )
    assert (ours[:7] <= 1.1 * loop[:7]).all(), (ours, loop)  # two inputs, the gradients of five sources
    assert (ours[7:] < 1e-5).all(), ours  # gradients of gains and queries: nothing was rounded on the way
    assert (ours < stacked).all(), (ours, stacked)
