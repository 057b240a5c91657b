"""diagnose.py: its statistics against scipy, its divergences against scipy, its tables against runs written by hand."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import scipy.spatial.distance
import scipy.stats
import torch

from lib.config import TrainConfig
from lib.errors import UserError
from lib.run_folder import save_checkpoint
from lib.shards import check_data, shard_header
import diagnose
from model import GPT, ModelConfig

REPOSITORY = Path(diagnose.__file__).parent
LN2 = math.log(2)
SIZES = dict(vocab_size=97, n_layer=3, n_head=2, d_model=8, d_mlp=8, context=16, n_blocks=3)

# ---- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 6, 7, 9, 20, 61])
def test_student_t(df):
    for p in (0.025, 0.3, 0.5, 0.9, 0.975, 0.9995):
        assert diagnose.t_quantile(p, df) == pytest.approx(scipy.stats.t.ppf(p, df), rel=1e-9, abs=1e-9)
    for t in (-3.0, -0.1, 0.0, 0.7, 12.0):
        assert diagnose.t_cdf(t, df) == pytest.approx(scipy.stats.t.cdf(t, df), rel=1e-10)


@pytest.mark.parametrize("n", range(2, 9))
def test_paired_statistics(n):
    rng = np.random.default_rng(n)
    for differences in (rng.normal(-0.03, 0.02, n), np.round(rng.normal(0, 0.02, n), 2)):  # the second has ties
        found = diagnose.paired_statistics(list(differences))
        interval = scipy.stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        assert found["interval"] == pytest.approx([interval.low, interval.high], rel=1e-9)
        assert (found["n"], found["mean"]) == (n, pytest.approx(differences.mean()))
        assert found["sd"] == pytest.approx(scipy.stats.tstd(differences))
        wins, ties = int((differences < 0).sum()), int((differences == 0).sum())
        assert (found["wins"], found["ties"], found["losses"]) == (wins, ties, n - wins - ties)
        assert found["sign_p"] == pytest.approx(scipy.stats.binomtest(wins, n - ties, 0.5).pvalue if n > ties else 1)
        assert found["perplexity_change"] == pytest.approx(math.exp(differences.mean()) - 1)
        assert found["perplexity_interval"] == pytest.approx([math.exp(interval.low) - 1, math.exp(interval.high) - 1])


def test_the_papers_arithmetic():
    assert diagnose.paired_statistics([-0.0301])["perplexity_change"] == pytest.approx(-0.0297, abs=5e-5)


def test_sign_test_is_exact_and_leaves_zeros_out():
    for wins in range(9):
        for losses in range(9):
            p, floor = diagnose.sign_test(wins, losses)
            assert p == pytest.approx(scipy.stats.binomtest(wins, wins + losses, 0.5).pvalue if wins + losses else 1, rel=1e-12)
            assert floor == diagnose.sign_test(wins + losses, 0)[0] <= p
    assert diagnose.sign_test(5, 0) == (0.0625, 0.0625)
    assert diagnose.paired_statistics([-1.0, -2.0, 0.0, 0.0])["sign_p"] == 0.5 == diagnose.sign_test(2, 0)[0]


def test_one_difference_and_equal_differences():
    one = diagnose.paired_statistics([-0.03])
    assert (one["n"], one["sd"], one["interval"], one["perplexity_interval"], one["sign_p"]) == (1, None, None, None, 1.0)
    same = diagnose.paired_statistics([0.0] * 4)
    assert (same["sd"], same["interval"], same["ties"], same["sign_p"]) == (0, [0, 0], 4, 1.0)


# ---- divergence and entropy --------------------------------------------------------------------------------------------


def distributions(seed, K=5, count=200):
    """(K, count): random ones, a third of them with zeros."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(K, 0.5), count).T
    p[rng.integers(0, K, count // 3), np.arange(count // 3)] = 0
    return p / p.sum(0)


def test_js_divergence_is_scipys():
    p, q = distributions(0), distributions(1)
    expected = scipy.spatial.distance.jensenshannon(p, q, axis=0) ** 2
    np.testing.assert_allclose(diagnose.js_divergence(p, q), expected, atol=1e-14)
    np.testing.assert_array_equal(diagnose.js_divergence(p, q), diagnose.js_divergence(q, p))


def test_js_divergence_at_its_ends():
    p = distributions(2)
    assert (diagnose.js_divergence(p, p) == 0).all()
    assert diagnose.js_divergence([1, 0], [0, 1]) == LN2
    assert diagnose.js_divergence([0.1, 0.9, 0, 0], [0, 0, 0.3, 0.7]) == pytest.approx(LN2, rel=1e-15)
    for a, b in (([1, 0], [1, 0]), ([1.0], [1.0]), ([5e-324, 1], [0, 1]), ([1e-300, 1], [1, 1e-300]), ([0, 0, 1], [0, 1, 0])):
        assert 0 <= diagnose.js_divergence(a, b) <= LN2
    logits = torch.randn(6, 2, 50, generator=torch.Generator().manual_seed(0)) * 40  # saturated float32 routes
    close = (logits + 1e-6).softmax(0).numpy()
    js = diagnose.js_divergence(logits.softmax(0).numpy(), close)
    assert js.shape == (2, 50) and (js >= 0).all() and (js < 1e-6).all()


def test_entropy_is_scipys():
    p = distributions(3)
    np.testing.assert_allclose(diagnose.entropy(p), scipy.stats.entropy(p, axis=0), atol=1e-14)
    assert diagnose.entropy([1, 0, 0]) == 0 and diagnose.entropy(np.full(4, 0.25)) == pytest.approx(math.log(4))


# ---- routes ----------------------------------------------------------------------------------------------------------


def random_gpt(variant, seed=0, **sizes):
    torch.manual_seed(seed)
    gpt = GPT(ModelConfig(variant=variant, **{**SIZES, **sizes}))
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if "query" in name and parameter.requires_grad:
                parameter.normal_(0, 1)
    return gpt


def test_divergence_is_the_mean_over_tokens_not_that_of_the_means():
    """Two routes that swap their sources from token to token have equal means and are as far apart as can be."""
    swap = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # (K, B, T)
    layers = [{"qk": torch.ones(1, 1, 2), "v": torch.ones(1, 1, 2)}, {"qk": swap, "v": 1 - swap}, {"final": swap}]
    config = SimpleNamespace(n_layer=2, n_blocks=2, block_size=2)  # layer 1 reads b_0 and b_1
    fake = SimpleNamespace(config=config, variant=SimpleNamespace(groups=("qk", "v")), routes=lambda idx: layers,
                           tok_emb=SimpleNamespace(weight=torch.zeros(1)))  # fmt: skip
    found = diagnose.route_statistics(fake, np.zeros((1, 2), np.int64))
    assert found["js"][0] == 0 and found["js"][1] == LN2
    np.testing.assert_array_equal(found["profile"]["qk"][1], [0.5, 0.5, np.nan, np.nan])
    np.testing.assert_array_equal(found["entropy"]["v"], [0, 0])


@pytest.mark.parametrize("variant, pair", [("rd", ("qk", "v")), ("q_kv", ("q", "kv")), ("q_k_v", ("q", "v")), ("frozen_v", ("qk", "v"))])
def test_routes_of_a_model(variant, pair):
    gpt = random_gpt(variant)
    windows = np.random.default_rng(0).integers(0, 97, (5, 16))
    found = diagnose.route_statistics(gpt, windows, tokens_a_pass=32)
    assert tuple(found["of_q_and_v"]) == pair
    routes = gpt.routes(torch.from_numpy(windows))
    for layer in range(gpt.config.n_layer):
        p, q = (routes[layer][group].double().numpy().reshape(-1, windows.size) for group in pair)
        per_token = [scipy.spatial.distance.jensenshannon(p[:, t], q[:, t]) ** 2 for t in range(windows.size)]
        assert found["js"][layer] == pytest.approx(np.mean(per_token), abs=1e-6)
        assert found["entropy"][pair[1]][layer] == pytest.approx(scipy.stats.entropy(q, axis=0).mean(), abs=1e-6)
        profile = found["profile"][pair[0]][layer]
        np.testing.assert_allclose(profile[np.isfinite(profile)], p.mean(1), atol=1e-6)
    assert found["js"][0] == 0 and (found["js"][1:] > 1e-4).all()


def test_tied_routes_are_equal_and_one_group_has_no_divergence():
    windows = np.random.default_rng(0).integers(0, 97, (2, 16))
    assert (diagnose.route_statistics(random_gpt("tied"), windows)["js"] == 0).all()
    assert diagnose.route_statistics(random_gpt("block"), windows)["js"] is None


@pytest.mark.parametrize("L, N", [(2, 1), (3, 2), (3, 3), (4, 2), (3, 6), (6, 4)])
def test_sources_have_their_columns(L, N):
    """Against the reference's list of sources, told apart by their values."""
    config = ModelConfig(**{**SIZES, "n_layer": L, "n_blocks": N})
    outputs = [torch.tensor(2.0**i) for i in range(2 * L)]
    blocks = [torch.tensor(0.5)] + [reference.block_sum(n, outputs, config) for n in range(N)]
    for layer in range(L):
        sources = reference.sources_of_sublayer(2 * layer, blocks[0], outputs[: 2 * layer], config)
        columns = diagnose.attention_sources(layer, config)
        assert len(columns) == len(sources)
        for column, source in zip(columns, sources):
            assert (source == blocks[column]) if column <= N else (source not in blocks)


# ---- run folders -----------------------------------------------------------------------------------------------------

B = 1000  # tokens an update
MILESTONES = (2 * B, 4 * B, 8 * B)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        tokens = rng.integers(0, 97, 2000).astype("<u2")
        (folder / f"{split}_000000.bin").write_bytes(shard_header(len(tokens)) + tokens.tobytes())
    return folder


def write_run(root, data, variant, seed, nlls, test=None, checkpoint=None, lines=(), **keys):
    """A run folder as train.py leaves it, its validation NLLs at the milestones; returns its path."""
    keys = dict(SIZES, batch_tokens=B, max_tokens=8 * B, warmup_tokens=B, milestones=MILESTONES, data_dir=str(data)) | keys
    config = dataclasses.asdict(TrainConfig(variant=variant, seed=seed, **{k: v for k, v in keys.items() if k != "data_id"}))
    data_id = keys.get("data_id") or check_data(data)[1]
    path = root / f"{variant}-s{seed}"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config | {"data_id": data_id, "name": "toy", "n_params": 1}))
    records = [{"kind": "train", "step": 1, "tokens": B, "loss": 5.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 10.0}]
    records += [{"kind": "eval", "step": t // B, "tokens": t, "val_nll": nll} for t, nll in zip(MILESTONES, nlls)]
    records += [] if test is None else [{"kind": "test", "step": 8, "tokens": 8 * B, "test_nll": test}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + "".join(lines))
    if checkpoint is not None:
        state = {"model": checkpoint.state_dict(), "step": len(nlls), "config": config, "data_id": data_id}
        save_checkpoint(path / "ckpt.pt", state)
    return path


def run_diagnose(root, capsys, *flags):
    """(summary, text of report.md, standard output) of `diagnose.py root`."""
    diagnose.main([str(root), *flags])
    summary = json.loads((root / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return summary, (root / "report.md").read_text(), capsys.readouterr().out


def write_pairs(root, data, seeds=3, **keys):
    """block and rd of some seeds -> {seed: (block, rd)} validation NLLs."""
    rng = np.random.default_rng(0)
    nlls = {}
    for seed in range(1, seeds + 1):
        block = np.array([5.0, 4.0, 3.5]) + rng.normal(0, 0.02, 3)
        nlls[seed] = block, block - 0.03 + rng.normal(0, 0.005, 3)
        for variant, values in zip(("block", "rd"), nlls[seed]):
            write_run(root, data, variant, seed, values.tolist(), test=values[-1] + 0.1, **keys)
    return nlls


def test_a_whole_comparison(tmp_path, data, capsys):
    root = tmp_path / "toy"
    nlls = {}
    rng = np.random.default_rng(0)
    for seed in (1, 2, 3):
        for variant, gap in (("block", 0), ("rd", -0.03), ("q_k_v", 0.01), ("prenorm", 0.02)):
            nlls[variant, seed] = np.array([5.0, 4.0, 3.5]) + gap + rng.normal(0, 0.005, 3)
            write_run(root, data, variant, seed, nlls[variant, seed].tolist(), nlls[variant, seed][-1] + 0.1, random_gpt(variant, seed))
    summary, report, out = run_diagnose(root, capsys)

    assert [c["variant"] for c in summary["comparisons"]] == ["rd", "prenorm", "q_k_v"] and not summary["notes"]
    rd = summary["comparisons"][0]
    deltas = np.array([nlls["rd", s] - nlls["block", s] for s in (1, 2, 3)])
    assert [pair["difference"] for pair in rd["pairs"]] == pytest.approx(deltas[:, -1])
    assert [(pair["block"], pair["rd"]) for pair in rd["pairs"]] == [(nlls["block", s][-1], nlls["rd", s][-1]) for s in (1, 2, 3)]
    assert rd["tokens"] == 8 * B and rd["wins"] == 3 and rd["sign_floor"] == 0.25
    interval = scipy.stats.ttest_1samp(deltas[:, -1], 0).confidence_interval()
    assert rd["interval"] == pytest.approx([interval.low, interval.high])
    assert [point["mean"] for point in rd["curve"]] == pytest.approx(deltas.mean(0))
    assert rd["test"]["mean"] == pytest.approx(deltas[:, -1].mean())
    row = next(row for row in summary["milestones"] if (row["tokens"], row["variant"]) == (4 * B, "block"))
    middle = [nlls["block", s][1] for s in (1, 2, 3)]
    assert (row["n"], row["mean"], row["sd"]) == (3, pytest.approx(np.mean(middle)), pytest.approx(np.std(middle, ddof=1)))
    assert len(summary["milestones"]) == 12

    assert set(summary["routes"]) == {"block", "rd", "q_k_v"} and summary["route_tokens"] == 124 * 16
    routes = summary["routes"]["rd"]
    assert routes["sources"] == ["b_0", "b_1", "b_2", "b_3", "p"] and routes["profile"]["v"][0] == [1.0, None, None, None, None]
    assert all(sum(weights) == pytest.approx(1, abs=1e-5) for weights in routes["profile_over_layers"].values())
    per_run = [np.mean(run["js"]) for run in routes["runs"]]
    assert routes["js_over_layers"]["mean"] == pytest.approx(np.mean(per_run)) and 0 < min(per_run) <= max(per_run) < LN2
    assert routes["js_without_layer_0"]["mean"] == pytest.approx(np.mean(per_run) * 3 / 2)
    assert summary["routes"]["q_k_v"]["of_q_and_v"] == ["q", "v"]

    for name in ("curves.png", "routes.png"):
        assert (root / name).read_bytes().startswith(b"\x89PNG") and f"({name})" in report and name in out
    assert f"{deltas[0, -1]:+.4f}" in report and f"{deltas[0, -1]:+.4f}" in out
    assert "0.25" in out and "results/" in out and "results/" in report and "report.md" in out
    assert max(map(len, out.splitlines()[:-1])) <= 100

    before = {name: (root / name).read_bytes() for name in ("report.md", "summary.json", "routes.png")}
    run_diagnose(root, capsys)
    assert before == {name: (root / name).read_bytes() for name in before}


def test_large_runs_are_not_called_noise(tmp_path, data, capsys):
    scale = 10_000
    for variant, nll in (("block", 3.5), ("rd", 3.4)):
        path = write_run(tmp_path, data, variant, 1, [], max_tokens=8 * B * scale, milestones=(8 * B * scale,))
        (path / "metrics.jsonl").write_text(json.dumps({"kind": "eval", "step": 1, "tokens": 8 * B * scale, "val_nll": nll}))
    summary, report, out = run_diagnose(tmp_path, capsys)
    assert "noise" not in out + report and "at 80M tokens" in out
    assert any("one pair has neither" in note for note in summary["notes"]) and "none for n = 1" in out


@pytest.mark.parametrize("key, value, machine", [("lr", 1e-2, False), ("d_model", 16, False), ("data_id", "other", False), ("max_tokens", 9 * B, False),
                                                 ("device", "cuda", True), ("micro_batch", 3, True), ("stop_tokens", 8 * B, True)])  # fmt: skip
def test_a_pair_must_agree(tmp_path, data, capsys, key, value, machine):
    write_run(tmp_path, data, "block", 1, [5, 4, 3.5])
    path = write_run(tmp_path, data, "rd", 1, [5, 4, 3.4], **{key: value})
    if machine:
        assert run_diagnose(tmp_path, capsys, "--route_tokens=0")[0]["comparisons"][0]["n"] == 1
        return
    other = json.loads((tmp_path / "block-s1" / "config.json").read_text())[key]
    with pytest.raises(UserError) as error:
        diagnose.main([str(tmp_path)])
    message = str(error.value)
    assert all(part in message for part in (key, repr(value), repr(other), str(path))) and "\n" not in message
    assert not (tmp_path / "report.md").exists()


def test_runs_of_different_seeds_must_agree_too(tmp_path, data):
    write_pairs(tmp_path, data, 1)
    for variant in ("block", "rd"):
        write_run(tmp_path, data, variant, 2, [5, 4, 3], lr=1e-2)
    with pytest.raises(UserError, match="lr is 0.0006 in the first and 0.01 in the second"):
        diagnose.main([str(tmp_path)])


def test_what_is_no_run(tmp_path, data, capsys):
    with pytest.raises(UserError, match="no run here"):
        diagnose.main([str(tmp_path)])
    with pytest.raises(UserError, match="is not a folder"):
        diagnose.main([str(tmp_path / "absent")])
    write_pairs(tmp_path / "a", data, 1)
    write_run(tmp_path / "b", data, "rd", 1, [5, 4, 3])
    with pytest.raises(UserError, match="are both rd-s1"):
        diagnose.main([str(tmp_path / "a"), str(tmp_path / "b")])
    (tmp_path / "a" / "stray").mkdir()
    (tmp_path / "a" / "stray" / "metrics.jsonl").write_text("")
    summary, _, out = run_diagnose(tmp_path / "a", capsys, str(tmp_path / "a" / "rd-s1"))  # the same run twice is one run
    assert len(summary["runs"]) == 2 and any("stray has no config.json" in note for note in summary["notes"])
    (tmp_path / "a" / "rd-s1" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="has no adam_eps, batch_tokens, betas and 25 other keys; train.py did not write it"):
        diagnose.main([str(tmp_path / "a")])


def test_single_runs_are_named_and_reported_beside(tmp_path, data, capsys):
    write_pairs(tmp_path, data, 2)
    diagnose.main([str(tmp_path / "block-s2"), str(tmp_path / "rd-s2")])
    assert len(json.loads((tmp_path / "summary.json").read_text())["runs"]) == 2
    diagnose.main([str(tmp_path / "block-s1"), str(tmp_path / "rd-s1"), "--out", str(tmp_path / "new" / "place")])
    assert (tmp_path / "new" / "place" / "report.md").exists()
    before = (tmp_path / "report.md").read_bytes()
    diagnose.main([str(tmp_path / "rd-s1")])  # one run alone: in its own folder, not over the report on all
    assert (tmp_path / "report.md").read_bytes() == before and (tmp_path / "rd-s1" / "report.md").exists()


def test_a_stop_on_the_way_is_no_end(tmp_path, data, capsys):
    """A run that was stopped early, then sent on: its first test does not count, and it is still going."""
    write_pairs(tmp_path, data, 2)
    path = write_run(tmp_path, data, "rd", 3, [5, 4], lines=[json.dumps({"kind": "test", "step": 2, "tokens": 2 * B, "test_nll": 4.5}) + "\n"])
    write_run(tmp_path, data, "block", 3, [5, 4], test=3.0)
    summary = run_diagnose(tmp_path, capsys)[0]
    run = {run["path"]: run for run in summary["runs"]}
    assert run[str(path)]["status"] == "unfinished" and run[str(path)]["test_nll"] is None and run[str(tmp_path / "block-s3")]["test_nll"] == 3.0
    assert any("rd-s3 is still going" in note for note in summary["notes"])
    last = write_run(tmp_path, data, "rd", 4, [5, 4, 3], lines=[json.dumps({"kind": "test", "step": 2, "tokens": 2 * B, "test_nll": 4.5}) + "\n"])
    run = {run["path"]: run for run in run_diagnose(tmp_path, capsys)[0]["runs"]}
    assert run[str(last)]["status"] == "finished" and run[str(last)]["test_nll"] is None  # killed before its last test


@pytest.mark.parametrize("key, value", [("milestones", None), ("milestones", ["x"]), ("milestones", "5"), ("stop_tokens", "x"), ("max_tokens", None), ("variant", 3),
                                        ("variant", ["rd"]), ("seed", "1"), ("seed", None), ("batch_tokens", 0), ("context", "a"), ("data_dir", 5), ("vocab_size", True)])  # fmt: skip
def test_an_edited_config_is_named(tmp_path, data, key, value):
    write_pairs(tmp_path, data, 1)
    for path in tmp_path.glob("*/config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=rf"block-s1/config.json: config key {key}: .*leave this folder out") as error:
        diagnose.main([str(tmp_path)])
    assert "\n" not in str(error.value)


def test_records_of_the_wrong_type_or_of_huge_losses(tmp_path, data, capsys):
    write_pairs(tmp_path, data, 2)
    with open(tmp_path / "rd-s1" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "eval", "step": 9, "tokens": "a", "val_nll": 5.0}\n' + json.dumps({"kind": "eval", "step": 8, "tokens": MILESTONES[-1], "val_nll": 900.0}) + "\n")
    summary = run_diagnose(tmp_path, capsys)[0]
    assert any("1 line(s)" in note for note in summary["notes"]) and max(p["difference"] for p in summary["comparisons"][0]["pairs"]) > 890


def test_lengths_gaps_and_accidents(tmp_path, data, capsys):
    nlls = write_pairs(tmp_path, data, 5)
    going = '{"kind": "eval", "step": 2, "tokens": 2000, "val_nll": 5.0}\n'
    (tmp_path / "rd-s3" / "metrics.jsonl").write_text(going + '{"kind": "eval", "st')
    (tmp_path / "rd-s4" / "metrics.jsonl").write_text(
        going + '{"kind": "eval", "step": 4, "tokens": 4000, "val_nll": NaN}\n\xff\x00\n[1]\n'
        '{"kind": "diverged", "step": 5, "tokens": 5000, "why": "loss nan"}\n', encoding="latin-1")  # fmt: skip
    (tmp_path / "rd-s5" / "metrics.jsonl").unlink()
    write_run(tmp_path, data, "rd", 6, [5, 4, 3])
    write_run(tmp_path, data, "frozen_v", 2, [5.1, 4.1], stop_tokens=4 * B)
    write_run(tmp_path, data, "average", 7, [5, 4, 3])
    summary, report, out = run_diagnose(tmp_path, capsys)
    rd, frozen = summary["comparisons"]
    assert (rd["tokens"], [pair["seed"] for pair in rd["pairs"]]) == (8 * B, [1, 2])  # where the finished pairs ended
    assert [point["n"] for point in rd["curve"]] == [4, 2, 2]
    assert (frozen["tokens"], frozen["n"]) == (4 * B, 1) and frozen["mean"] == pytest.approx(4.1 - nlls[2][0][1])
    status = {f"{run['variant']}-s{run['seed']}": run["status"] for run in summary["runs"]}
    assert [status[name] for name in ("rd-s1", "rd-s3", "rd-s4", "frozen_v-s2")] == ["finished", "unfinished", "diverged", "finished"]
    for said in ("rd-s3: 1 line(s)", "rd-s3 is still going", "rd-s4: 3 line(s)", "rd-s4 diverged at step 5 (loss nan): it counts up to 2k tokens",
                 "rd-s5 is still going, or was stopped short of its 8k tokens: it has no evaluation", "rd-s6 has no block-s6",
                 "3 of 5 pairs have no evaluation at 8k tokens", "frozen_v: one pair has neither", "average is not compared",
                 "rd-s1: has no checkpoint"):  # fmt: skip
        assert any(said in note for note in summary["notes"]), said
        assert said in report and said in " ".join(out.split()), said
    assert "routes.png" not in report and not (tmp_path / "routes.png").exists()


def test_runs_that_are_all_going_are_compared_where_most_are(tmp_path, data, capsys):
    for variant, gap in (("block", 0), ("rd", -0.1)):
        for seed, length in ((1, 2), (2, 1), (3, 2)):
            write_run(tmp_path, data, variant, seed, [5 + gap, 4 + gap][:length], milestones=(2 * B - 1, 3 * B + 1, 8 * B))
    write_run(tmp_path, data, "prenorm", 1, [])
    summary, *_ = run_diagnose(tmp_path, capsys)
    (rd,) = summary["comparisons"]
    assert (rd["tokens"], rd["n"]) == (2 * B, 3) and rd["mean"] == pytest.approx(-0.1)
    # a milestone is evaluated at the end of the update that reaches it
    assert [(row["tokens"], row["variant"], row["n"]) for row in summary["milestones"]] == [
        (2 * B, "block", 3), (2 * B, "rd", 3), (4 * B, "block", 2), (4 * B, "rd", 2)]  # fmt: skip


def test_equal_differences_are_said(tmp_path, data, capsys):
    for seed in (1, 2, 3):
        for variant in ("block", "tied"):
            write_run(tmp_path, data, variant, seed, [5, 4, 3 + seed / 100])
    summary, report, out = run_diagnose(tmp_path, capsys, "--route_tokens=0")
    assert any("sd 0" in note for note in summary["notes"])
    assert "Lower in 0 of 3 pairs and equal in 3" in out and "without a sign" in " ".join(out.split())
    assert summary["comparisons"][0]["interval"] == [0, 0]


def test_one_variant_alone(tmp_path, data, capsys):
    with pytest.raises(UserError, match="--route_tokens: -5 must be 0"):
        diagnose.main([str(tmp_path), "--route_tokens=-5"])
    write_run(tmp_path, data, "rd", 1, [5, 4, 3], checkpoint=random_gpt("rd"))
    with pytest.raises(UserError, match="--device: 'abacus' is none of auto, cpu"):
        diagnose.main([str(tmp_path), "--device=abacus"])
    summary, report, out = run_diagnose(tmp_path, capsys)
    assert summary["comparisons"] == [] and any("Nothing is paired" in note for note in summary["notes"])
    assert summary["routes"]["rd"]["n"] == 1 and (tmp_path / "curves.png").exists()


def test_no_evaluation_at_all(tmp_path, data, capsys):
    for variant in ("block", "rd"):
        write_run(tmp_path, data, variant, 1, [])
    summary, report, out = run_diagnose(tmp_path, capsys, "--route_tokens=0")
    assert summary["comparisons"] == [] == summary["milestones"] and not (tmp_path / "curves.png").exists()
    assert "rd is not compared" in out


def test_checkpoints_that_cannot_be_read(tmp_path, data, capsys):
    fine = random_gpt("rd")
    broken = random_gpt("rd")
    with torch.no_grad():
        broken.layers[1].attn_read.query[0] = math.nan
    write_run(tmp_path, data, "rd", 1, [5, 4, 3], checkpoint=fine)
    write_run(tmp_path, data, "rd", 2, [5, 4], checkpoint=fine)
    write_run(tmp_path, data, "rd", 3, [5, 4, 3], checkpoint=broken)
    write_run(tmp_path, data, "rd", 4, [5, 4, 3], checkpoint=random_gpt("rd", d_model=16))
    damaged = write_run(tmp_path, data, "rd", 5, [5, 4, 3], checkpoint=fine) / "ckpt.pt"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    summary, report, out = run_diagnose(tmp_path, capsys)
    assert summary["routes"]["rd"]["n"] == 1 and summary["routes"]["rd"]["js_over_layers"]["interval"] is None
    for said in ("rd-s2: its routes are left out: its checkpoint is at step 2", "rd-s3: its routes are not measured: its checkpoint holds values",
                 "rd-s4/ckpt.pt does not fit model.py", "rd-s5: has no checkpoint"):  # fmt: skip
        assert said in report, said


def test_data_that_is_absent_or_another(tmp_path, data, capsys):
    elsewhere = tmp_path / "data"
    elsewhere.mkdir()
    for path in data.glob("*.bin"):
        (elsewhere / path.name).write_bytes(path.read_bytes())
    write_run(tmp_path / "x", data, "rd", 1, [5, 4, 3], checkpoint=random_gpt("rd"))
    config = tmp_path / "x" / "rd-s1" / "config.json"
    config.write_text(config.read_text().replace(json.dumps(str(data)), '"data/gone"'))
    summary, *_ = run_diagnose(tmp_path / "x", capsys)
    assert summary["routes"] == {} and any("data/gone" in note and "--data_dir" in note for note in summary["notes"])
    summary, *_ = run_diagnose(tmp_path / "x", capsys, f"--data_dir={elsewhere}")
    assert summary["routes"]["rd"]["n"] == 1
    path = elsewhere / "val_000000.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\x01\x00")
    summary, *_ = run_diagnose(tmp_path / "x", capsys, f"--data_dir={elsewhere}")
    assert summary["routes"] == {} and any("other data" in note for note in summary["notes"])


def test_the_command_line(tmp_path):
    def command(*words):
        return subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True)

    done = command("-c", "import sys, diagnose; sys.exit(bool({'torch', 'matplotlib', 'scipy'} & sys.modules.keys()))")
    assert done.returncode == 0, "--help must not wait for torch or matplotlib, and scipy is for the tests only"
    done = command("diagnose.py", str(tmp_path))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("tokens, text", [(2000158720, "2B"), (262144, "262k"), (999_900_000, "1000M"), (512, "512"), (500_170_752, "500M")])
def test_short_token_counts(tokens, text):
    assert diagnose.short(tokens) == text
