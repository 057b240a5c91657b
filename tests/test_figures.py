"""lib/figures.py: what is drawn is what was measured."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from toy_runs import random_gpt

import diagnose
from lib.figures import draw_curves, draw_routes, save_routes
from lib.routes import average_routes, route_statistics

TOKENS = (1000, 2000, 4000)


def runs_of(variants, seeds=(1, 2, 3), tokens=TOKENS):
    rng = np.random.default_rng(0)
    return [
        diagnose.Run("", variant, seed, {}, evals=dict(zip(tokens, rng.normal(4, 0.1, len(tokens)))))
        for variant in variants
        for seed in seeds
    ]


def drawn(variants, **runs):
    """(runs, comparisons, axes) of draw_curves."""
    runs = runs_of(variants, **runs)
    comparisons = [diagnose.compare(variant, runs, []) for variant in variants if variant != "block"]
    figure = Figure()
    draw_curves(figure, runs, comparisons)
    return runs, comparisons, figure.axes


def lines_of(ax, variant):
    return [line for line in ax.get_lines() if str(line.get_label()).startswith(variant)]


def test_curves_have_their_means_bands_and_runs():
    runs, comparisons, (left, right) = drawn(["block", "rd"])
    means = np.mean([[run.evals[t] for t in TOKENS] for run in runs if run.variant == "rd"], 0)
    (line,) = lines_of(left, "rd, n = 3")
    np.testing.assert_allclose(line.get_xydata(), np.transpose([TOKENS, means]))
    assert len(left.get_lines()) == 6 + 2 and len(left.collections) == 2
    (line,) = lines_of(right, "rd")
    np.testing.assert_allclose(line.get_ydata(), [point["mean"] for point in comparisons[0]["curve"]])
    (band,) = right.collections
    ends = {tuple(vertex) for vertex in band.get_paths()[0].vertices}
    assert {(point["tokens"], end) for point in comparisons[0]["curve"] for end in point["interval"]} <= ends


def test_more_than_three_variants_have_bars_beside_one_another():
    _, _, (left, right) = drawn(["block", "rd", "tied", "average"])
    assert len(left.containers) == 4 and len(right.containers) == 3 and "bar: range" in left.get_title()
    places = {bars.lines[0].get_xdata()[0] for bars in left.containers}
    assert len(places) == 4 and max(places) < 1.1 * min(places)


def test_the_mean_of_curves_stands_where_all_were_evaluated():
    runs = runs_of(["block"], seeds=(1, 2))
    del runs[0].evals[2000]
    figure = Figure()
    draw_curves(figure, runs, [])
    (line,) = lines_of(figure.axes[0], "block")
    assert line.get_xdata().tolist() == [1000, 4000]


@pytest.fixture(scope="module")
def routes():
    windows = np.random.default_rng(0).integers(0, 97, (2, 16))
    return {
        variant: average_routes(
            [{"step": 8, **route_statistics(random_gpt(variant, seed, n_blocks=2), windows)} for seed in (1, 2)]
        )
        for variant in ("rd", "q_k_v")
    }


def test_routes_have_their_weights_and_divergences(routes):
    figure = Figure(layout="constrained")
    draw_routes(figure, routes)
    for row, (variant, entry) in zip(figure.subfigs, routes.items()):
        maps = [ax for ax in row.axes if ax.images]
        assert [ax.get_title() for ax in maps] == [f"{variant}: {g.upper()} route" for g in entry["groups"]]
        for ax, group in zip(maps, entry["groups"]):
            cells = np.ma.filled(ax.images[0].get_array(), np.nan)
            used = [0, 1, 3]  # of b_0, b_1, b_2, p: the head alone reads b_2
            np.testing.assert_allclose(cells[:3], entry["profile"][group][:, used])
            np.testing.assert_allclose(cells[4], entry["profile_over_layers"][group][used])
        (last,) = (ax for ax in row.axes if ax.get_xlabel().startswith("JS of"))
        np.testing.assert_allclose(last.get_lines()[-2].get_xdata(), entry["js"])


@pytest.mark.slow
def test_a_figure_is_a_png(routes, tmp_path):
    save_routes(tmp_path / "routes.png", routes)
    assert (tmp_path / "routes.png").read_bytes().startswith(b"\x89PNG")
