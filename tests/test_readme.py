"""README.md says what is there: its code is model.py's, its recipes work as written, its links and names exist."""

import inspect
import json
import math
import re
import shlex
import shutil
import subprocess

import numpy as np
import pytest
import reference
import tiny_runs
import torch
from helpers import ROOT, write_folder

import kernels
import model
import train
from lib.config import parse_config
from model import GPT, VARIANTS, ModelConfig, Variant

README = (ROOT / "README.md").read_text(encoding="utf-8")
RUNNING = (ROOT / "RUNNING.md").read_text(encoding="utf-8")
COMPILER = shutil.which("cc")  # kernels/cpu.py asks for it by this name


def fences(text):
    """The contents of the fenced blocks, in order."""
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.S | re.M)


def code(words):
    """The one fenced block of README that contains `words`."""
    (block,) = [block for block in fences(README) if words in block]
    return block


def build(variant):
    """A float64 model with random parameters, ids (1, T) and targets (1, T)."""
    torch.manual_seed(1)
    sizes = dict(vocab_size=50, n_layer=2, n_head=2, d_model=8, d_mlp=12, context=8, n_blocks=2, init_std=0.3)
    gpt = GPT(ModelConfig(variant=variant, **sizes)).double()
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.ndim == 1 and parameter.requires_grad:  # a frozen query is zero by definition
                parameter.normal_()
    window = torch.randint(50, (1, 4))
    return gpt, window[:, :-1], window[:, 1:]


def loss_and_gradients(gpt, idx, targets):
    """The loss, and the gradient of every trained parameter, as one list."""
    loss = gpt(idx, targets)[1]
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in gpt.parameters() if p.requires_grad])]


def close(one, other):
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(one, other, strict=True))


# ---- what it quotes --------------------------------------------------------------------------------------------------


def test_depth_read_is_quoted_without_its_docstring():
    source = inspect.getsource(model.depth_read)
    docstring = re.compile(r'^    """.*?"""\n', re.S | re.M)
    assert code("def depth_read") == docstring.sub("", source, count=1)


def test_the_mean_row_is_that_of_results_xs():
    comparisons = json.loads((ROOT / "results/xs/summary.json").read_text())["comparisons"]
    (end,) = [c for c in comparisons if c["tokens"] == 1_024_000 and c["variant"] == "rd"]
    low, high = end["interval"]
    (row,) = [line for line in README.splitlines() if line.startswith("| mean, n = 5")]
    assert f"**{end['mean']:.4f}** [{low:.4f}, {high:.4f}]" in row


@pytest.mark.parametrize("name", ["README.md", "RUNNING.md"])
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"^\[\w+\]: (\S+)$", text, re.M)
    headings = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)}
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("http"):
            assert (ROOT / target).exists(), target
    for label in re.findall(r"\]\[(\w+)\]", text):
        assert f"\n[{label}]: " in text, label


def test_the_table_of_equations_names_what_exists():
    table = README.split("## From the equations to the code")[1].split("\n## ")[0]
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    source = (ROOT / "model.py").read_text(encoding="utf-8")
    rows = [row for row in table.splitlines() if "`test_" in row]
    assert len(rows) >= 5
    for row in rows:
        *_, where, test, _ = row.split("|")
        assert f"def {test.strip(' `')}(" in tests, test
        for name in re.findall(r"\w+", " ".join(re.findall("`(.*?)`", where))):
            assert re.search(rf"\b{name}\b", source), name


def test_scripts_and_configs_in_its_commands_exist():
    words = [word for block in fences(README + RUNNING) for word in re.findall(r"[\w./]+\.(?:py|sh|toml)\b", block)]
    for word in set(words) - {"configs/wide.toml"}:  # made by a command of the block it stands in
        assert list(ROOT.glob(word)) or list(ROOT.glob(f"*/{word}")), word


def test_lines_are_short():
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.S | re.M)
    assert [line for line in prose.splitlines() if len(line) > 100] == []


# ---- its recipes -----------------------------------------------------------------------------------------------------


def test_a_new_grouping(monkeypatch, data, tmp_path, leave_no_trace):
    """The line for VARIANTS gives the model that the equations say, in both backends, and it trains."""
    name, entry = re.search(r'`"(\w+)": (Variant\(.*\)),', README).groups()
    monkeypatch.setitem(VARIANTS, name, eval(entry, {"Variant": Variant}))
    roles = {"q": "query", "k": reference.UNIFORM, "v": reference.UNIFORM}
    monkeypatch.setitem(reference.QUERY_OF_ROLE, name, roles)
    monkeypatch.setitem(reference.REPORTED_ROUTES, name, {"q": "q", "kv": "k"})

    gpt, idx, targets = build(name)
    got = loss_and_gradients(gpt, idx, targets)
    expected = reference.forward(dict(gpt.named_parameters()), gpt.config, idx)
    loss = reference.nll(expected["logits"], targets)
    trained = [p for p in gpt.parameters() if p.requires_grad]
    assert close(got, [loss.detach(), *torch.autograd.grad(loss, trained)])
    for route, alpha in expected["routes"][1].items():
        assert torch.allclose(gpt.routes(idx)[1][route], alpha)

    if COMPILER:
        assert kernels.use("auto", gpt, torch.device("cpu"), torch.float64) == "cpu"
        assert close(loss_and_gradients(gpt, idx, targets), got)
    done = tiny_runs.run(data, tmp_path / "run", variant=name)
    assert all(math.isfinite(loss) for loss in done.losses)


