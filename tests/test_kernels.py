"""kernels/cpu computes what model.py's depth_read does, gradients included; kernels.use knows who gets it.

B batch   T tokens   D width   K sources   R routes
"""

import copy
import ctypes
import functools
import math
import types
from types import SimpleNamespace

import pytest
import torch
from models import (
    EDITS,
    ROUTED,
    TOPOLOGIES,
    build,
    edit,
    errors_against_reference,
    gradients,
    rel,
    scatter,
    tiny,
    tokens,
    worst,
)

import kernels
import model
from kernels import cpu
from lib.errors import UserError
from lib.measurement import kept_bytes
from model import DepthRead

CPU = torch.device("cpu")
OPERATOR = torch.ops.rd_attnres.depth_read.default


@pytest.fixture
def threads():
    """Sets torch's threads. At the end they are as before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def nothing_compiled(monkeypatch):
    """No library has been compiled yet, and what the test compiles goes with it."""
    monkeypatch.setattr(cpu, "library", functools.cache(cpu.library.__wrapped__))


# ---- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("L, N", TOPOLOGIES)
@pytest.mark.parametrize("variant", ROUTED)
def test_model_equals_reference(variant, L, N, monkeypatch):
    calls, call = [], cpu.call
    monkeypatch.setattr(cpu, "call", lambda name, *arguments: calls.append(name) or call(name, *arguments))
    error, what = worst(errors_against_reference(variant, L, N, read=cpu.depth_read))
    assert error < 1e-9, f"{what}: {error}"
    assert set(calls) == {"forward", "backward"}


def test_generation_is_that_of_the_plain_read():
    gpt = scatter(build(tiny("rd")))
    idx, _ = tokens(gpt.config)
    expected = gpt.generate(idx, 10, temperature=0)
    gpt.read = cpu.depth_read
    assert torch.equal(gpt.generate(idx, 10, temperature=0), expected)


@pytest.mark.slow
def test_a_compiled_model_holds_the_kernel_in_one_graph():
    gpt = scatter(build(tiny("rd", n_layer=1, n_blocks=2)))
    gpt.read = cpu.depth_read
    compiled, (idx, targets) = copy.deepcopy(gpt), tokens(gpt.config)
    torch._dynamo.reset()
    compiled.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    for g in (compiled, gpt):
        g(idx, targets)[1].backward()
    assert rel(compiled(idx, targets)[1], gpt(idx, targets)[1]) < 1e-12
    for name, gradient in gradients(gpt).items():
        assert (gradients(compiled)[name] - gradient).abs().max() < 1e-12, name


@pytest.mark.slow
def test_the_average_control_keeps_its_queries_equal():
    gpt = build(tiny("average")).float()
    gpt.read = cpu.depth_read
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    for step in range(10):
        optimizer.zero_grad()
        gpt(*tokens(gpt.config, seed=step))[1].backward()
        optimizer.step()
    reads = [layer.attn_read for layer in gpt.layers[1:]]  # the first layer has one source
    assert all(torch.equal(read.query, read.query_v) and read.query.abs().max() > 0 for read in reads)


# ---- one read --------------------------------------------------------------------------------------------------------


def make_norm(weight):
    """An RMSNorm with this gain, which need not be a leaf."""
    norm = model.RMSNorm(types.SimpleNamespace(norm_eps=1e-8, d_model=len(weight)))
    del norm.weight
    norm.weight = weight
    return norm


def make_read(K=4, B=2, T=5, D=16, R=2, dtype=torch.float64, normalised=True, seed=1):
    """The arguments of a read, at random: sources, queries, key_gain, eps, norm."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, scale=1.0):
        x = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    sources = [random(B, T, D, scale=2.0 ** (k % 3)) for k in range(K)]
    queries = [random(D, scale=2 * D**-0.5) for _ in range(R)]
    return sources, queries, random(D), 1e-8, make_norm(random(D)) if normalised else None


def tensors(arguments):
    sources, queries, key_gain, _, norm = arguments
    return [*sources, *queries, key_gain, *([] if norm is None else [norm.weight])]


def converted(arguments, function):
    """The same arguments, every tensor through `function`."""
    sources, queries, key_gain, eps, norm = arguments
    norm = None if norm is None else make_norm(function(norm.weight))
    return [function(s) for s in sources], [function(w) for w in queries], function(key_gain), eps, norm


