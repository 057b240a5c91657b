"""Run folders -> paired statistics, route divergence, tables and plots.

    python diagnose.py out/X [more folders of runs, or runs]      -> out/X/report.md  summary.json  curves.png  routes.png

Runs pair by seed: a variant against `block`, the same in everything but the variant. All NLLs are nats a token on the fixed
validation windows; all divergences and entropies are nats (natural logarithm).

Shapes:  L layers   N blocks   K depth sources of a read   B windows   T tokens a window
"""

import argparse
import dataclasses
import json
import math
import textwrap
from pathlib import Path

import numpy as np

from lib.config import TrainConfig, check_config, identity
from lib.errors import UserError, run_main
from lib.files import atomic_write, make_folder, read_json
from lib.devices import pick_device
from lib.run_folder import load_run
from lib.shards import Windows, check_data

PARENT = "block"
SMALL_TOKENS = 50_000_000  # below this the spread between seeds drowns differences of a few hundredths of a nat
COLOURS = {"block": "#000000", "rd": "#0072B2", "prenorm": "#8C8C8C", "tied": "#56B4E9", "average": "#CC79A7",
           "frozen_v": "#D55E00", "q_kv": "#009E73", "q_k_v": "#E69F00"}  # Okabe and Ito's  # fmt: skip

# ---- statistics ------------------------------------------------------------------------------------------------------


def perplexity_change(difference):
    """exp(difference of two NLLs) - 1, kept within a float."""
    return math.expm1(min(difference, 700.0))


