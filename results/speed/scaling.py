"""Cost of the reads against L, N and D, and of a second rank on the CPU -> FOLDER/scaling.json and FOLDER/scaling.png.

    OMP_NUM_THREADS=1 python results/speed/scaling.py configs/xs.toml --rounds=20

Its own option is --folder (default results/speed). Options of bench.py and keys of train.py apply:
"""

import json
import statistics
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))
import bench
import train
from lib.errors import Parser, or_exit
from lib.files import atomic_write, make_folder
from lib.measurement import in_child, of_rounds, ratio_interval

PAIRS = (("rd", "block"), ("block", "prenorm"))
LABELS = dict(n_layer="layers L", n_blocks="blocks N", d_model="width D")


def grid(config):
    """{key: configs} with another n_layer, n_blocks or d_model than config; 2 n_layer / n_blocks stays whole."""
    L, N, D = config.n_layer, config.n_blocks, config.d_model
    points = {
        "n_layer": [replace(config, n_layer=l) for l in (L // 2, L, 2 * L)],
        "n_blocks": [replace(config, n_blocks=n) for n in (N // 4, N // 2, N, 2 * N, 4 * N) if 0 < n <= 2 * L],
        "d_model": [replace(config, d_model=D * m // 2, d_mlp=config.d_mlp * m // 2) for m in (1, 2, 4)],
    }
    return {key: [c for c in configs if 2 * c.n_layer % c.n_blocks == 0] for key, configs in points.items()}


def measure_grid(options, config, device, compiled):
    """Rows of ratios of speeds, of rounds, over the grid."""
    rows = []
    for key, configs in grid(config).items():
        for point in configs:
            entrants = bench.enter(["prenorm", "block", "rd"], point, device, compiled)
            for entrant in entrants:
                entrant.first_steps(1)
            bench.time_rounds(entrants, options.rounds, bench.CLOCKS[options.clock])
            seconds = {entrant.name: entrant.seconds for entrant in entrants}
            for top, bottom in PAIRS:
                ratio, low, high = ratio_interval(seconds[top], seconds[bottom], of_rounds)
                value, pair = getattr(point, key), f"{top}/{bottom}"
                rows.append(dict(key=key, value=value, pair=pair, ratio=ratio, low=low, high=high))
                print(f"{key} = {value:<5} {pair:<14} {ratio:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    return rows


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    keys, pairs = ([*dict.fromkeys(row[name] for row in rows)] for name in ("key", "pair"))
    figure, axes = plt.subplots(1, len(keys), figsize=(10, 3.2), sharey=True, constrained_layout=True)
    for axis, key in zip(axes, keys):
        for pair in pairs:
            part = [row for row in rows if (row["key"], row["pair"]) == (key, pair)]
            values, ratio, low, high = (
                np.array([row[name] for row in part]) for name in ("value", "ratio", "low", "high")
            )
            axis.errorbar(values, ratio, [ratio - low, high - ratio], marker="o", capsize=3, label=pair)
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, values)
        axis.set_xlabel(LABELS[key])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ratio of tokens/s, of rounds, 95 %")
    axes[0].legend()
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)
    plt.close(figure)


def measure_rank(options, config, name="rd"):
    """In a process of torchrun: micro_batch sequences per rank on the CPU, with and without the collective -> a row."""
    tokens = config.micro_batch * config.context
    config = replace(config, batch_tokens=tokens * train.WORLD, device="cpu", compile="false")
    settled, device, compiled = bench.settle(config)
    (entrant,) = bench.enter([name], replace(settled, batch_tokens=tokens), device, compiled)
    dist.init_process_group("gloo")
    several = train.WORLD > 1
    if several:
        entrant.net = DistributedDataParallel(entrant.model, gradient_as_bucket_view=True)
    seconds = {"sync": [], "alone": []}
    for _ in range(options.rounds + 2):
        for key in seconds:
            dist.barrier()
            with entrant.net.no_sync() if several and key == "alone" else nullcontext():
                seconds[key].append(entrant.step())
    dist.destroy_process_group()
    sync, alone = (statistics.median(seconds[key][2:]) for key in ("sync", "alone"))
    speed, share = config.batch_tokens / sync, 1 - alone / sync
    return dict(variant=name, ranks=train.WORLD, step_ms=1e3 * sync, tokens_per_s=speed, collective_share=share)


def rank_children(argv, ranks):
    """measure_rank's row, from `ranks` processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return in_child(*launcher, __file__, *argv, "--rank")


def parse(argv):
    """argv -> (own options, what is bench.py's)."""
    parser = Parser(prog="results/speed/scaling.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--folder", default=str(Path(__file__).parent))
    parser.add_argument("--rank", action="store_true")  # for this script itself, under torchrun
    return parser.parse_known_args(argv)


def main(argv):
    own, rest = parse(argv)
    options, config, name = bench.parse(rest, __doc__)
    if own.rank:
        row = measure_rank(options, config)
        if train.RANK == 0:
            print(json.dumps(row))
        return 0
    make_folder(own.folder, "folder")
    config, device, compiled = bench.settle(config)
    report = bench.circumstances(options, config, name, device, compiled)
    rows = measure_grid(options, config, device, compiled)
    draw(rows, Path(own.folder) / "scaling.png")
    report["scaling"] = dict(grid=rows, ranks=[rank_children(rest, ranks) for ranks in (1, 2)])
    for row in report["scaling"]["ranks"]:
        speed, share = row["tokens_per_s"], 100 * row["collective_share"]
        print(f"{row['ranks']} rank(s): {speed:,.0f} tokens/s, the collective {share:.1f} % of a step")
    with atomic_write(Path(own.folder) / "scaling.json", "w") as file:
        json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(or_exit(main, sys.argv[1:]))
