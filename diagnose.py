"""Run folders -> paired statistics, route divergence, tables and plots.

    python diagnose.py out/X [more folders of runs, or runs]    -> out/X/report.md  summary.json  curves.png  routes.png

Runs pair by seed: a variant against `block`, the same in everything but the variant. All NLLs are nats per token on
the fixed validation windows. The statistics stand in lib/paired.py and lib/routes.py, the text in lib/report.py, the
figures in lib/figures.py.
"""

import argparse
import dataclasses
import json
import math
import textwrap
from pathlib import Path

import numpy as np

from lib.config import TrainConfig, check_config, identity
from lib.devices import pick_device
from lib.errors import UserError, run_main
from lib.figures import COLOURS, save_curves, save_routes
from lib.files import atomic_write, make_folder, read_json
from lib.paired import PARENT, mean_and_sd, paired_statistics, perplexity_change
from lib.report import comparison_sentences, pair_rows, report_text, short, table
from lib.routes import average_routes, decoupled, route_statistics
from lib.run_folder import load_run
from lib.shards import Windows, check_data

IDENTITY = identity(dataclasses.asdict(TrainConfig())).keys() | {"data_id"}
NEEDED = IDENTITY | {"stop_tokens", "milestones", "data_dir"}  # other machine keys come and go between versions

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


def find_runs(folders, notes):
    """The runs that `folders` are or hold, by variant and seed. Raises UserError where there is none."""
    paths = {}  # {resolved: as named}: a run named twice is one run
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; name a folder of runs, such as out/demo")
        for path in [folder] if (folder / "config.json").exists() else sorted(folder.iterdir()):
            if (path / "config.json").exists():
                paths.setdefault(path.resolve(), path)
            elif (path / "metrics.jsonl").exists() or (path / "ckpt.pt").exists():
                notes.append(f"{path} has no config.json and is left out.")
    runs = [read_run(path, notes) for path in paths.values()]
    if not runs:
        listed = ", ".join(map(str, folders))
        raise UserError(f"{listed}: no run here (a folder with a config.json); train.py writes them")
    check_one_experiment(runs)
    order = {variant: place for place, variant in enumerate(COLOURS)}
    return sorted(runs, key=lambda run: (order.get(run.variant, len(order)), run.variant, run.seed))


def check_one_experiment(runs):
    """Raise UserError unless data and identity keys are equal but for variant and seed, one run for each of those."""
    seen = {}
    for run in runs:
        for key in sorted(IDENTITY - {"variant", "seed"}):
            value, other = runs[0].config.get(key), run.config.get(key)
            if value != other:
                raise UserError(
                    f"{runs[0].path} and {run.path} cannot be compared: {key} is {value!r} in the first and {other!r} "
                    "in the second; name runs that differ in variant and seed only"
                )
        if run.name in seen:
            raise UserError(f"{seen[run.name]} and {run.path} are both {run.name}; name one of them")
        seen[run.name] = run.path


def read_config(path):
    """A run's config.json (a dict) with the keys that a diagnosis needs, of the right types; UserError otherwise."""
    config = read_json(path)
    if missing := sorted(NEEDED - config.keys()):
        several = f" and {len(missing) - 3} other keys" if len(missing) > 3 else ""
        names = ", ".join(missing[:3]) + several
        raise UserError(f"{path}: has no {names}; train.py did not write it: leave this folder out")
    try:
        check_config({name: config[name] for name in sorted(NEEDED - {"data_id"})})
    except UserError as error:
        raise UserError(f"{path}: {error}; train.py did not write it so: leave this folder out") from error
    return config


def read_run(path, notes):
    """The Run in the folder `path`. What is odd about it goes to `notes`, one sentence per oddity."""
    config = read_config(path / "config.json")
    run = Run(str(path), config["variant"], config["seed"], config)
    metrics = path / "metrics.jsonl"
    tests, broken, why = {}, 0, ""
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
    if broken:
        notes.append(f"{run.name}: {broken} line(s) of {metrics} are cut short or not finite, and left out.")
    counts = "it has no evaluation to count"
    if run.evals:
        counts = f"it counts up to {short(max(run.evals))} tokens, its last evaluation"
    if run.status == "diverged":
        notes.append(f"{run.name} diverged{why}: {counts}; later comparisons are over the runs that survived.")
    elif run.status == "unfinished":
        notes.append(f"{run.name} is still going, or was stopped short of its {short(goal)} tokens: {counts}.")
    return run


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


