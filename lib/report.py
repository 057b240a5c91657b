"""The text of a diagnosis: report.md, and its comparisons for the terminal."""

import math

import numpy as np

from lib.paired import PARENT
from lib.routes import both_names, decoupled

SMALL_TOKENS = 50_000_000  # below this the spread between seeds drowns differences of a few hundredths of a nat

# ---- numbers as text -------------------------------------------------------------------------------------------------


def short(tokens):
    """2000158720 -> 2B, 262144 -> 262k."""
    units = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
    size, unit = next(((size, unit) for size, unit in units if tokens >= size), (1, ""))
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


def table(rows, markdown):
    """Rows of text, the header first, as aligned lines."""
    widths = [max(2, *(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    lines = [(" | " if markdown else "  ").join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    if not markdown:
        return lines
    lines.insert(1, " | ".join("-" * (width - 1) + ":" for width in widths))
    return [f"| {line} |" for line in lines]


# ---- comparisons -----------------------------------------------------------------------------------------------------


def pair_rows(c):
    """Table rows of a comparison: one per pair, then their mean."""
    name = c["variant"]
    rows = [["seed", PARENT, name, f"{name} - {PARENT}", "perplexity"]]
    mean = {key: np.mean([pair[key] for pair in c["pairs"]]) for key in (PARENT, name)}
    mean |= {"seed": "mean", "difference": c["mean"], "perplexity_change": c["perplexity_change"]}
    for pair in [*c["pairs"], mean]:
        nlls = [decimals(pair[PARENT]), decimals(pair[name])]
        rows.append([str(pair["seed"]), *nlls, signed(pair["difference"]), percent(pair["perplexity_change"])])
    return rows


def comparison_sentences(c, js):
    """A comparison's statistics in sentences; `js` is the routes entry of its variant, or None."""
    nats, perplexity = interval(c["interval"]), interval(c["perplexity_interval"], percent)
    ties = f" and equal in {c['ties']}, which the test leaves out" if c["ties"] else ""
    signs = c["wins"] + c["losses"]
    sign_p = f"p = {c['sign_p']:.4g} ({signs} signs cannot give less than {c['sign_floor']:.4g})"
    sign_test = sign_p if signs else "without a sign to count"
    sentences = [
        f"sd {decimals(c['sd'])}, 95 % t interval {nats}, of perplexity {perplexity}.",
        f"Lower in {c['wins']} of {c['n']} pairs{ties}; two-sided sign test {sign_test}.",
    ]
    if js:
        over, without = js["js_over_layers"], js["js_without_layer_0"] or js["js_over_layers"]
        sentences.append(
            f"Mean JS divergence of its {both_names(js)} routes {over['mean']:.4f} nats (at most {math.log(2):.4f}), "
            f"without layer 0 {without['mean']:.4f}; n = {js['n']}."
        )
    if c["tokens"] < SMALL_TOKENS:
        sentences.append(
            f"At {short(c['tokens'])} tokens a seed's gap is mostly noise; "
            "results/ says what was measured, with intervals."
        )
    return sentences


def comparison_section(c, js, milestones):
    """report.md's lines on one comparison; `milestones` are the token counts of the gap's table."""
    lines = [f"## {c['variant']} against {PARENT} at {short(c['tokens'])} tokens", ""]
    lines += [*table(pair_rows(c), True), "", " ".join(comparison_sentences(c, js)), ""]
    rows = [["tokens", "n", "mean difference", "sd", "95 % interval", "perplexity", "lower", "sign test p"]]
    for point in c["curve"]:
        if point["tokens"] in milestones:
            row = [short(point["tokens"]), str(point["n"]), signed(point["mean"]), decimals(point["sd"])]
            row += [interval(point["interval"]), percent(point["perplexity_change"])]
            rows.append([*row, f"{point['wins']}/{point['n']}", f"{point['sign_p']:.4g}"])
    lines += ["The gap over the milestones:", "", *table(rows, True), ""]
    if test := c["test"]:
        gap = f"{signed(test['mean'])}, 95 % interval {interval(test['interval'])}, n = {test['n']}"
        lines += [f"On the test windows, read once at the end: {gap}.", ""]
    return lines


# ---- routes ----------------------------------------------------------------------------------------------------------

ROUTES = """\
From the checkpoints, on validation windows; divergence and entropy token by token, then averaged, in nats. \
b_0 is the embedding, b_n the n-th block, p the sum inside the current one. The last block is read by the head alone. \
Over the layers, a source that a layer lacks (grey) counts as weight 0."""


def route_rows(entry):
    """Table rows of one variant's routes by layer."""
    groups, js = entry["groups"], entry.get("js")
    entropies = [f"entropy {group}" for group in groups]
    rows = [["layer", "sources", *entropies, "ln sources", *([] if js is None else ["JS"])]]
    for layer, profile in enumerate(entry["profile"][groups[0]]):
        K = int(np.isfinite(profile).sum())
        numbers = [*(entry["entropy"][group][layer] for group in groups), math.log(K)]
        numbers += [] if js is None else [js[layer]]
        rows.append([str(layer), str(K), *(f"{x:.4f}" for x in numbers)])
    return rows


def route_section(variant, entry):
    """report.md's lines on one variant's routes."""
    weights = entry["profile_over_layers"].items()
    rows = [["weight over layers", *entry["sources"]]]
    rows += [[group, *(f"{weight:.3f}" for weight in profile)] for group, profile in weights]
    return [f"### {variant}, n = {entry['n']}", "", *table(route_rows(entry), True), "", *table(rows, True), ""]


# ---- the whole -------------------------------------------------------------------------------------------------------


def report_text(name, summary, figures):
    """The text of report.md: `name` of the config, `summary` as diagnose.py computes it, file names of the figures."""
    comparisons, milestones, routes = summary["comparisons"], summary["milestones"], summary["routes"]
    lines = [f"# {name}: {len(summary['runs'])} run(s)", ""]
    lines += [
        "NLL in nats a token on the fixed validation windows. A difference is "
        f"variant - {PARENT} at equal seed, its perplexity change exp(difference) - 1.",
        "",
    ]
    if "curves.png" in figures:
        lines += ["![Validation loss over tokens, and paired differences](curves.png)", ""]
    for c in comparisons:
        js = decoupled(routes).get(c["variant"])
        lines += comparison_section(c, js, {row["tokens"] for row in milestones})
    if len(comparisons) > 1:
        lines += [f"No interval or p is corrected for making {len(comparisons)} comparisons.", ""]
    rows = [["tokens", "variant", "n", "mean", "sd"]]
    for row in milestones:
        rows.append([short(row["tokens"]), row["variant"], str(row["n"]), decimals(row["mean"]), decimals(row["sd"])])
    lines += ["## Validation NLL at the milestones", "", *table(rows, True), ""]
    if routes:
        lines += ["## Depth routes", "", ROUTES, ""]
    if "routes.png" in figures:
        lines += ["![Where the routes read, by layer](routes.png)", ""]
    for variant, entry in routes.items():
        lines += route_section(variant, entry)
    if summary["notes"]:
        lines += ["## Notes", "", *(f"- {note}" for note in summary["notes"]), ""]
    return "\n".join(lines)
