"""The figures of a diagnosis: curves.png and routes.png."""

import numpy as np

from lib.files import atomic_write
from lib.paired import PARENT, t_interval
from lib.report import short
from lib.routes import both_names

COLOURS = {  # Okabe and Ito's
    "block": "#000000",
    "rd": "#0072B2",
    "prenorm": "#8C8C8C",
    "tied": "#56B4E9",
    "average": "#CC79A7",
    "frozen_v": "#D55E00",
    "q_kv": "#009E73",
    "q_k_v": "#E69F00",
}
OTHER_COLOUR = "#8C564B"
PAPER = "#FCFCFA"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": "#666666",
    "legend.frameon": False,
}


def save_curves(path, runs, comparisons):
    """curves.png of all runs that were evaluated."""
    save_figure(path, (8, 3.4), draw_curves, runs, comparisons)


def save_routes(path, routes):
    """routes.png of {variant: average_routes}, of variants with two routes at least."""
    height = sum(1.3 + 0.13 * max(10, len(entry["js"])) for entry in routes.values())
    save_figure(path, (8, height), draw_routes, routes)


def save_figure(path, size, draw, *arguments):
    """Draw on a figure of `size` inches and write it as a PNG, 200 dots per inch."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), atomic_write(path) as file:
        figure = Figure(size, layout="constrained")
        draw(figure, *arguments)
        figure.savefig(file, format="png", dpi=200)


# ---- curves.png ------------------------------------------------------------------------------------------------------


def draw_curves(figure, runs, comparisons):
    """Left: validation NLL over tokens. Right: differences to the parent, and their 95 % interval.

    A run or pair is thin, a variant's mean bold, the spread around it shaded. More than three variants have bars beside
    one another instead of shades, and no thin lines.
    """
    from matplotlib import ticker

    axes = figure.subplots(1, 2 if comparisons else 1, squeeze=False)[0]
    tokens = sorted({t for run in runs for t in run.evals if t > 0})
    variants = list(dict.fromkeys(run.variant for run in runs if run.evals))
    few = len(tokens) <= 12
    bars = len(variants) > 3 and few

    def draw(ax, variant, curves, spread, label):
        beside = 1.03 ** (variants.index(variant) - len(variants) / 2) if bars else None
        line = {"color": COLOURS.get(variant, OTHER_COLOUR), "marker": "o" if few else None, "ms": 3.5, "label": label}
        draw_variant(ax, curves, spread, beside, line)

    for variant in variants:
        ours = [run for run in runs if run.variant == variant and run.evals]
        curves = [{t: nll for t, nll in run.evals.items() if t > 0} for run in ours]
        draw(axes[0], variant, curves, lambda v: (min(v), max(v)), f"{variant}, n = {len(curves)}")
    axes[0].set(title=f"Validation loss ({'bar' if bars else 'band'}: range of the seeds)", ylabel="NLL, nats a token")
    axes[0].legend()
    if comparisons:
        axes[1].axhline(0, color=COLOURS[PARENT], lw=1.2)
        for comparison in comparisons:
            draw(axes[1], comparison["variant"], difference_curves(comparison), t_interval, comparison["variant"])
        points = [point for comparison in comparisons for point in comparison["curve"]]
        seen = [0.0] + [pair["difference"] for point in points for pair in point["pairs"]]
        room = 0.15 * (max(seen) - min(seen)) or 0.01
        axes[1].set(
            title=f"Minus {PARENT} at equal seed ({'bar' if bars else 'band'}: 95 % interval)",
            ylabel="difference, nats a token",
            ylim=(min(seen) - room, max(seen) + room),  # an interval of two or three seeds may leave the frame
        )
    for ax in axes:
        ax.set(xscale="log", xlabel="training tokens")
        locator = ticker.FixedLocator(tokens) if len(tokens) <= 6 else ticker.LogLocator(subs=(1, 2, 5))
        ax.xaxis.set_major_locator(locator)
        ax.xaxis.set_major_formatter(lambda value, _: short(value))
        ax.xaxis.set_minor_locator(ticker.NullLocator())


def difference_curves(comparison):
    """[{tokens: difference}], one per pair."""
    curves = {}
    for point in comparison["curve"]:
        for pair in point["pairs"]:
            curves.setdefault(pair["seed"], {})[point["tokens"]] = pair["difference"]
    return [{t: difference for t, difference in curve.items() if t > 0} for curve in curves.values()]


def draw_variant(ax, curves, spread, beside, line):
    """The mean of `curves` [{tokens: value}] wherever all have a value, and spread(values) -> (low, high) around it.

    The spread is a band, the curves are thin lines. With `beside`, a factor on the tokens, bars at that place replace
    both.
    """
    if not beside:
        for curve in curves:
            ax.plot(*zip(*sorted(curve.items())), color=line["color"], lw=0.6, alpha=0.5)
    grid = np.array(sorted(set.intersection(*map(set, curves))))
    values = [[curve[t] for curve in curves] for t in grid]
    means = np.array([np.mean(v) for v in values])
    if len(curves) == 1:
        ax.plot(grid, means, lw=1.8, **line)
        return
    low, high = np.reshape([spread(v) for v in values], (-1, 2)).T
    if beside:
        ax.errorbar(grid * beside, means, [means - low, high - means], lw=1.2, elinewidth=0.9, capsize=2, **line)
    else:
        ax.plot(grid, means, lw=1.8, **line)
        ax.fill_between(grid, low, high, color=line["color"], alpha=0.16, lw=0)


# ---- routes.png ------------------------------------------------------------------------------------------------------


def draw_routes(figure, routes):
    """One row per variant: the mean weights of each group's route, then the divergence of the routes of q and v."""
    widest = max(len(entry["groups"]) for entry in routes.values())
    for row, (variant, entry) in zip(np.atleast_1d(figure.subfigures(len(routes), 1)), routes.items()):
        axes = row.subplots(1, widest + 1, sharey=True)
        maps, unused, last = axes[: len(entry["groups"])], axes[len(entry["groups"]) : -1], axes[-1]
        for ax, group in zip(maps, entry["groups"]):
            image = draw_weights(ax, entry, group)
            ax.set(title=f"{variant}: {group.upper()} route", xlabel="source")
        for ax in unused:
            ax.axis("off")
        row.colorbar(image, ax=maps, label="mean weight", fraction=0.05, pad=0.01, extend="max")
        draw_divergence(last, entry, COLOURS.get(variant, OTHER_COLOUR))
        L = len(entry["js"])
        layers = range(0, L, 1 + L // 10)
        axes[0].set(ylabel="layer", ylim=(L + 1.5, -0.5))
        axes[0].set_yticks([*layers, L + 1], [*map(str, layers), "mean"])
        last.tick_params(labelleft=True)


def draw_weights(ax, entry, group):
    """Mean weights of one group's route: layers down, sources across, the mean over the layers under a gap. -> image"""
    from matplotlib.colors import PowerNorm

    L, groups, profile = len(entry["js"]), entry["groups"], entry["profile"][group]
    used = [c for c in range(len(entry["sources"])) if not np.isnan(entry["profile"][groups[0]][:, c]).all()]
    top = max(np.nanmax(rows[L > 1 :]) for rows in entry["profile"].values())  # but for layer 0, whose one weight is 1
    over_layers = entry["profile_over_layers"][group]
    cells = np.vstack([profile, 0 * over_layers, over_layers])[:, used]
    norm = PowerNorm(0.5, 0, top)  # a root: deep weights are small
    image = ax.imshow(cells, aspect="auto", cmap="viridis", norm=norm)
    ax.axhspan(L - 0.5, L + 0.5, color=PAPER)
    if entry["sources"][used[-1]] == "p":
        ax.axvline(len(used) - 1.5, color=PAPER, lw=4)
    ax.set(facecolor="#E4E4E4")
    names = ["$p$" if entry["sources"][c] == "p" else f"$b_{{{c}}}$" for c in used]
    every = 1 + (len(used) - 1) // 10  # as many as fit
    ticks = [i for i, name in enumerate(names) if name == "$p$" or i % every == 0]
    ax.set_xticks(ticks, [names[i] for i in ticks])
    return image


def draw_divergence(ax, entry, colour):
    """The divergence by layer, downwards, and its mean under them; one dot per run."""
    from matplotlib.ticker import MaxNLocator

    L, js = len(entry["js"]), entry["js"]
    for run in entry["runs"]:
        heights = [*range(L), L + 1]
        ax.plot([*run["js"], run["js"].mean()], heights, "o", ms=3.5, mew=0, alpha=0.45, color=colour)
    ax.plot(js, range(L), color=colour, lw=1.8)
    ax.plot(js.mean(), L + 1, "D", ms=6, color=colour)
    right = max(1.15 * max(run["js"].max() for run in entry["runs"]), 0.01)
    ax.set(title=f"JS: mean {js.mean():.3f}", xlabel=f"JS of {both_names(entry)}, nats", xlim=(0, right))
    ax.xaxis.set_major_locator(MaxNLocator(3))
