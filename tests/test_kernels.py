"""fused.c computes what model.py's mix_finished does, gradients included, whatever the threads; and faults of its text show.

K sources   R routes   B batch   T tokens   D width
"""
import ctypes
import dataclasses
import math
import types

import pytest
import torch

from lib.config import TrainConfig
from lib.errors import UserError
import fused
import model as model_py
import train
from model import GPT, DepthRead, ModelConfig, RMSNorm, Source, inverse_rms
from test_identities import LAYERS_AND_BLOCKS, ROUTED, build, errors_against_reference, tiny, tokens, worst


def fused_gpt(config):
    gpt = GPT(config)
    gpt.read_finished = fused.read_finished
    return gpt


FUSED = types.SimpleNamespace(ModelConfig=ModelConfig, GPT=fused_gpt)


@pytest.fixture
def threads():
    """Sets torch's threads; one again at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("L, N", LAYERS_AND_BLOCKS)
@pytest.mark.parametrize("variant", ROUTED)
def test_model_equals_reference(variant, L, N, monkeypatch):
    calls = []
    monkeypatch.setattr(fused, "call", lambda name, *arguments, original=fused.call: calls.append(name) or original(name, *arguments))
    error, what = worst(errors_against_reference(FUSED, variant, L, N))
    assert error < 1e-9, f"{what}: {error}"
    assert {"forward", "backward"} == set(calls)


# ---- one read, or two, against model.py's operations ----


def reads_of(variant, D, dtype, seed=1):
    """(two reads of a block, the norm of the first) with random queries and gains."""
    torch.manual_seed(seed)
    config = ModelConfig(vocab_size=50, n_head=1, d_model=D, variant=variant)
    modules = DepthRead(config, model_py.VARIANTS[variant].groups), DepthRead(config), RMSNorm(config)
    for parameter in (p for m in modules for p in m.parameters()):
        torch.nn.init.normal_(parameter, std=D**-0.5 if parameter.ndim == 1 else 1.0)
    first, second, norm = (m.to(dtype) for m in modules)
    return [first, second], norm


def states_of(K, B, T, D, dtype):
    return [(torch.randn(B, T, D, dtype=torch.float64) * 2.0 ** (k % 3)).to(dtype).requires_grad_() for k in range(K)]


def results(read_finished, reads, norm, states, seed=2):
    """Every output of phase 1 and every gradient, for random gradients of lse, mixtures and the states that are passed on."""
    finished = [Source(s, inverse_rms(s.detach(), norm.eps)) for s in states]
    partials, logits, passed = read_finished(finished, reads, norm)
    outputs = [out for p in partials for out in (p.lse, *p.mixtures)] + [s for s, _ in passed]
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) for out in outputs]
    parameters = [p for m in (*reads, norm) for p in m.parameters() if p.requires_grad]
    return [*outputs, *logits, *torch.autograd.grad(outputs, [*states, *parameters], gradients)]


def distance(got, expected):
    return max(((g.double() - e.double()).norm() / e.double().norm().clamp_min(1e-30)).item() for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("K, B, T, D, n", [(1, 1, 1, 2, 1), (4, 2, 5, 6, 3), (9, 1, 7, 18, 2), (3, 2, 33, 70, 1), (2, 1, 3, 130, 8), (3, 1, 21, 64, 2)])
@pytest.mark.parametrize("variant", ["block", "rd", "average", "q_k_v"])
def test_any_size_on_any_number_of_threads(variant, K, B, T, D, n, threads):
    reads, norm = reads_of(variant, D, torch.float64)
    states = states_of(K, B, T, D, torch.float64)
    expected = results(model_py.read_finished, reads, norm, states)
    threads(n)
    got = results(fused.read_finished, reads, norm, states)
    assert distance(got, expected) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(got, results(fused.read_finished, reads, norm, states)))  # the same bits again


def test_float32_is_about_as_exact_as_the_operations():
    errors = {fused.read_finished: [], model_py.read_finished: []}
    for seed in range(4):
        torch.manual_seed(seed)
        states = states_of(6, 2, 40, 96, torch.float32)
        exact = results(model_py.read_finished, *reads_of("rd", 96, torch.float64, seed), [s.detach().double().requires_grad_() for s in states])
        for read_finished, each in errors.items():
            got = results(read_finished, *reads_of("rd", 96, torch.float32, seed), states)
            each.append([distance([g], [e]) for g, e in zip(got, exact)])
    ours, operations = (torch.tensor(each).mean(0) for each in errors.values())
    assert (ours < 2.5 * operations + 1e-7).all(), (ours, operations)  # a few roundings of float32 each


def test_exponentials_are_about_as_exact_as_their_arguments():
    """e^x (1 + e) = e^(x + e): an error e of 6e-8 |x| is that of a rounding of x."""
    x = torch.cat([-88 * torch.rand(20_000), -torch.rand(20_000), torch.tensor([0.0, 5e-7, -87.0, -1e4, -math.inf, math.nan])])
    got = x.clone()
    fused.library(torch.float32, 64, 1, 1).exponentials(ctypes.c_void_p(got.data_ptr()), ctypes.c_long(len(got)))
    exact = x.double().exp()
    assert ((got - exact).abs() <= 8e-8 * (1 + x.abs()) * exact + 2e-38)[:-2].all()
    assert 0 <= got[-2] < 2e-38 and got[-1].isnan()


def test_a_small_gradient_of_lse_is_not_lost_in_large_ones_of_the_mixtures():
    """At K = 1, and where one source has all the weight, d_alpha - mean is zero, and the direction's gradient is d_lse's alone."""
    errors = {}
    for name, read_finished, dtype in (("exact", model_py.read_finished, torch.float64), ("kernel", fused.read_finished, torch.float32)):
        (first, second), norm = reads_of("rd", 64, dtype)
        torch.manual_seed(7)
        states = [10 * torch.randn(2, 9, 64).to(dtype)]
        partials, _, _ = read_finished([Source(s, inverse_rms(s, norm.eps)) for s in states], [first, second], norm)
        outputs = [*partials[1].mixtures, partials[1].lse]
        gradients = [torch.randn(2, 9, 64).to(dtype), 1e-3 * torch.randn(2, 9, 1).to(dtype)]
        (errors[name],) = torch.autograd.grad(outputs, [second.query], gradients)
    assert distance([errors["kernel"]], [errors["exact"]]) < 1e-5


def test_large_logits_stay_finite():
    reads, norm = reads_of("rd", 16, torch.float32)
    with torch.no_grad():
        reads[0].query.mul_(1e5)
    states = states_of(4, 1, 6, 16, torch.float32)
    got, expected = (results(f, reads, norm, states) for f in (fused.read_finished, model_py.read_finished))
    assert all(out.isfinite().all() for out in got)
    assert distance(got[:3], expected[:3]) < 1e-4


@pytest.mark.parametrize("normed", [False, True])
def test_equal_queries_are_bitwise_equal_routes(normed, threads):
    """The average control stands on that."""
    threads(2)
    (first, second), norm = reads_of("rd" if normed else "average", 50, torch.float32)
    with torch.no_grad():
        first.query_v.copy_(first.query)
    states = states_of(5, 2, 9, 50, torch.float32)
    finished = [Source(s, inverse_rms(s.detach(), norm.eps)) for s in states]
    (partial, _), _, _ = fused.read_finished(finished, [first, second], norm)
    assert torch.equal(*partial.mixtures) and torch.equal(*partial.lse.unbind(-1))
    gradient = torch.randn(2, 9, 50)
    of_query, of_query_v = torch.autograd.grad(partial.mixtures, [first.query, first.query_v], [gradient, gradient])
    assert of_query.abs().max() > 0 and torch.equal(of_query, of_query_v)


def test_the_average_control_keeps_its_queries_equal():
    gpt = build(tiny("average"), module=FUSED).float()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    for step in range(10):
        optimizer.zero_grad()
        gpt(*tokens(gpt.config, seed=step))[1].backward()
        optimizer.step()
    reads = [layer.attn_read for layer in gpt.layers[1:]]  # the first layer has one source
    assert all(torch.equal(read.query, read.query_v) and read.query.abs().max() > 0 for read in reads)


# ---- gradients that are handed on ----


def chain(read_finished, between):
    """Three phases, each reading what the one before passed on -> gradients, twice, for everything that is given and for all states
    that were passed on, and the latter one by one. `between(states, extra)` -> another term of the loss, and what the next phase reads."""
    reads, norm = reads_of("rd", 20, torch.float64)
    states = states_of(3, 2, 4, 20, torch.float64)
    extra = torch.randn(2, 4, 20, dtype=torch.float64, requires_grad=True)
    finished, loss, seen = [Source(s, inverse_rms(s.detach(), norm.eps)) for s in states], 0, []
    for power in (1, 2, 3):
        partials, _, finished = read_finished(finished, reads, norm)
        seen += [s for s, _ in finished]
        term, read_next = between([s for s, _ in finished], extra * power)
        loss = loss + sum((h**power).sum() for p in partials for h in p.mixtures) + term
        finished = [Source(s, inverse_rms(s.detach(), norm.eps)) for s in read_next]

    def gradients(inputs):
        return torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True, materialize_grads=True)

    given = [*states, extra, *reads[0].parameters(), norm.weight]
    return gradients(given), gradients([*given, *seen]), [gradients([s])[0] for s in seen]


@pytest.mark.parametrize("between", [
    lambda states, extra: (0, states),  # nobody else reads the states, but their own gradients are asked for
    lambda states, extra: ((states[0] + extra).square().sum(), states),  # one gradient tensor for both
    lambda states, extra: ((states[1].transpose(0, 1) * extra.transpose(0, 1)).sum(), states),  # not contiguous
    lambda states, extra: (states[2].sum(), states),  # an expanded gradient, of stride 0
    lambda states, extra: (0, [states[0] + extra, *states[1:]]),  # and the next phase reads the sum
    lambda states, extra: (0, [states[0] + states[1], states[2], extra + states[1]]),
    lambda states, extra: (0, [states[0], states[0], states[2].view_as(extra)]),
])  # fmt: skip
def test_whoever_else_holds_a_gradient_keeps_it(between):
    torch.manual_seed(5)
    expected, *_ = chain(model_py.read_finished, between)
    torch.manual_seed(5)
    got, together, alone = chain(fused.read_finished, between)
    assert distance(got, expected) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip([*got, *alone], together, strict=True))  # asking for more changes none, nor does a second backward


def test_gradients_of_any_layout():
    """Of the mixtures: expanded, of stride 0, and transposed. (Those of lse come through a split, which makes them whole.)"""
    (first, second), norm = reads_of("rd", 12, torch.float64)
    states, weight = states_of(3, 2, 4, 12, torch.float64), torch.randn(4, 2, 12, dtype=torch.float64)
    got = {}
    for read_finished in (fused.read_finished, model_py.read_finished):
        partials, _, _ = read_finished([Source(s, inverse_rms(s.detach(), norm.eps)) for s in states], [first, second], norm)
        (qk, v), (mlp,) = (p.mixtures for p in partials)
        loss = qk.sum() + (v.transpose(0, 1) * weight).sum() + (mlp.transpose(0, 1) * weight).sum() + (partials[1].lse.transpose(0, 1) * weight[..., :1]).sum()
        got[read_finished] = torch.autograd.grad(loss, [*states, first.query, first.query_v, second.query, norm.weight])
    assert distance(*got.values()) < 1e-12


def test_a_hook_may_keep_the_gradient_it_sees():
    reads, norm = reads_of("rd", 20, torch.float64)
    finished, kept = [Source(s, inverse_rms(s.detach(), norm.eps)) for s in states_of(3, 2, 4, 20, torch.float64)], []
    loss = 0
    for last in (False, False, True):
        partials, _, finished = fused.read_finished(finished, reads, norm)
        loss = loss + sum(h.square().sum() for p in partials for h in p.mixtures)
        for state, _ in finished if not last else []:
            state.register_hook(lambda gradient: kept.append((gradient, gradient.clone())) and None)
    loss.backward()
    assert len(kept) == 6 and all(torch.equal(gradient, copy) for gradient, copy in kept)


def test_no_second_derivative_in_silence():
    reads, norm = reads_of("block", 8, torch.float64)
    finished = [Source(s, inverse_rms(s.detach(), norm.eps)) for s in states_of(2, 1, 3, 8, torch.float64)]
    out = fused.read_finished(finished, reads, norm)[0][0].mixtures[0].sum()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(out, finished[0].state, create_graph=True)


# ---- where it does not apply ----


def test_half_precision_takes_the_operations(monkeypatch):
    monkeypatch.setattr(fused, "call", lambda *_: pytest.fail("the kernel was called"))
    gpt = build(tiny("rd"), module=FUSED).float()
    idx, targets = tokens(gpt.config)
    with torch.autocast("cpu", torch.bfloat16):
        gpt(idx, targets)[1].backward()
    assert gpt.bfloat16()(idx)[0].dtype == torch.bfloat16


CPU = torch.device("cpu")


def config_of(**keys):
    return TrainConfig(**(dict(dtype="float32", device="cpu") | keys))


def test_who_gets_the_kernel(monkeypatch, capsys):
    assert train.pick_fused(config_of(), CPU) and train.pick_fused(config_of(fused="true", dtype="float64"), CPU)
    assert not train.pick_fused(config_of(fused="false"), CPU)
    assert not train.pick_fused(config_of(variant="prenorm"), CPU)
    assert not train.pick_fused(config_of(dtype="bfloat16"), CPU) and not train.pick_fused(config_of(), torch.device("cuda"))
    with pytest.raises(UserError, match="^config key fused: .* not for float32 on cuda; use --fused=false"):
        train.pick_fused(config_of(fused="true"), torch.device("cuda"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("L, N", LAYERS_AND_BLOCKS)
@pytest.mark.parametrize("variant", ROUTED)
def test_a_run_compiles_nothing_after_its_start(variant, L, N):
    config = tiny(variant, n_layer=L, n_blocks=N)
    fused.prepare(config, torch.float64)
    compiled = fused.library.cache_info().misses
    build(config, module=FUSED)(*tokens(config))[1].backward()
    assert fused.library.cache_info().misses == compiled


def test_a_compiler_that_fails_for_one_size_is_found_at_the_start(monkeypatch, tmp_path, capsys):
    (tmp_path / "cc").write_text('#!/bin/sh\ncase "$*" in *-DROUTES=1*) exec cc "$@";; esac\necho full >&2; exit 1\n')
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    fused.library.cache_clear()
    assert not train.pick_fused(config_of(), CPU)
    assert "fused.c does not compile: full" in capsys.readouterr().err


@pytest.mark.parametrize("compiler, why", [
    ("no-such-compiler -x", "fused.c needs a C compiler, and no-such-compiler -x is not here"), ("", "fused.c needs a C compiler"),
    ("false", "fused.c does not compile: "), ("true", "fused.c cannot be compiled and loaded: "), ("cc -c", "fused.c cannot be compiled and loaded: "),
    ("c++ -fpermissive -w", "fused.c cannot be compiled and loaded: "), ('"cc', "fused.c cannot be compiled and loaded: No closing quotation"),
])  # fmt: skip
def test_without_a_compiler_the_operations_do(compiler, why, monkeypatch, capsys):
    monkeypatch.setenv("CC", compiler)
    fused.library.cache_clear()
    assert not train.pick_fused(config_of(), CPU)
    line = capsys.readouterr().err
    assert why in line and line.count("\n") == 1
    with pytest.raises(UserError, match="^config key fused: fused.c .*; use --fused=false"):
        train.pick_fused(config_of(fused="true"), CPU)


def test_without_a_temporary_folder_the_operations_do(monkeypatch, capsys):
    def none():
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setattr(fused.tempfile, "TemporaryDirectory", none)
    fused.library.cache_clear()
    assert not train.pick_fused(config_of(), CPU)
    assert "fused.c cannot be compiled and loaded: No usable temporary directory" in capsys.readouterr().err


def test_a_width_beyond_the_stack():
    reads, norm = reads_of("block", 2_000_000, torch.float64)
    states = states_of(2, 1, 1, 2_000_000, torch.float64)
    assert distance(*(results(f, reads, norm, states) for f in (fused.read_finished, model_py.read_finished))) < 1e-9


@pytest.mark.parametrize("refused", ["*-fopenmp*", "*-fopenmp*|*-march=*"])
def test_a_compiler_that_knows_no_threads_will_do(refused, monkeypatch, tmp_path):
    """Clang may come without OpenMP, and on some machines knows no -march=native."""
    plain = tmp_path / "cc"
    plain.write_text(f'#!/bin/sh\ncase "$*" in {refused}) exit 1;; esac\nexec cc "$@"\n')
    plain.chmod(0o755)
    monkeypatch.setenv("CC", str(plain))
    fused.library.cache_clear()
    error, what = worst(errors_against_reference(FUSED, "rd", 3, 2))
    fused.library.cache_clear()
    assert error < 1e-9, what


# ---- the same checks, against deliberate faults ----

FAULTS = {  # a snippet that stands in fused.c exactly once, what replaces it
    "a lane left out of a sum": ("for (int i = 0; i < LANES; i++) sum", "for (int i = 1; i < LANES; i++) sum"),
    "a vector left out of a dot product": ("vec sum[R] = {0};\n    for (int c = 0; c < C; c++)", "vec sum[R] = {0};\n    for (int c = 1; c < C; c++)"),
    "logits without the inverse rms": ("l[k][r] *= inverses[k][t]", "l[k][r] *= 1"),
    "lse without the largest logit": ("lse[t][r] += log(sum[r])", "lse[t][r] = log(sum[r])"),
    "weights not divided by their sum": ("alpha[k][r] /= sum[r]", "alpha[k][r] /= 1"),
    "the last source left out of mixtures": ("for (long k = 0; k < K; k++) {\n            const vec s", "for (long k = 0; k < K - 1; k++) {\n            const vec s"),
    "mixture not normalised": ("h[c] *= inverse * gain[c]", "h[c] *= gain[c]"),
    "gain left out": ("h[c] *= inverse * gain[c]", "h[c] *= inverse"),
    "one more mixture normalised": ("r < NORMED; r++) normalise", "r <= NORMED; r++) normalise"),
    "norm backward without its projection": ("gain[c] * d_y[c] * inverse - along * h[c]", "gain[c] * d_y[c] * inverse"),
    "gain's gradient not normalised": ("d_gain[c] += d_y[c] * h[c] * inverse", "d_gain[c] += d_y[c] * h[c]"),
    "sum over the sources left out": ("d_alpha[k][r] -= mean[r]", "d_alpha[k][r] -= 0"),
    "lse without a gradient": ("(d_alpha[k][r] + d_lse[t][r])", "d_alpha[k][r]"),
    "nothing through the inverse rms": ("through_rms[k] -= d_logit * logits[t * K + k][r] * inverse * inverse / D", "through_rms[k] -= 0"),
    "source without the mixtures' part": ("alpha[k][r] * d_h_c[r] + d_dot", "d_dot"),
    "source without the logits' part": ("alpha[k][r] * d_h_c[r] + d_dot[k][r] * w_c[r]", "alpha[k][r] * d_h_c[r]"),
    "direction's gradient left out": ("d_w_c[r] += d_dot[k][r] * s", "d_w_c[r] += 0 * s"),
    "later gradients left out": ("d_s += row(passed[k], t)[c]", "d_s += 0"),
    "exponentials of one token fewer": ("exponentials(alphas[0], (end - start) * K * R);\n        for (long t = start; t < end; t++) {\n            real(*",
                                        "exponentials(alphas[0], (end - start - 1) * K * R);\n        for (long t = start; t < end; t++) {\n            real(*"),
    "one token left out": ("tokens * (i + 1) / threads, K, eps, states, inverses, w, gain, logits, lse, mixtures)",
                           "tokens * (i + 1) / threads - 1, K, eps, states, inverses, w, gain, logits, lse, mixtures)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_kernel_shows(fault, monkeypatch, tmp_path):
    snippet, replacement = FAULTS[fault]
    source = fused.SOURCE.read_text()
    assert source.count(snippet) == 1, f"{snippet!r} no longer stands in fused.c exactly once: give this fault what replaced it"
    (tmp_path / "fused.c").write_text(source.replace(snippet, replacement))
    monkeypatch.setattr(fused, "SOURCE", tmp_path / "fused.c")
    reads, norm = reads_of("rd", 14, torch.float64)
    states = states_of(4, 2, 5, 14, torch.float64)  # D 14: the vectors have two lanes each
    fused.library.cache_clear()
    got = results(fused.read_finished, reads, norm, states)
    fused.library.cache_clear()
    error = distance(got, results(model_py.read_finished, reads, norm, states))
    assert not error < 1e-6
