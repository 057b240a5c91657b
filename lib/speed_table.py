"""bench.py's report as a table for people."""

MiB = 2**20


def aligned(rows):
    """Rows of cells -> a blank line and one line per row. A column without values is left out; no rows, no lines."""
    rows = [["-" if c is None else f"{c:.1f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    columns = [column for column in zip(*rows) if set(column[1:]) - {"-"}]
    widths = [max(map(len, column)) for column in columns]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in zip(*columns)]
    return ["", *lines] if lines else []


def steps(report):
    yield (
        "variant",
        "reads",
        "step ms",
        "quartiles",
        "tokens/s",
        "kept MiB",
        "peak MiB",
        "compile s",
        "cached s",
        "MFU %",
    )
    for row in report["rows"]:
        peak, mfu = row["cuda_peak_bytes"] or row["peak_rss_bytes"], row["mfu"]
        speed = row["step_ms"], "{:.1f} - {:.1f}".format(*row["step_ms_quartiles"]), f"{row['tokens_per_s']:,.0f}"
        memory, compiling = (row["saved_bytes"] / MiB, peak and peak / MiB), (row["compile_s"], row["cached_compile_s"])
        yield row["variant"], row["reads"], *speed, *memory, *compiling, mfu and 100 * mfu


def ratios(report):
    yield "ratio of speeds", "of medians, 95 %", "of rounds, 95 %", "limit by bytes"
    for row in report["ratios"]:
        both = (row["ratio"], row["low"], row["high"]), row["of_rounds"]
        best = row["best"] and f"{row['best']:.3f}"
        yield row["pair"], *("{:.3f} [{:.3f}, {:.3f}]".format(*three) for three in both), best


def reads(report):
    copied = f"copied at {report['copy_bytes_per_s'] / 1e9:.1f} GB/s"
    yield "one read of", "K", "by", "ms", "kept MiB", "stacked ms", "kept MiB", copied
    for row in report["reads"]:
        ours, stacked, copy = (f"{row[key]:.2f}" for key in ("ours_ms", "stacked_ms", "copy_ms"))
        kept = [row[key] / MiB for key in ("ours_kept_bytes", "stacked_kept_bytes")]
        yield row["variant"], row["K"], row["reads"], ours, kept[0], stacked, kept[1], copy


def table(report):
    """The report, 100 columns wide."""
    config, here, loader = report["config"], report["device"], report["loader"]
    sizes = "L {n_layer}, D {d_model}, {n_head} heads, N {n_blocks}, T {context}, {batch_tokens} tokens a step"
    mode, load = "compiled" if here["compiled"] else "eager", f"load {here['load_average'] or 0:.1f}"
    clock, version = f"{report['options']['clock']} time", f"torch {report['versions']['torch']}"
    lines = [
        f"{report['name']}: {sizes.format(**config)}",
        ", ".join([here["name"], config["dtype"], mode, f"{here['threads']} thread(s)", load, clock, version]),
        *aligned(steps(report)),
        *aligned(ratios(report)),
        *aligned(reads(report)),
    ]
    if loader:
        lines.append(f"loading a step's windows: {loader['ms']:.2f} ms, {100 * loader['share']:.2f} % of a step")
    return "\n".join(lines)