def t_cdf(t, df):
    """P(T <= t) of Student's t with a whole number `df` of degrees of freedom: the finite sums 26.7.3 and 26.7.4 of
    Abramowitz and Stegun, Handbook of Mathematical Functions."""
    theta, odd = math.atan(t / math.sqrt(df)), df % 2
    term, total = math.cos(theta) ** odd, 0.0
    for power in range(odd, df - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(theta) ** 2
    inside = math.sin(theta) * total  # P(|T| <= t) for an even df
    return 0.5 + 0.5 * (2 / math.pi * (theta + inside) if odd else inside)


def t_quantile(p, df):
    """The t with P(T <= t) = p, by bisection on atan(t / sqrt(df))."""
    low, high = -math.pi / 2, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(math.sqrt(df) * math.tan(middle), df) < p else (low, middle)
    return math.sqrt(df) * math.tan((low + high) / 2)


def t_interval(values, level=0.95):
    """mean -+ t((1 + level) / 2, n - 1) sd / sqrt(n), sd over n - 1; None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    half = t_quantile((1 + level) / 2, n - 1) * np.std(values, ddof=1) / math.sqrt(n)
    return [float(np.mean(values) - half), float(np.mean(values) + half)]


def sign_test(wins, losses):
    """(p, floor) of the exact two-sided sign test: p = min(1, 2 P(X <= min(wins, losses))), X ~ Binomial(wins + losses, 1/2).

    Differences of exactly zero say nothing about the sign and are left out. The floor is the p of a clean sweep, 2^(1 - n):
    no outcome of these n pairs could give less.
    """
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2**n
    return min(1.0, 2 * tail), min(1.0, 2.0 ** (1 - n))


def mean_and_sd(values):
    """n, mean, sd (over n - 1) and 95 % t interval of the mean; sd and interval are None for one value."""
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"n": len(values), "mean": float(np.mean(values)), "sd": sd, "interval": t_interval(values)}


def paired_statistics(differences):
    """Statistics of differences variant - block in nats a token; a win is a difference below zero, a tie one of exactly zero.

    The perplexity change exp(delta) - 1 is that of the mean difference; its interval is the mean's, transformed.
    """
    result = mean_and_sd(differences)
    wins, losses = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    p, floor = sign_test(wins, losses)
    return {**result, "wins": wins, "losses": losses, "ties": len(differences) - wins - losses, "sign_p": p, "sign_floor": floor,
            "perplexity_change": perplexity_change(result["mean"]),
            "perplexity_interval": result["interval"] and [perplexity_change(end) for end in result["interval"]]}  # fmt: skip


# ---- routes ----------------------------------------------------------------------------------------------------------


def js_divergence(p, q):
    """Jensen-Shannon divergence of the distributions p, q (K, ...) over axis 0 -> (...), nats, float64:

        JS = 1/2 sum_k p_k ln(p_k / m_k) + 1/2 sum_k q_k ln(q_k / m_k)      m = (p + q) / 2      0 ln 0 = 0

    Exactly 0 where p = q, ln 2 where they share no source, never outside.
    """
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    terms = [a * np.log(np.divide(2 * a, p + q, out=np.ones_like(a), where=a > 0)) for a in (p, q)]
    return np.clip((terms[0] + terms[1]).sum(0) / 2, 0.0, math.log(2))


def entropy(p):
    """-sum_k p_k ln p_k of the distributions p (K, ...) over axis 0 -> (...), nats, float64; 0 ln 0 = 0."""
    p = np.asarray(p, np.float64)
    return np.maximum(-(p * np.log(p, out=np.zeros_like(p), where=p > 0)).sum(0), 0.0)


def attention_sources(layer, config):
    """Columns, among b_0, ..., b_N, p, of the K sources that the attention of a layer reads."""
    sublayer = 2 * layer
    finished = list(range(sublayer // config.block_size + 1))
    return finished + ([config.n_blocks + 1] if sublayer % config.block_size else [])


def route_statistics(gpt, windows, tokens_a_pass=4096):
    """What the attention reads of `gpt` attend to on the token ids `windows` (B, T), averaged over all tokens:

    groups          the role groups with a route each; [first, second]: the ones that hold q and v
    js (L,)         divergence of those two: per token first, then averaged; None for one group
    entropy         {group: (L,)}
    profile         {group: (L, N + 2)} mean weight of b_0, ..., b_N, p; NaN where the read has no such source
    """
    import torch

    config, groups = gpt.config, gpt.variant.groups
    of_q, of_v = (next(group for group in groups if role in group) for role in "qv")
    js, device = np.zeros(config.n_layer), gpt.tok_emb.weight.device
    entropies = {group: np.zeros(config.n_layer) for group in groups}
    profiles = {group: np.full((config.n_layer, config.n_blocks + 2), np.nan) for group in groups}
    step = max(1, tokens_a_pass // windows.shape[1])
    for first in range(0, len(windows), step):
        layers = gpt.routes(torch.from_numpy(windows[first : first + step]).to(device))[:-1]  # the last is the head's
        for layer, alphas in enumerate(layers):
            alphas = {group: alphas[group].cpu().numpy().astype(np.float64) for group in groups}
            columns = attention_sources(layer, config)
            assert len(columns) == len(alphas[of_q]), "the sources of a read are not those of the block table"
            js[layer] += js_divergence(alphas[of_q], alphas[of_v]).sum()
            for group, alpha_KBT in alphas.items():
                entropies[group][layer] += entropy(alpha_KBT).sum()
                profiles[group][layer, columns] = np.nan_to_num(profiles[group][layer, columns]) + alpha_KBT.sum((1, 2))
    scale = windows.size
    return {"groups": list(groups), "of_q_and_v": [of_q, of_v], "js": js / scale if len(groups) > 1 else None,
            "entropy": {group: total / scale for group, total in entropies.items()},
            "profile": {group: total / scale for group, total in profiles.items()}}  # fmt: skip


def run_routes(run, windows, device):
    """route_statistics of a run's newest checkpoint; None for a variant without routes. Raises UserError where there is none to
    measure. Whatever the run's dtype, the routes are computed in float32."""
    import torch

    gpt, state = load_run(run.path, device)
    if not gpt.variant.routed:
        return None
    if not all(torch.isfinite(parameter).all() for parameter in gpt.parameters()):
        raise UserError("its checkpoint holds values that are not finite")
    return {"run": run.name, "seed": run.seed, "step": state["step"], **route_statistics(gpt, windows)}


def variant_routes(runs, windows, device, notes):
    """The routes of one variant's runs and their means over the runs; None where no run has any. Routes drift apart as training
    goes on: only the runs whose checkpoint is at the latest step count."""
    measured = []
    for run in runs:
        try:
            measured.append(run_routes(run, windows, device))
        except UserError as error:
            notes.append(f"{run.name}: its routes are not measured: {error}.")
    measured = [entry for entry in measured if entry]
    if not measured:
        return None
    last = max(entry["step"] for entry in measured)
    notes += [f"{entry['run']}: its routes are left out: its checkpoint is at step {entry['step']}, others of its variant at {last}."
              for entry in measured if entry["step"] < last]  # fmt: skip
    measured = [entry for entry in measured if entry["step"] == last]
    groups = measured[0]["groups"]
    result = {"groups": groups, "of_q_and_v": measured[0]["of_q_and_v"], "step": last, "n": len(measured), "runs": measured}
    for name in ("entropy", "profile"):
        result[name] = {group: np.mean([entry[name][group] for entry in measured], 0) for group in groups}
    # over layers, a source that a layer lacks weighs nothing there: a profile sums to one
    result["profile_over_layers"] = {group: np.nan_to_num(profile).mean(0) for group, profile in result["profile"].items()}
    L, columns = result["profile"][groups[0]].shape
    result["sources"] = [f"b_{n}" for n in range(columns - 1)] + ["p"]
    if len(groups) > 1:
        result["js"] = np.mean([entry["js"] for entry in measured], 0)
        result["js_over_layers"] = mean_and_sd([entry["js"].mean() for entry in measured])
        result["js_without_layer_0"] = mean_and_sd([entry["js"][1:].mean() for entry in measured]) if L > 1 else None
    return result


def validation_windows(runs, data_dir, tokens, notes):
    """(B, T) token ids of evenly spaced validation windows, the same at every call; None, and a note, where the data that the
    runs were trained on are not at hand. `data_dir`, if any, goes before the configs'."""
    config = runs[0].config
    try:
        if check_data(data_dir or config["data_dir"])[1] != config["data_id"]:
            raise UserError(f"{data_dir or config['data_dir']} holds other data than the runs were trained on")
        windows = Windows(data_dir or config["data_dir"], "val", config["context"], config["vocab_size"])
        return windows.read(windows.spread(tokens))[:, :-1]
    except UserError as error:
        notes.append(f"The routes are not measured: {error}; or name the runs' data with --data_dir.")


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    path: str
    variant: str
    seed: int
    config: dict
    evals: dict = dataclasses.field(default_factory=dict)  # {tokens: validation NLL}
    test_nll: float | None = None
    status: str = "unfinished"  # or finished, diverged

    @property
    def name(self):
        return f"{self.variant}-s{self.seed}"

    def end_of_update(self, tokens):
        """Tokens at the end of the update that reaches `tokens`: where a milestone is evaluated."""
        return math.ceil(tokens / self.config["batch_tokens"]) * self.config["batch_tokens"]


def read_run(path, notes):
    """The Run in the folder `path`. What is odd about it goes to `notes`, a sentence each."""
    config = read_json(path / "config.json")
    keys = identity(dataclasses.asdict(TrainConfig())).keys() | {"stop_tokens", "milestones", "data_dir", "data_id"}
    if missing := keys - config.keys():
        several = f" and {len(missing) - 3} other keys" if len(missing) > 3 else ""
        raise UserError(f"{path / 'config.json'}: has no {', '.join(sorted(missing)[:3])}{several}; train.py did not write it: leave this folder out")
    try:
        check_config({name: value for name, value in config.items() if name in keys - {"data_id"}})
    except UserError as error:
        raise UserError(f"{path / 'config.json'}: {error}; train.py did not write it so: leave this folder out") from error
    run, tests, broken, why, metrics = Run(str(path), config["variant"], config["seed"], config), {}, 0, "", path / "metrics.jsonl"
    for line in metrics.read_bytes().splitlines() if metrics.exists() else []:
        try:
            record = json.loads(line)
            kind, value = record["kind"], record.get("val_nll", record.get("test_nll", 0.0))
            if not math.isfinite(value):
                raise ValueError("not finite")
            if kind in ("eval", "test") and not isinstance(record["tokens"], int):
                raise ValueError("no count")
            if kind == "eval":
                run.evals[record["tokens"]] = value
            elif kind == "test":
                tests[record["tokens"]] = value
            elif kind == "diverged":
                run.status, why = "diverged", f" at step {record['step']} ({record['why']})"
        except (ValueError, KeyError, TypeError, AttributeError):
            broken += 1
    goal = run.end_of_update(config["stop_tokens"] or config["max_tokens"])
    if run.status == "unfinished" and max([*run.evals, *tests], default=0) >= goal:
        run.status, run.test_nll = "finished", tests.get(goal)  # not the test of an earlier stop
    counts = f"it counts up to {short(max(run.evals))} tokens, its last evaluation" if run.evals else "it has no evaluation to count"
    if broken:
        notes.append(f"{run.name}: {broken} line(s) of {metrics} are cut short or not finite, and left out.")
    if run.status == "diverged":
        notes.append(f"{run.name} diverged{why}: {counts}; later comparisons are over the runs that survived.")
    elif run.status == "unfinished":
        notes.append(f"{run.name} is still going, or was stopped short of its {short(goal)} tokens: {counts}.")
    return run


def find_runs(folders, notes):
    """The runs that `folders` are or hold, by variant and seed. Raises UserError if there is none, or if they are not one
    experiment: data and identity keys equal but for variant and seed, one run for each of those."""
    runs, order = {}, list(COLOURS)
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; name a folder of runs, such as out/demo")
        for path in [folder] if (folder / "config.json").exists() else sorted(folder.iterdir()):
            if (path / "config.json").exists():
                runs.setdefault(path.resolve(), path)
            elif (path / "metrics.jsonl").exists() or (path / "ckpt.pt").exists():
                notes.append(f"{path} has no config.json and is left out.")
    runs = [read_run(path, notes) for path in runs.values()]
    if not runs:
        raise UserError(f"{', '.join(map(str, folders))}: no run here (a folder with a config.json); train.py writes them")
    keys = identity(dataclasses.asdict(TrainConfig())).keys() | {"data_id"}
    seen = {}
    for run in runs:
        for key in sorted(keys - {"variant", "seed"}):
            value, other = runs[0].config.get(key), run.config.get(key)
            if value != other:
                raise UserError(f"{runs[0].path} and {run.path} cannot be compared: {key} is {value!r} in the first and {other!r} in the "
                                "second; name runs that differ in variant and seed only")  # fmt: skip
        if run.name in seen:
            raise UserError(f"{seen[run.name]} and {run.path} are both {run.name}; name one of them")
        seen[run.name] = run.path
    return sorted(runs, key=lambda run: (order.index(run.variant) if run.variant in order else len(order), run.variant, run.seed))


# ---- comparisons -----------------------------------------------------------------------------------------------------


def milestone_table(runs):
    """[{tokens, variant, n, mean, sd, interval}]: validation NLL of every variant at every milestone and run's end."""
    planned = {run.end_of_update(tokens) for run in runs for tokens in run.config["milestones"]}
    rows = []
    for tokens in sorted(planned | {max(run.evals) for run in runs if run.evals}):
        for variant in dict.fromkeys(run.variant for run in runs):
            if values := [run.evals[tokens] for run in runs if run.variant == variant and tokens in run.evals]:
                rows.append({"tokens": tokens, "variant": variant, **mean_and_sd(values)})
    return rows


def compare(variant, runs, notes):
    """The variant against `block`, paired by seed, at every token count where a pair was evaluated; None, and a note, if nowhere.

    The verdict stands where the most pairs of finished runs were evaluated, at the latest such point.
    """
    parents, ours = ({run.seed: run for run in runs if run.variant == name} for name in (PARENT, variant))
    for seed in sorted(parents.keys() ^ ours.keys()):
        there, missing = (PARENT, variant) if seed in parents else (variant, PARENT)
        notes.append(f"{there}-s{seed} has no {missing}-s{seed} to pair with.")
    pairs = {seed: (parents[seed], ours[seed]) for seed in sorted(parents.keys() & ours.keys())}
    points = {}  # {tokens: [pair]}
    for seed, (parent, run) in pairs.items():
        for tokens in parent.evals.keys() & run.evals.keys():
            before, after = parent.evals[tokens], run.evals[tokens]
            change = {"difference": after - before, "perplexity_change": perplexity_change(after - before)}
            points.setdefault(tokens, []).append({"seed": seed, PARENT: before, variant: after} | change)
    if not points:
        notes.append(f"{variant} is not compared: none of its runs shares an evaluation with the {PARENT} of its seed.")
        return None
    finished = [seed for seed, pair in pairs.items() if all(run.status == "finished" for run in pair)] or pairs
    at = max(points, key=lambda tokens: (sum(pair["seed"] in finished for pair in points[tokens]), tokens))
    curve = [{"tokens": tokens, "pairs": points[tokens], **paired_statistics([pair["difference"] for pair in points[tokens]])}
             for tokens in sorted(points)]  # fmt: skip
    verdict = next(point for point in curve if point["tokens"] == at)
    if verdict["n"] < len(pairs):
        notes.append(f"{variant}: {len(pairs) - verdict['n']} of {len(pairs)} pairs have no evaluation at {short(at)} tokens.")
    if verdict["n"] == 1:
        notes.append(f"{variant}: one pair has neither a standard deviation nor an interval.")
    elif verdict["sd"] < 1e-12:
        notes.append(f"{variant}: its differences are all the same (sd 0): the interval is a point and says nothing about chance.")
    ends = [pair for pair in pairs.values() if None not in (pair[0].test_nll, pair[1].test_nll)]
    tests = [run.test_nll - parent.test_nll for parent, run in ends if max(run.evals, default=0) == max(parent.evals, default=0)]
    return {"variant": variant, **verdict, "test": paired_statistics(tests) if tests else None, "curve": curve}


# ---- figures ---------------------------------------------------------------------------------------------------------

STYLE = {"font.size": 9, "axes.titlesize": 9.5, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
         "figure.facecolor": "#FCFCFA", "axes.facecolor": "#FCFCFA", "axes.edgecolor": "#666666", "legend.frameon": False}  # fmt: skip


def save_figure(path, size, draw, *arguments):
    """Draw on a figure of `size` inches and write it as a PNG, 200 dots an inch."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), atomic_write(path) as file:
        figure = Figure(size, layout="constrained")
        draw(figure, *arguments)
        figure.savefig(file, format="png", dpi=200)


def draw_curves(figure, runs, comparisons):
    """Left: validation NLL over tokens, a run thin, a variant's mean bold, the range of its seeds shaded. Right: differences to
    `block`, a pair thin, the mean bold, its 95 % interval shaded. More than three variants: bars beside one another, no shades."""
    from matplotlib import ticker

    axes = figure.subplots(1, 2 if comparisons else 1, squeeze=False)[0]
    tokens = sorted({t for run in runs for t in run.evals if t > 0})
    mark = "o" if len(tokens) <= 12 else None
    variants = list(dict.fromkeys(run.variant for run in runs if run.evals))
    crowd = len(variants) > 3 and len(tokens) <= 12

    def draw(ax, variant, curves, band, label):
        colour = COLOURS.get(variant, "#8C564B")
        for curve in [] if crowd else curves:
            ax.plot(*zip(*sorted(curve.items())), color=colour, lw=0.6, alpha=0.5)
        grid = np.array([t for t in tokens if all(t in curve for curve in curves)])
        values = [[curve[t] for curve in curves] for t in grid]
        means, (low, high) = np.array([np.mean(v) for v in values]), np.reshape([band(v) for v in values] if len(curves) > 1 else [], (-1, 2)).T
        if crowd and len(curves) > 1:
            beside = grid * 1.03 ** (variants.index(variant) - len(variants) / 2)
            ax.errorbar(beside, means, [means - low, high - means], color=colour, lw=1.2, marker=mark, ms=3.5, elinewidth=0.9, capsize=2, label=label)
            return
        ax.plot(grid, means, color=colour, lw=1.8, marker=mark, ms=3.5, label=label)
        if len(curves) > 1:
            ax.fill_between(grid, low, high, color=colour, alpha=0.16, lw=0)

    for variant in variants:
        curves = [{t: nll for t, nll in run.evals.items() if t > 0} for run in runs if run.variant == variant and run.evals]
        draw(axes[0], variant, curves, lambda v: (min(v), max(v)), f"{variant}, n = {len(curves)}")
    axes[0].set(title=f"Validation loss ({'bar' if crowd else 'band'}: range of the seeds)", ylabel="NLL, nats a token")
    axes[0].legend()
    if comparisons:
        axes[1].axhline(0, color=COLOURS[PARENT], lw=1.2)
        for comparison in comparisons:
            curves = {}
            for point in comparison["curve"]:
                for pair in point["pairs"]:
                    curves.setdefault(pair["seed"], {})[point["tokens"]] = pair["difference"]
            draw(axes[1], comparison["variant"], list(curves.values()), t_interval, comparison["variant"])
        seen = [0.0] + [pair["difference"] for comparison in comparisons for point in comparison["curve"] for pair in point["pairs"]]
        room = 0.15 * (max(seen) - min(seen)) or 0.01
        axes[1].set(title=f"Minus {PARENT} at equal seed ({'bar' if crowd else 'band'}: 95 % interval)", ylabel="difference, nats a token",
                    ylim=(min(seen) - room, max(seen) + room))  # fmt: skip  # an interval of two or three seeds may leave the frame
    for ax in axes:
        ax.set(xscale="log", xlabel="training tokens")
        ax.xaxis.set_major_locator(ticker.FixedLocator(tokens) if len(tokens) <= 6 else ticker.LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(lambda value, _: short(value))
        ax.xaxis.set_minor_locator(ticker.NullLocator())


def draw_routes(figure, routes):
    """A row a variant: for each role group the mean weights, layers down and sources across, and under them their mean over the
    layers; then the divergence of the routes of q and v, a dot a run."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    paper = STYLE["axes.facecolor"]
    widest = max(len(entry["groups"]) for entry in routes.values())
    for row, (variant, entry) in zip(np.atleast_1d(figure.subfigures(len(routes), 1)), routes.items()):
        groups, L, colour = entry["groups"], len(entry["js"]), COLOURS.get(variant, "#8C564B")
        used = [c for c in range(len(entry["sources"])) if not np.isnan(entry["profile"][groups[0]][:, c]).all()]
        top = max(np.nanmax(profile[L > 1 :]) for profile in entry["profile"].values())  # but for layer 0, whose one weight is 1
        axes = row.subplots(1, widest + 1, sharey=True)
        for ax, group in zip(axes, groups):
            profile, over_layers = entry["profile"][group], entry["profile_over_layers"][group]
            cells = np.vstack([profile, 0 * over_layers, over_layers])[:, used]
            image = ax.imshow(cells, aspect="auto", cmap="viridis", norm=PowerNorm(0.5, 0, top))  # a root: deep weights are small
            ax.axhspan(L - 0.5, L + 0.5, color=paper)
            if entry["sources"][used[-1]] == "p":
                ax.axvline(len(used) - 1.5, color=paper, lw=4)
            ax.set(facecolor="#E4E4E4", title=f"{variant}: {group.upper()} route", xlabel="source")
            names = ["$p$" if entry["sources"][c] == "p" else f"$b_{{{c}}}$" for c in used]
            ticks = [i for i, name in enumerate(names) if name == "$p$" or i % (1 + (len(used) - 1) // 10) == 0]  # as many as fit
            ax.set_xticks(ticks, [names[i] for i in ticks])
        for ax in axes[len(groups) : -1]:
            ax.axis("off")
        row.colorbar(image, ax=axes[: len(groups)], label="mean weight", fraction=0.05, pad=0.01, extend="max")
        ax, y = axes[-1], [*range(L), L + 1]
        for run in entry["runs"]:
            ax.plot([*run["js"], run["js"].mean()], y, "o", ms=3.5, mew=0, alpha=0.45, color=colour)
        ax.plot(entry["js"], range(L), color=colour, lw=1.8)
        ax.plot(entry["js"].mean(), L + 1, "D", ms=6, color=colour)
        ax.set(title=f"JS: mean {entry['js'].mean():.3f}",
               xlabel=f"JS of {both(entry)}, nats", xlim=(0, max(1.15 * max(run["js"].max() for run in entry["runs"]), 0.01)))  # fmt: skip
        ax.xaxis.set_major_locator(MaxNLocator(3))
        layers = range(0, L, 1 + L // 10)
        axes[0].set(ylabel="layer", ylim=(L + 1.5, -0.5))
        axes[0].set_yticks([*layers, L + 1], [*map(str, layers), "mean"])
        ax.tick_params(labelleft=True)


# ---- report ----------------------------------------------------------------------------------------------------------


def short(tokens):
    """2000158720 -> 2B, 262144 -> 262k."""
    size, unit = next(((size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if tokens >= size), (1, ""))
    return f"{float(f'{tokens / size:.3g}'):g}{unit}"


def signed(x):
    """A difference with four decimals; one too small for them, but not zero, as a power of ten."""
    return f"{x:+.4f}" if x == 0 or abs(x) >= 5e-5 else f"{x:+.0e}"


def percent(x):
    return f"{100 * x:+.2f} %"


def decimals(x):
    return "none" if x is None else f"{x:.4f}"


def interval(ends, write=signed):
    return f"[{write(ends[0])}, {write(ends[1])}]" if ends else "none for n = 1"


def decoupled(routes):
    """The variants whose q and v have a route each."""
    return {variant: entry for variant, entry in routes.items() if "js" in entry}


def both(entry):
    return " and ".join(group.upper() for group in entry["of_q_and_v"])


def table(rows, markdown):
    """Rows of text, the header first, as aligned lines."""
    widths = [max(2, *(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    lines = [(" | " if markdown else "  ").join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    lines[1:1] = [" | ".join("-" * (width - 1) + ":" for width in widths)] if markdown else []
    return [f"| {line} |" if markdown else line for line in lines]


def comparison_text(c, js, markdown):
    """Lines of a comparison's pairs, then its statistics in sentences; `js` is the routes entry of the variant, if any."""
    name = c["variant"]
    rows = [["seed", PARENT, name, f"{name} - {PARENT}", "perplexity"]]
    mean = c | {"seed": "mean"} | {key: np.mean([pair[key] for pair in c["pairs"]]) for key in (PARENT, name)} | {"difference": c["mean"]}
    for pair in [*c["pairs"], mean]:
        change = [signed(pair["difference"]), percent(pair["perplexity_change"])]
        rows.append([str(pair["seed"]), decimals(pair[PARENT]), decimals(pair[name]), *change])
    sign_p = f"p = {c['sign_p']:.4g} ({c['wins'] + c['losses']} signs cannot give less than {c['sign_floor']:.4g})"
    ties = f" and equal in {c['ties']}, which the test leaves out" if c["ties"] else ""
    sentences = [
        f"sd {decimals(c['sd'])}, 95 % t interval {interval(c['interval'])}, of perplexity {interval(c['perplexity_interval'], percent)}.",
        f"Lower in {c['wins']} of {c['n']} pairs{ties}; two-sided sign test {sign_p if c['ties'] < c['n'] else 'without a sign to count'}.",
    ]
    if js:
        over, without = js["js_over_layers"], js["js_without_layer_0"] or js["js_over_layers"]
        sentences.append(f"Mean JS divergence of its {both(js)} routes {over['mean']:.4f} nats (at most {math.log(2):.4f}), "
                         f"without layer 0 {without['mean']:.4f}; n = {js['n']}.")  # fmt: skip
    if c["tokens"] < SMALL_TOKENS:
        sentences.append(f"At {short(c['tokens'])} tokens a seed's gap is mostly noise; results/ says what was measured, with intervals.")
    return [*table(rows, markdown), "", " ".join(sentences)] if markdown else table(rows, markdown) + sentences


def route_rows(entry):
    """Table rows of one variant's routes by layer."""
    groups, js = entry["groups"], "js" in entry
    rows = [["layer", "sources", *(f"entropy {group}" for group in groups), "ln sources", *(["JS"] if js else [])]]
    for layer, profile in enumerate(entry["profile"][groups[0]]):
        K = int(np.isfinite(profile).sum())
        numbers = [*(entry["entropy"][group][layer] for group in groups), math.log(K), *([entry["js"][layer]] if js else [])]
        rows.append([str(layer), str(K), *(f"{x:.4f}" for x in numbers)])
    return rows


def report(runs, comparisons, routes, notes, figures):
    """The text of report.md."""
    milestones = milestone_table(runs)
    lines = [f"# {runs[0].config.get('name', 'Runs')}: {len(runs)} run(s)", ""]
    lines += ["NLL in nats a token on the fixed validation windows. A difference is "
              f"variant - {PARENT} at equal seed, its perplexity change exp(difference) - 1.", ""]  # fmt: skip
    if "curves.png" in figures:
        lines += ["![Validation loss over tokens, and paired differences](curves.png)", ""]
    for c in comparisons:
        lines += [f"## {c['variant']} against {PARENT} at {short(c['tokens'])} tokens", ""]
        lines += [*comparison_text(c, decoupled(routes).get(c["variant"]), True), "", "The gap over the milestones:", ""]
        rows = [["tokens", "n", "mean difference", "sd", "95 % interval", "perplexity", "lower", "sign test p"]]
        for p in c["curve"]:
            if p["tokens"] in {row["tokens"] for row in milestones}:
                rows.append([short(p["tokens"]), str(p["n"]), signed(p["mean"]), decimals(p["sd"]), interval(p["interval"]),
                             percent(p["perplexity_change"]), f"{p['wins']}/{p['n']}", f"{p['sign_p']:.4g}"])  # fmt: skip
        lines += [*table(rows, True), ""]
        if test := c["test"]:
            gap = f"{signed(test['mean'])}, 95 % interval {interval(test['interval'])}, n = {test['n']}"
            lines += [f"On the test windows, read once at the end: {gap}.", ""]
    if len(comparisons) > 1:
        lines += [f"No interval or p is corrected for making {len(comparisons)} comparisons.", ""]
    rows = [[short(m["tokens"]), m["variant"], str(m["n"]), decimals(m["mean"]), decimals(m["sd"])] for m in milestones]
    lines += ["## Validation NLL at the milestones", "", *table([["tokens", "variant", "n", "mean", "sd"], *rows], True), ""]
    if routes:
        lines += ["## Depth routes", "", "From the checkpoints, on validation windows; divergence and entropy token by token, then averaged, in nats. "
                  "b_0 is the embedding, b_n the n-th block, p the sum inside the current one. The last block is read by the head alone. "
                  "Over the layers, a source that a layer lacks (grey) counts as weight 0.", ""]  # fmt: skip
    if "routes.png" in figures:
        lines += ["![Where the routes read, by layer](routes.png)", ""]
    for variant, entry in routes.items():
        rows = [[group, *(f"{weight:.3f}" for weight in weights)] for group, weights in entry["profile_over_layers"].items()]
        lines += [f"### {variant}, n = {entry['n']}", "", *table(route_rows(entry), True), ""]
        lines += [*table([["weight over layers", *entry["sources"]], *rows], True), ""]
    if notes:
        lines += ["## Notes", "", *(f"- {note}" for note in notes), ""]
    return "\n".join(lines)


def plain(value):
    """`value` for JSON: arrays as lists, NaN (a source that a read does not have) as null."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return None if isinstance(value, float) and math.isnan(value) else value


# ---- main ------------------------------------------------------------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description="Runs -> paired statistics against block, route divergence, tables and plots.")
    parser.add_argument("folders", nargs="+", help="folders of runs, or runs")
    parser.add_argument("--out", help="folder for the report (default: the folder given, or the one around several runs)")
    parser.add_argument("--data_dir", help="folder of the shards (default: the runs' own)")
    parser.add_argument("--route_tokens", type=int, default=2**14, help="validation tokens to measure routes on (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="where to compute the routes (default: a GPU if there is one)")
    args = parser.parse_args(argv)

    if args.route_tokens < 0:
        raise UserError(f"--route_tokens: {args.route_tokens} must be 0 (no routes) or more")
    notes, routes, comparisons, figures = [], {}, [], []
    runs = find_runs(args.folders, notes)
    first = Path(args.folders[0])
    several = len(args.folders) > 1 and (first / "config.json").exists()
    out = Path(args.out or (first.parent if several else first))  # one run alone is no report on all those around it
    make_folder(out, "out")

    variants = list(dict.fromkeys(run.variant for run in runs))
    if PARENT in variants and len(variants) > 1:
        comparisons = [c for variant in variants if variant != PARENT and (c := compare(variant, runs, notes))]
    else:
        notes.append(f"Nothing is paired: the runs are all of {', '.join(variants)}; a pair is of {PARENT} and another variant.")
    windows = validation_windows(runs, args.data_dir, args.route_tokens, notes) if args.route_tokens else None
    if windows is not None:
        device = pick_device(args.device)
        routes = {v: variant_routes([run for run in runs if run.variant == v], windows, device, notes) for v in variants}
        routes = {variant: entry for variant, entry in routes.items() if entry}

    if any(run.evals for run in runs):
        save_figure(out / "curves.png", (8, 3.4), draw_curves, runs, comparisons)
        figures.append("curves.png")
    if split := decoupled(routes):
        height = sum(1.3 + 0.13 * max(10, len(entry["js"])) for entry in split.values())
        save_figure(out / "routes.png", (8, height), draw_routes, split)
        figures.append("routes.png")
    summary = {"runs": [dataclasses.asdict(run) for run in runs], "milestones": milestone_table(runs), "comparisons": comparisons,
               "routes": routes, "route_tokens": 0 if windows is None else windows.size, "notes": notes}  # fmt: skip
    with atomic_write(out / "report.md", "w") as file:
        file.write(report(runs, comparisons, routes, notes, figures))
    with atomic_write(out / "summary.json", "w") as file:
        json.dump(plain(summary), file, indent=1, allow_nan=False)

    for c in comparisons:
        print(f"{c['variant']} against {PARENT} at {short(c['tokens'])} tokens: validation NLL, nats a token\n")
        for line in comparison_text(c, split.get(c["variant"]), False):
            print(textwrap.fill(line, 98, initial_indent="  ", subsequent_indent="    ") if line.endswith(".") else "  " + line)
        print()
    for note in notes:
        print(textwrap.fill(f"note: {note}", 100, subsequent_indent="      "))
    print("wrote " + "  ".join(str(out / name) for name in ("report.md", "summary.json", *figures)))


if __name__ == "__main__":
    run_main(main)