def results(read, arguments, seed=2):
    """The read's R inputs and the gradients of all its tensors, for random gradients of the inputs."""
    inputs, _ = read(*arguments)
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in inputs]
    return [*inputs, *torch.autograd.grad(inputs, tensors(arguments), given)]


def distances(got, expected):
    """Of each tensor, in the 2-norm and relative."""
    pairs = [(g.double(), e.double()) for g, e in zip(got, expected, strict=True)]
    return [((g - e).norm() / e.norm().clamp_min(1e-30)).item() for g, e in pairs]


def distance(got, expected):
    return max(math.inf if math.isnan(d) else d for d in distances(got, expected))


@pytest.mark.parametrize(
    "K, B, T, D, R, normalised, n",  # on n threads
    [
        (1, 1, 1, 2, 1, True, 1),
        (2, 1, 3, 16, 1, True, 8),  # more threads than tokens
        (3, 1, 21, 16, 2, False, 2),
        (4, 2, 5, 6, 3, True, 3),
        (5, 1, 1, 1, 1, False, 1),
        (6, 2, 9, 17, 2, True, 4),  # vectors of one lane
        (7, 3, 8, 64, 1, False, 5),
        (8, 1, 33, 70, 2, True, 1),
        (9, 1, 7, 18, 3, False, 2),
        (9, 2, 16, 96, 1, True, 7),
    ],
)
def test_any_size_on_any_number_of_threads(K, B, T, D, R, normalised, n, threads):
    arguments = make_read(K, B, T, D, R, normalised=normalised)
    expected = results(model.depth_read, arguments)
    threads(n)
    got = results(cpu.depth_read, arguments)
    assert distance(got, expected) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(got, results(cpu.depth_read, arguments)))  # the same bits again


@pytest.mark.parametrize("normalised", [True, False])
def test_float32_is_about_as_exact_as_the_plain_read(normalised):
    ours, plain = [], []
    for seed in range(4):
        arguments = make_read(6, 2, 40, 96, 2, torch.float32, normalised, seed)
        exact = results(model.depth_read, converted(arguments, lambda x: x.detach().double().requires_grad_()))
        ours.append(distances(results(cpu.depth_read, arguments), exact))
        plain.append(distances(results(model.depth_read, arguments), exact))
    ours, plain = torch.tensor(ours).mean(0), torch.tensor(plain).mean(0)
    assert (ours < 2.5 * plain + 1e-7).all(), (ours, plain)  # a few roundings of float32 each


def test_exponentials_are_about_as_exact_as_their_arguments():
    """e^x (1 + e) = e^(x + e): an error e of 6e-8 |x| is that of a rounding of x."""
    special = torch.tensor([0.0, 5e-7, -87.0, -1e4, -math.inf, math.nan])
    x = torch.cat([-88 * torch.rand(20_000), -torch.rand(20_000), special])
    got = x.clone()
    library = cpu.library(torch.float32, 16, 2, True)
    library.exponentials(ctypes.c_void_p(got.data_ptr()), ctypes.c_long(len(got)))
    exact = x.double().exp()
    assert ((got - exact).abs() <= 8e-8 * (1 + x.abs()) * exact + 2e-38)[:-2].all()
    assert 0 <= got[-2] < 2e-38 and got[-1].isnan()