def pair_runs(variant, runs, notes):
    """{seed: (parent, run)} of the variant's runs and the parent's. A run without a partner goes to `notes`."""
    parents, ours = ({run.seed: run for run in runs if run.variant == name} for name in (PARENT, variant))
    for seed in sorted(parents.keys() ^ ours.keys()):
        there, missing = (PARENT, variant) if seed in parents else (variant, PARENT)
        notes.append(f"{there}-s{seed} has no {missing}-s{seed} to pair with.")
    return {seed: (parents[seed], ours[seed]) for seed in sorted(parents.keys() & ours.keys())}


def note_machines(variant, pairs, notes):
    """Where a pair's two runs had different processors or counts of threads, a note names both."""
    seeds = {}  # {difference as text: seeds}
    for seed, (parent, run) in pairs.items():
        values = {key: (parent.config.get(key), run.config.get(key)) for key in ("cpu", "threads")}
        parts = [f"{key} {a!r} and {b!r}" for key, (a, b) in values.items() if a != b and None not in (a, b)]
        if parts:
            seeds.setdefault(", ".join(parts), []).append(str(seed))
    for difference, those in seeds.items():
        notes.append(
            f"{PARENT} and {variant} of seed {', '.join(those)} ran on different machines: {difference}. "
            "Rounding alone can part two such runs by as much as a variant does."
        )


def compare(variant, runs, notes):
    """The variant against its parent, at every token count where a pair was evaluated; None, and a note, if nowhere.

    The verdict stands where the most pairs of finished runs were evaluated, at the latest such point.
    """
    pairs = pair_runs(variant, runs, notes)
    note_machines(variant, pairs, notes)
    points = {}  # {tokens: [pair]}
    for seed, (parent, run) in pairs.items():
        for tokens in parent.evals.keys() & run.evals.keys():
            before, after = parent.evals[tokens], run.evals[tokens]
            change = {"difference": after - before, "perplexity_change": perplexity_change(after - before)}
            points.setdefault(tokens, []).append({"seed": seed, PARENT: before, variant: after} | change)
    if not points:
        notes.append(f"{variant} is not compared: none of its runs shares an evaluation with the {PARENT} of its seed.")
        return None
    curve = []
    for tokens in sorted(points):
        statistics = paired_statistics([pair["difference"] for pair in points[tokens]])
        curve.append({"tokens": tokens, "pairs": points[tokens], **statistics})
    finished = [seed for seed, pair in pairs.items() if all(run.status == "finished" for run in pair)] or pairs
    verdict = max(curve, key=lambda p: (sum(pair["seed"] in finished for pair in p["pairs"]), p["tokens"]))
    if lost := len(pairs) - verdict["n"]:
        at = short(verdict["tokens"])
        notes.append(f"{variant}: {lost} of {len(pairs)} pairs have no evaluation at {at} tokens.")
    if verdict["n"] == 1:
        notes.append(f"{variant}: one pair has neither a standard deviation nor an interval.")
    elif verdict["sd"] < 1e-12:
        same = "its differences are all the same (sd 0)"
        notes.append(f"{variant}: {same}: the interval is a point and says nothing about chance.")
    return {"variant": variant, **verdict, "test": compare_tests(pairs.values()), "curve": curve}


def compare_tests(pairs):
    """Statistics of the pairs' differences on the test windows; None where no pair has them at the same end."""
    differences = []
    for parent, run in pairs:
        same_end = max(run.evals, default=0) == max(parent.evals, default=0)
        if same_end and None not in (parent.test_nll, run.test_nll):
            differences.append(run.test_nll - parent.test_nll)
    return paired_statistics(differences) if differences else None


# ---- routes ----------------------------------------------------------------------------------------------------------


def validation_windows(runs, data_dir, tokens, notes):
    """(B, T) token ids of evenly spaced validation windows, the same at every call.

    `data_dir`, if any, goes before the configs'. Where the runs' data are not at hand: None, and a note.
    """
    config = runs[0].config
    folder = data_dir or config["data_dir"]
    try:
        if check_data(folder)[1] != config["data_id"]:
            raise UserError(f"{folder} holds other data than the runs were trained on")
        windows = Windows(folder, "val", config["context"], config["vocab_size"])
        return windows.read(windows.spread(tokens))[:, :-1]
    except UserError as error:
        notes.append(f"The routes are not measured: {error}; or name the runs' data with --data_dir.")
        return None


def run_routes(run, windows, device):
    """route_statistics of a run's newest checkpoint, in float32 whatever the run's dtype.

    None for a variant without routes. Raises UserError where there is no checkpoint to measure.
    """
    import torch

    gpt, state = load_run(run.path, device)
    if not gpt.variant.routed:
        return None
    if not all(torch.isfinite(parameter).all() for parameter in gpt.parameters()):
        raise UserError("its checkpoint holds values that are not finite")
    return {"run": run.name, "seed": run.seed, "step": state["step"], **route_statistics(gpt, windows)}