def softmax(l):
    e = [torch.exp(x) for x in l]
    return [x / sum(e) for x in e]


# What each line says, as scalars: the logits of a token -> its weights, and whether a source is divided by its rms.
NEW_READS = {
    "l.sigmoid()": (lambda l: [1 / (1 + torch.exp(-x)) for x in l], False),
    "(l / 0.5).softmax(0)": (lambda l: softmax([2 * x for x in l]), False),
    "s_k / r[..., None]": (softmax, True),
}


def read_in_loops(sources, queries, key_gain, eps, norm, weigh, unit):
    """depth_read with other weights, or of sources over their rms: a token and a component at a time."""
    B, T, D = sources[0].shape

    def rms(vector):
        return torch.sqrt(sum(x * x for x in vector) / D + eps)

    inputs, alphas = [], []
    for w in queries:
        h, alpha = {}, {}
        for b, t in np.ndindex(B, T):
            s = [[source[b, t, d] for d in range(D)] for source in sources]
            scale = [rms(s_k) for s_k in s]
            alpha[b, t] = weigh([sum(w[d] * key_gain[d] * s_k[d] for d in range(D)) / r for s_k, r in zip(s, scale)])
            parts = [a / r if unit else a for a, r in zip(alpha[b, t], scale)]
            mixed = [sum(part * s_k[d] for part, s_k in zip(parts, s)) for d in range(D)]
            r = rms(mixed)
            h[b, t] = torch.stack(mixed if norm is None else [g * x / r for g, x in zip(norm.weight, mixed)])
        inputs.append(torch.stack([torch.stack([h[b, t] for t in range(T)]) for b in range(B)]))
        weights = [torch.stack([torch.stack(alpha[b, t]) for t in range(T)]) for b in range(B)]
        alphas.append(torch.stack(weights).permute(2, 0, 1))
    return inputs, alphas


@pytest.mark.parametrize("words", NEW_READS)
def test_a_new_read(words, monkeypatch, capsys):
    """A line put into depth_read is what the model computes, gradients included, and the kernel steps aside."""
    (line,) = [line for line in code("l.sigmoid()").splitlines() if words in line]
    start = line.split(" = ")[0] + " = "
    source = inspect.getsource(model.depth_read)
    edited = "".join(line + "\n" if old.startswith(start) else old for old in source.splitlines(keepends=True))
    namespace = dict(vars(model))
    exec(edited, namespace)
    monkeypatch.setattr(model, "depth_read", namespace["depth_read"])

    gpt, idx, targets = build("rd")
    got, weights = loss_and_gradients(gpt, idx, targets), gpt.routes(idx)[-1]["final"]
    weigh, unit = NEW_READS[words]
    gpt.read = lambda *arguments: read_in_loops(*arguments, weigh, unit)
    assert close(loss_and_gradients(gpt, idx, targets), got)
    with torch.no_grad():
        gpt.states(idx, trace=(trace := []))
    assert torch.allclose(trace[-1][0], weights)

    gpt, idx, targets = build("rd")
    assert kernels.use("auto", gpt, torch.device("cpu"), torch.float64) == "plain"
    if COMPILER:
        (message,) = "".join(capsys.readouterr()).splitlines()
        assert "depth read was changed" in message
    assert close(loss_and_gradients(gpt, idx, targets), got)


def test_a_new_size(monkeypatch, tmp_path, leave_no_trace):
    """The two commands as written, but on random shards and for two updates: a run of the new width."""
    make, run = code("configs/wide.toml").splitlines()
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / "configs/demo.toml", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    subprocess.run(["bash", "-c", make], check=True)
    python, script, *arguments = shlex.split(run, comments=True)
    assert (python, script) == ("python", "train.py")

    rng = np.random.default_rng(0)
    sizes = {"train_000000": 9 * 128, "val_000000": 300, "test_000000": 300}
    write_folder(tmp_path / "data", **{split: rng.integers(257, size=size).tolist() for split, size in sizes.items()})
    less = "--data_dir=data --batch_tokens=512 --micro_batch=4 --max_tokens=1024 --warmup_tokens=0 --milestones="
    cheap = "--eval_tokens=128 --device=cpu --reads=plain"
    config, name = parse_config([*arguments, *less.split(), *cheap.split()], "")
    assert train.main(config, name) == 0
    written = json.loads((tmp_path / "out/wide/block-s1/config.json").read_text())
    assert (written["d_model"], written["n_layer"], written["variant"]) == (128, 4, "block")