def test_one_source_gives_queries_no_gradient_at_all():
    """Its weight is 1 whatever the query. A rounding error here would move queries that have nothing to choose."""
    arguments = make_read(K=1, dtype=torch.float32)
    inputs, _ = cpu.depth_read(*arguments)
    for gradient in torch.autograd.grad([(1e3 * x).sum() for x in inputs], arguments[1]):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_small_gradient_of_a_route_is_not_lost_in_a_large_one():
    arguments = make_read(dtype=torch.float32)
    exact = converted(arguments, lambda x: x.detach().double().requires_grad_())
    got, expected = (
        torch.autograd.grad([1e6 * inputs[0].sin().sum(), 1e-6 * inputs[1].sin().sum()], given[1])
        for read, given in ((cpu.depth_read, arguments), (model.depth_read, exact))
        for inputs in [read(*given)[0]]
    )
    assert distance(got, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_logits_stay_finite(dtype):
    sources, queries, *rest = make_read(dtype=dtype)
    arguments = [sources, [queries[0].detach().mul(1e5).requires_grad_(), queries[1]], *rest]
    got, expected = (results(f, arguments) for f in (cpu.depth_read, model.depth_read))
    assert all(x.isfinite().all() for x in got)
    assert distance(got[:2], expected[:2]) < 1e-4


def test_what_is_not_a_number_stays_so():
    """A source that is broken must show in the loss. Tokens that do not read it are as they were."""
    arguments = make_read(dtype=torch.float32)
    expected, _ = cpu.depth_read(*arguments)
    with torch.no_grad():
        arguments[0][1][0, 3, 7] = math.nan
    for got, before in zip(cpu.depth_read(*arguments)[0], expected):
        broken = torch.zeros(got.shape[:2], dtype=torch.bool)
        broken[0, 3] = True
        assert got[broken].isnan().all() and torch.equal(got[~broken], before[~broken])


@pytest.mark.parametrize("normalised", [False, True])
def test_equal_queries_are_bitwise_equal_routes(normalised, threads):
    """The average control stands on that."""
    threads(2)
    sources, queries, *rest = make_read(T=9, dtype=torch.float32, normalised=normalised)
    queries = [queries[0], queries[0].detach().clone().requires_grad_()]
    inputs, _ = cpu.depth_read(sources, queries, *rest)
    assert torch.equal(*inputs)
    gradient = torch.randn(inputs[0].shape)
    of_query, of_query_v = torch.autograd.grad(inputs, queries, [gradient, gradient])
    assert of_query.abs().max() > 0 and torch.equal(of_query, of_query_v)


# ---- layouts, and gradients that others hold -------------------------------------------------------------------------


@pytest.mark.parametrize("read", [cpu.depth_read, model.depth_read])
def test_gradients_and_sources_of_any_layout(read):
    """Sources: transposed, expanded (stride 0), a slice. Gradients: expanded, transposed. Against contiguous ones."""
    sources, queries, *rest = make_read(K=3, T=4)
    transposed = sources[0].detach().transpose(0, 1).contiguous().transpose(0, 1)
    expanded = sources[1].detach()[:1].expand(2, 4, 16)
    sliced = torch.cat([sources[2].detach()] * 2, 2)[..., 5:21]
    odd = [s.requires_grad_() for s in (transposed, expanded, sliced)]
    assert not any(s.is_contiguous() for s in odd)
    even = [s.detach().contiguous().requires_grad_() for s in odd]
    weight = torch.randn(4, 2, 16, dtype=torch.float64)
    gained = []
    for given, f in ((odd, read), (even, model.depth_read)):
        (first, second), _ = f(given, queries, *rest)
        layouts = (first.sum() + (second.transpose(0, 1) * weight).sum(), [*given, *queries])
        gained.append(torch.autograd.grad(*layouts))
    assert distance(*gained) < 1e-12


def test_a_route_that_nobody_uses():
    sources, queries, *rest = make_read()
    got, expected = (
        torch.autograd.grad(f(sources, queries, *rest)[0][0].sum(), [*sources, *queries], materialize_grads=True)
        for f in (cpu.depth_read, model.depth_read)
    )
    assert distance(got, expected) < 1e-12 and got[-1].abs().max() == 0


def chain(read, seed=5):
    """Four reads, each of all sources and of the inputs before -> loss, its leaves, the sources that came to be."""
    sources, queries, *rest = make_read(K=2, seed=seed)
    leaves, made = [*sources, *queries], []
    for power in (1, 2, 3, 2):
        inputs, _ = read([*sources, *made], queries, *rest)
        made.append(inputs[0] ** power + inputs[1])
    return sum(x.sin().sum() for x in made) + sources[0].square().sum(), leaves, made


def test_whoever_else_holds_a_gradient_keeps_it():
    """Gradients of sources that many reads share; asking for more of them, or twice, changes no bit."""
    loss, leaves, _ = chain(model.depth_read)
    expected = torch.autograd.grad(loss, leaves)
    loss, leaves, made = chain(cpu.depth_read)
    got = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert distance(got, expected) < 1e-12
    together = torch.autograd.grad(loss, [*leaves, *made], retain_graph=True)
    alone = [torch.autograd.grad(loss, [x], retain_graph=True)[0] for x in made]
    assert all(torch.equal(a, b) for a, b in zip([*got, *alone], together, strict=True))


def test_a_hook_may_keep_the_gradient_it_sees():
    loss, leaves, made = chain(cpu.depth_read)
    kept = []
    for x in (*leaves, *made):
        x.register_hook(lambda gradient: kept.append((gradient, gradient.clone())) and None)
    loss.backward()
    assert len(kept) >= len(leaves) + len(made)
    assert all(torch.equal(gradient, copy) for gradient, copy in kept)


def test_no_second_derivative_in_silence():
    sources, queries, *rest = make_read(K=2)
    inputs, _ = cpu.depth_read(sources, queries, *rest)
    (first,) = torch.autograd.grad(inputs[0].square().sum(), queries[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        first.sum().backward()


def test_kept_for_the_backward():
    """The sources, and K R + R + K scalars a token."""
    K, B, T, D, R = 5, 2, 7, 16, 2
    arguments = make_read(K, B, T, D, R)
    kept = kept_bytes(lambda: cpu.depth_read(*arguments)[0], tensors(arguments)[K:])
    assert kept == 8 * B * T * (K * D + K * R + R + K)


@pytest.mark.slow
def test_a_width_beyond_the_stack():
    arguments = make_read(K=2, B=1, T=1, D=2_000_000, R=1)
    assert distance(results(cpu.depth_read, arguments), results(model.depth_read, arguments)) < 1e-9


# ---- the operator ----------------------------------------------------------------------------------------------------


def of_operator(arguments):
    """A read's arguments as the operator takes them: of the norm its gain."""
    *others, norm = arguments
    return (*others, norm and norm.weight)


@pytest.mark.slow
@pytest.mark.parametrize("normalised", [True, False])
def test_the_operator_keeps_torchs_rules(normalised):
    """Schema, fake, autograd registration, tracing: torch's own checks."""
    torch.library.opcheck(OPERATOR, of_operator(make_read(normalised=normalised)))


def test_a_fake_backward_has_the_shapes_of_the_real_one():
    arguments = of_operator(converted(make_read(), torch.Tensor.detach))
    *inputs, scalars = OPERATOR(*arguments)
    call = torch.ops.rd_attnres.depth_read_backward.default
    torch.library.opcheck(call, (inputs, scalars, *arguments), test_utils=["test_schema", "test_faketensor"])


@pytest.fixture
def no_kernel(monkeypatch):
    monkeypatch.setattr(cpu, "call", lambda *_: pytest.fail("the kernel was called"))


@pytest.mark.parametrize("autocast", [True, False])
def test_a_model_in_half_precision_is_read_by_the_definition(autocast, no_kernel):
    """`use` keeps it from the kernel, but a model may change after that."""
    gpt = scatter(build(tiny("rd"))).float()
    gpt.read, (idx, targets) = cpu.depth_read, tokens(gpt.config)
    gpt = gpt if autocast else gpt.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = gpt(idx, targets)[1]
        loss.backward()
        assert loss.isfinite() and gpt(idx)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("place", [0, 1])
def test_a_read_of_two_dtypes_is_read_by_the_definition(place, no_kernel):
    """One source, or one query, is narrower: the kernel would read past its end."""
    arguments = make_read()
    arguments[place][0] = arguments[place][0].detach().float()
    got, expected = (f(*arguments)[0] for f in (cpu.depth_read, model.depth_read))
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


# ---- the norm after the read -----------------------------------------------------------------------------------------


def loud_norm(self, x):
    return 3 * model.rms_norm(x, self.weight, self.eps)


def test_an_edited_norm_is_what_the_model_computes(monkeypatch, capsys):
    """RMSNorm.forward edited in model.py: the kernel, which has an RMSNorm of its own, steps aside."""
    before = scatter(build(tiny("rd")))(tokens(tiny("rd"))[0])[0]
    monkeypatch.setattr(model.RMSNorm, "forward", loud_norm)
    gpt = scatter(build(tiny("rd")))
    assert kernels.use("auto", gpt, CPU, torch.float64) == "plain"
    assert_one_line_says_so(capsys.readouterr())
    assert rel(gpt(tokens(gpt.config)[0])[0], before) > 0.1


@pytest.mark.parametrize("change", ["LayerNorm", "eps", "hook"])
def test_a_norm_that_is_not_the_kernels_is_called_after_it(change):
    gpt, calls = scatter(build(tiny("rd"))), []
    for layer in gpt.layers:
        if change == "LayerNorm":
            layer.attn_norm = torch.nn.LayerNorm(gpt.config.d_model, dtype=torch.float64)
        elif change == "eps":
            layer.attn_norm.eps = 1.0
        else:
            layer.attn_norm.register_forward_hook(lambda *_: calls.append(1))
    losses = []
    for read in (model.depth_read, cpu.depth_read):
        gpt.read = read
        losses.append(gpt(*tokens(gpt.config))[1])
    assert rel(losses[1], losses[0]) < 1e-12
    assert rel(losses[0], scatter(build(tiny("rd")))(*tokens(gpt.config))[1]) > 1e-4 or change == "hook"
    assert len(calls) == (2 * 2 * gpt.config.n_layer if change == "hook" else 0)


# ---- who gets the kernel ---------------------------------------------------------------------------------------------


def use(reads="auto", variant="rd", device=CPU, dtype=torch.float32):
    """kernels.use on a tiny model -> (what it says, the model's read)."""
    gpt = build(tiny(variant)).to(dtype)
    return kernels.use(reads, gpt, device, dtype), gpt.read


def test_who_gets_the_kernel(capsys):
    plain, kernel = ("plain", model.depth_read), ("cpu", cpu.depth_read)
    assert use() == use("cpu") == use("auto", dtype=torch.float64) == kernel
    assert use("plain") == use("auto", dtype=torch.bfloat16) == use(device=torch.device("cuda")) == plain
    assert all(use(reads, "prenorm") == plain for reads in ("auto", "plain", "cpu"))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("device, dtype", [("cuda", torch.float32), ("cpu", torch.bfloat16)])
def test_a_kernel_that_cannot_be_is_an_error_where_it_was_asked_for(device, dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UserError, match=f"^config key reads: .*, not {name} on {device}; use --reads=plain"):
        use("cpu", device=torch.device(device), dtype=dtype)


def test_the_comparison_changes_neither_the_model_nor_the_global_rng():
    """Pairs of runs stand on that."""
    gpt = scatter(build(tiny("rd")))
    before, state = torch.get_rng_state(), copy.deepcopy(gpt.state_dict())
    assert kernels.use("cpu", gpt, CPU, torch.float64) == "cpu"
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, state[name]) and p.grad is None for name, p in gpt.named_parameters())


@pytest.mark.parametrize("variant", ROUTED)
def test_a_run_compiles_nothing_after_its_start(variant):
    gpt = build(tiny(variant))
    assert kernels.use("cpu", gpt, CPU, torch.float64) == "cpu"
    compiled = cpu.library.cache_info().misses
    gpt(*tokens(gpt.config))[1].backward()
    assert cpu.library.cache_info().misses == compiled


# ---- a model.py that was edited --------------------------------------------------------------------------------------


def assert_one_line_says_so(printed):
    assert printed.err == "" and printed.out.count("\n") == 1
    assert "model.py's depth read was changed" in printed.out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", ["block", "rd", "average"])
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_read_is_what_the_run_computes(name, variant, dtype, monkeypatch, capsys):
    snippet, edited, *_ = EDITS[name]
    edit(snippet, edited, monkeypatch)
    for reads in ("auto", "cpu"):
        assert use(reads, variant, dtype=dtype) == ("plain", model.depth_read)
        assert_one_line_says_so(capsys.readouterr())


@pytest.mark.parametrize(
    "weights",
    [
        "(30 * (l / 30).tanh()).softmax(0)",
        "l.clamp(-10, 10).softmax(0)",
        "l.masked_fill(l < l.topk(min(3, len(l)), 0).values[-1:], -math.inf).softmax(0)",  # of three sources
        "(l / (2 if len(l) > 4 else 1)).softmax(0)",
        "l.softmax(0) * (l.softmax(0) > 0.05)",
        "(1.02 * l).softmax(0)",
    ],
)
def test_an_edit_that_shows_in_large_logits_or_many_sources_alone(weights, monkeypatch, capsys):
    edit("l.softmax(0)", weights, monkeypatch)
    assert use("cpu") == ("plain", model.depth_read)
    assert_one_line_says_so(capsys.readouterr())


class WithTemperature(DepthRead):
    """A read with a learned temperature, 1 at the start: one query more for a definition that takes it."""

    def __init__(self, config, groups):
        super().__init__(config, groups)
        self.temperature = torch.nn.Parameter(torch.ones(()))

    def forward(self, sources, norm, read):
        queries = [getattr(self, name) for name in self.names]
        arguments = sources, queries, self.key_norm.weight, self.key_norm.eps, norm
        return self.call(read, *arguments)


class ByAnArgument(WithTemperature):
    def call(self, read, *arguments):
        return read(*arguments, temperature=self.temperature)


class ByTheQueries(WithTemperature):
    def call(self, read, sources, queries, *rest):
        return read(sources, [w / self.temperature for w in queries], *rest)


def test_an_argument_that_the_kernel_lacks_keeps_it_away(monkeypatch, capsys):
    plain = model.depth_read

    def hot_read(sources, queries, key_gain, eps, norm=None, temperature=1.0):
        return plain(sources, [w / temperature for w in queries], key_gain, eps, norm)

    monkeypatch.setattr(model, "depth_read", hot_read)
    monkeypatch.setattr(model, "DepthRead", ByAnArgument)
    assert use() == ("plain", hot_read)
    assert_one_line_says_so(capsys.readouterr())


def test_a_parameter_in_front_of_the_read_works_with_the_kernel(monkeypatch):
    monkeypatch.setattr(model, "DepthRead", ByTheQueries)
    gpt = scatter(build(tiny("rd")))
    for layer in gpt.layers:
        torch.nn.init.constant_(layer.attn_read.temperature, 0.7)
    losses = []
    for reads in ("plain", "cpu"):
        assert kernels.use(reads, gpt, CPU, torch.float64) == reads
        gpt.zero_grad()
        loss = gpt(*tokens(gpt.config))[1]
        loss.backward()
        losses.append([loss.detach(), *(p.grad for p in gpt.parameters())])
    assert distance(*losses) < 1e-10 and gpt.layers[1].attn_read.temperature.grad.abs() > 0


@pytest.mark.parametrize(
    "fault, what",
    [
        (lambda x: 1.01 * x, "the outputs differ"),
        (lambda x: x * math.nan, "the outputs differ"),
        (lambda x: x[:1], "does not take its arguments"),
        (lambda x: 1.01 * x - 0.01 * x.detach(), "the gradients differ"),
    ],
)
def test_a_kernel_that_computes_something_else_stays_away(fault, what, monkeypatch, capsys):
    read = cpu.depth_read
    monkeypatch.setattr(cpu, "depth_read", lambda *arguments: ([fault(x) for x in read(*arguments)[0]], None))
    assert use("cpu")[0] == "plain"
    printed = capsys.readouterr()
    assert_one_line_says_so(printed)
    assert what in printed.out


def test_a_definition_that_fails_is_heard(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("size mismatch in my edit")

    monkeypatch.setattr(model, "depth_read", broken)
    with pytest.raises(RuntimeError, match="size mismatch in my edit"):
        use("cpu")


# ---- compilers -------------------------------------------------------------------------------------------------------


def compiler(folder, monkeypatch, script):
    """CC is this shell script from now on."""
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def assert_plain_with_a_warning(why, capsys):
    assert use("auto")[0] == "plain"
    printed = capsys.readouterr()
    assert why in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    with pytest.raises(UserError, match="^config key reads: kernels/cpu.c .*; use --reads=plain"):
        use("cpu")


@pytest.mark.parametrize(
    "command, why",
    [
        ("no-such-compiler -x", "kernels/cpu.c needs a C compiler, and no-such-compiler -x is not here"),
        ("", "kernels/cpu.c needs a C compiler"),
        ("false", "kernels/cpu.c does not compile: "),
        ("true", "kernels/cpu.c cannot be compiled and loaded: "),
        pytest.param("cc -c", "kernels/cpu.c cannot be compiled and loaded: ", marks=pytest.mark.slow),
        pytest.param("c++ -fpermissive -w", "kernels/cpu.c cannot be compiled and loaded: ", marks=pytest.mark.slow),
        ('"cc', "kernels/cpu.c cannot be compiled and loaded: No closing quotation"),
    ],
)
def test_without_a_c_compiler_reads_are_plain(command, why, nothing_compiled, monkeypatch, capsys):
    monkeypatch.setenv("CC", command)
    assert_plain_with_a_warning(why, capsys)


def test_without_a_temporary_folder_reads_are_plain(nothing_compiled, monkeypatch, capsys):
    def none():
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setattr(cpu, "tempfile", SimpleNamespace(TemporaryDirectory=none))
    assert_plain_with_a_warning("kernels/cpu.c cannot be compiled and loaded: No usable temporary", capsys)


def test_a_compiler_that_fails_for_one_size_is_found_at_the_start(nothing_compiled, monkeypatch, tmp_path, capsys):
    compiler(tmp_path, monkeypatch, 'case "$*" in *-DROUTES=1*) exec cc "$@";; esac; echo full >&2; exit 1')
    assert_plain_with_a_warning("kernels/cpu.c does not compile: full", capsys)


@pytest.mark.parametrize("refused", ["*-fopenmp*", "*-fopenmp*|*-march=*"])
def test_a_compiler_that_knows_no_threads_will_do(refused, nothing_compiled, monkeypatch, tmp_path, threads):
    """Clang may come without OpenMP, and on some machines knows no -march=native."""
    compiler(tmp_path, monkeypatch, f'case "$*" in {refused}) exit 1;; esac; exec cc "$@"')
    threads(3)
    arguments = make_read()
    assert distance(results(cpu.depth_read, arguments), results(model.depth_read, arguments)) < 1e-12


# ---- the same comparison, against deliberate faults of cpu.c ---------------------------------------------------------

# Both directions take exponentials so: what follows tells them apart.
EXPONENTIALS = """exponentials(alphas[0], (end - start) * K * R);
        for (long t = start; t < end; t++) {
            """
FAULTS = {  # a snippet that stands in cpu.c exactly once, what replaces it
    "a lane left out of a sum": ("for (int i = 0; i < LANES; i++) sum", "for (int i = 1; i < LANES; i++) sum"),
    "a vector left out of a dot product": (
        "square = {0};\n    for (int c = 0; c < C; c++) {\n        square += s[c]",
        "square = {0};\n    for (int c = 1; c < C; c++) {\n        square += s[c]",
    ),
    "logits without the inverse rms": ("l[k][r] *= inverse[k]", "l[k][r] *= 1"),
    "eps left out": ("/ D + eps);\n                for", "/ D);\n                for"),
    "lse without the largest logit": ("lse[r] += log(sum[r])", "lse[r] = log(sum[r])"),
    "weights not divided by their sum": ("alpha[k][r] /= sum[r]", "alpha[k][r] /= 1"),
    "the last source left out of mixtures": (
        "for (long k = 0; k < K; k++) {\n            const vec s",
        "for (long k = 0; k < K - 1; k++) {\n            const vec s",
    ),
    "mixture not normalised": ("h[c] *= inverse * gain[c]", "h[c] *= gain[c]"),
    "gain left out": ("h[c] *= inverse * gain[c]", "h[c] *= inverse"),
    "one mixture fewer normalised": ("r < R; r++) normalise(", "r < R - 1; r++) normalise("),
    "norm backward without its projection": (
        "gain[c] * d_x[c] * inverse - along * h[c]",
        "gain[c] * d_x[c] * inverse",
    ),
    "gain's gradient not normalised": ("d_gain[c] += d_x[c] * h[c] * inverse", "d_gain[c] += d_x[c] * h[c]"),
    "sum over the sources left out": ("(d_alpha[k][r] - mean[r])", "d_alpha[k][r]"),
    "nothing through the inverse rms": (
        "through_rms[k] -= d_logit * l[k * R + r] * inverse[k] * inverse[k] / D",
        "through_rms[k] -= 0",
    ),
    "source without the mixtures' part": ("alpha[k][r] * d_h_c[r] + d_dot", "d_dot"),
    "source without the logits' part": ("alpha[k][r] * d_h_c[r] + d_dot[k][r] * w_c[r]", "alpha[k][r] * d_h_c[r]"),
    "direction's gradient left out": ("d_w_c[r] += d_dot[k][r] * s", "d_w_c[r] += 0 * s"),
    "direction's gradient without the inverse rms": ("d_dot[k][r] = d_logit * inverse[k]", "d_dot[k][r] = d_logit"),
    "exponentials of one token fewer, forward": (
        EXPONENTIALS + "real(*",
        EXPONENTIALS.replace("start)", "start - 1)") + "real(*",
    ),
    "exponentials of one token fewer, backward": (
        EXPONENTIALS + "const",
        EXPONENTIALS.replace("start)", "start - 1)") + "const",
    ),
    "one token left out, forward": (
        "tokens * (i + 1) / threads, K, eps, sources, w, gain, scalars, outputs)",
        "tokens * (i + 1) / threads - 1, K, eps, sources, w, gain, scalars, outputs)",
    ),
    "one token left out, backward": (
        "tokens * (i + 1) / threads, K, eps, sources, w, gain, scalars, d_outputs",
        "tokens * (i + 1) / threads - 1, K, eps, sources, w, gain, scalars, d_outputs",
    ),
    "threads that share their sums": ("sums + i * (R + 1) * D, ", "sums + i * R * D, "),
}


def error_of_cpu_c(source, folder, monkeypatch):
    """Of a read with a source as small as eps lets it count, by this text of cpu.c, compiled fast."""
    (folder / "cpu.c").write_text(source)
    monkeypatch.setattr(cpu, "SOURCE", folder / "cpu.c")
    monkeypatch.setattr(cpu, "FLAGS", "-O0 -shared -fPIC".split())
    monkeypatch.setattr(cpu, "FASTER", [])
    sources, *rest = make_read(D=14)  # the vectors have two lanes each
    small = sources[2].detach().mul(1e-4).requires_grad_()
    arguments = [[*sources[:2], small, *sources[3:]], *rest]
    return distance(results(cpu.depth_read, arguments), results(model.depth_read, arguments))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_kernel_shows(fault, nothing_compiled, monkeypatch, tmp_path, threads):
    threads(2)
    snippet, replacement = FAULTS[fault]
    source = cpu.SOURCE.read_text()
    assert source.count(snippet) == 1, f"{snippet!r} must stand in cpu.c once: give this fault what replaced it"
    assert error_of_cpu_c(source.replace(snippet, replacement), tmp_path, monkeypatch) > 1e-6


def test_without_a_fault_the_text_passes(nothing_compiled, monkeypatch, tmp_path, threads):
    threads(2)
    assert error_of_cpu_c(cpu.SOURCE.read_text(), tmp_path, monkeypatch) < 1e-12


# ---- and against faults of the autograd formula around it ------------------------------------------------------------


def after_backward(change):
    """cpu.call; what the backward has added up, sums (threads, R + 1, D), then goes through `change`, in place."""

    def call(name, *arguments, original=cpu.call):
        original(name, *arguments)
        if name == "backward":
            *_, sums, d_sources = arguments
            change(sums, d_sources)

    return dict(call=call)


def of_saved(change):
    """cpu.split, which gives the formula what was saved for it; `change`: queries, key_gain -> these two."""

    def split(*arguments, original=cpu.split):
        sources, (*queries, key_gain, scalars), norm_gain = original(*arguments)
        queries, key_gain = change(queries, key_gain)
        return sources, (*queries, key_gain, scalars), norm_gain

    return dict(split=split)


FORMULA_FAULTS = {
    "sums of the first thread alone": after_backward(lambda sums, _: sums[1:].zero_()),
    "gradient of the norm gain left out": after_backward(lambda sums, _: sums[:, -1].zero_()),
    "gradients of the routes in another order": after_backward(lambda sums, _: sums[:, :2].copy_(sums[:, :2].flip(1))),
    "gradient of the last source left out": after_backward(lambda _, d_sources: d_sources[-1].zero_()),
    "queries in another order": of_saved(lambda queries, gain: (queries[::-1], gain)),
    "key gain left out": of_saved(lambda queries, gain: (queries, torch.ones_like(gain))),
}


@pytest.mark.parametrize("fault", FORMULA_FAULTS)
def test_a_fault_of_the_formula_shows(fault, monkeypatch, threads):
    threads(2)
    arguments = make_read()
    expected = results(model.depth_read, arguments)
    assert distance(results(cpu.depth_read, arguments), expected) < 1e-12
    for name, function in FORMULA_FAULTS[fault].items():
        monkeypatch.setattr(cpu, name, function)
    assert distance(results(cpu.depth_read, arguments), expected) > 1e-6