def variant_routes(runs, windows, device, notes):
    """average_routes of one variant's runs; None where no run has routes.

    Only runs at the latest checkpoint step are averaged, because routes change during training.
    """
    measured = []
    for run in runs:
        try:
            measured.append(run_routes(run, windows, device))
        except UserError as error:
            notes.append(f"{run.name}: its routes are not measured: {error}.")
    measured = [entry for entry in measured if entry]
    last = max((entry["step"] for entry in measured), default=0)
    for entry in measured:
        if entry["step"] < last:
            step = f"its checkpoint is at step {entry['step']}, others of its variant at {last}"
            notes.append(f"{entry['run']}: its routes are left out: {step}.")
    return average_routes([entry for entry in measured if entry["step"] == last]) if measured else None


# ---- main ------------------------------------------------------------------------------------------------------------


def plain(value):
    """`value` for JSON: arrays as lists, NaN (a source that a read does not have) as null."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return None if isinstance(value, float) and math.isnan(value) else value


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description="Runs -> paired statistics against block, route divergence, tables and plots."
    )
    add = parser.add_argument
    add("folders", nargs="+", help="folders of runs, or runs")
    add("--out", help="folder for the report (default: the folder given, or the one around several runs)")
    add("--data_dir", help="folder of the shards (default: the runs' own)")
    add("--route_tokens", type=int, default=2**14, help="validation tokens to measure routes on (default: %(default)s)")
    add("--device", default="auto", help="where to compute the routes (default: a GPU if there is one)")
    args = parser.parse_args(argv)
    if args.route_tokens < 0:
        raise UserError(f"--route_tokens: {args.route_tokens} must be 0 (no routes) or more")
    return args


def print_summary(comparisons, routes, notes):
    """The comparisons and notes on stdout, in lines of 100 columns at most."""
    for c in comparisons:
        print(f"{c['variant']} against {PARENT} at {short(c['tokens'])} tokens: validation NLL, nats a token\n")
        for line in table(pair_rows(c), False):
            print("  " + line)
        for line in comparison_sentences(c, decoupled(routes).get(c["variant"])):
            print(textwrap.fill(line, 98, initial_indent="  ", subsequent_indent="    "))
        print()
    for note in notes:
        print(textwrap.fill(f"note: {note}", 100, subsequent_indent="      "))


def main(argv=None):
    args = parse_arguments(argv)
    notes = []
    runs = find_runs(args.folders, notes)
    first = Path(args.folders[0])
    several = len(args.folders) > 1 and (first / "config.json").exists()
    out = Path(args.out or (first.parent if several else first))  # one run alone is no report on all those around it
    make_folder(out, "out")

    variants = list(dict.fromkeys(run.variant for run in runs))
    comparisons = []
    if PARENT in variants and len(variants) > 1:
        comparisons = [c for variant in variants if variant != PARENT and (c := compare(variant, runs, notes))]
    else:
        pair = f"a pair is of {PARENT} and another variant"
        notes.append(f"Nothing is paired: the runs are all of {', '.join(variants)}; {pair}.")

    windows = validation_windows(runs, args.data_dir, args.route_tokens, notes) if args.route_tokens else None
    routes = {}
    if windows is not None:
        device = pick_device(args.device)
        for variant in variants:
            ours = [run for run in runs if run.variant == variant]
            if entry := variant_routes(ours, windows, device, notes):
                routes[variant] = entry

    figures = []
    if any(run.evals for run in runs):
        save_curves(out / "curves.png", runs, comparisons)
        figures.append("curves.png")
    if split := decoupled(routes):
        save_routes(out / "routes.png", split)
        figures.append("routes.png")

    summary = {
        "runs": [dataclasses.asdict(run) for run in runs],
        "milestones": milestone_table(runs),
        "comparisons": comparisons,
        "routes": routes,
        "route_tokens": 0 if windows is None else windows.size,
        "notes": notes,
    }
    with atomic_write(out / "report.md", "w") as file:
        file.write(report_text(runs[0].config.get("name", "Runs"), summary, figures))
    with atomic_write(out / "summary.json", "w") as file:
        json.dump(plain(summary), file, indent=1, allow_nan=False)

    print_summary(comparisons, routes, notes)
    print("wrote " + "  ".join(str(out / name) for name in ("report.md", "summary.json", *figures)))


if __name__ == "__main__":
    run_main(main)
