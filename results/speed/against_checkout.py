"""Training steps of two checkouts side by side, each in a process of its own, one step at a time in shuffled order.

    git clone . OLD; git -C OLD checkout 18d808c
    export OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_MMAP_THRESHOLD_=33554432
    python results/speed/against_checkout.py OLD configs/bench.toml --variants=prenorm,block,rd \
        --compile=true --rounds=40 --json=results/speed/against-18d808c/bench-compiled.json

Both checkouts train a model with the sizes of the config file. A checkout with
kernels/ is taken as this one is, one without as 18d808c was: fused.py, and the sublayers compiled apart. Speed is
tokens per second over the other's: the median of the rounds' own ratios and its interval, by the clock (wall or cpu).
Kept bytes and the first step's seconds, compiling from an empty cache, stand beside it.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
SIZES = "vocab_size n_layer n_head d_model d_mlp context n_blocks".split()


def worker(checkout, variant, compiled, sizes, batch):
    """In a process of its own, in the folder of a checkout: one update per line of standard input."""
    sys.path.insert(0, checkout)
    import torch

    import model as definition

    began = time.perf_counter()
    torch.manual_seed(1)
    gpt = definition.GPT(definition.ModelConfig(**sizes, variant=variant))
    if compiled:
        torch._inductor.config.force_disable_caches = True
    if (Path(checkout) / "kernels").exists():
        import kernels

        kernels.use("auto", gpt, torch.device("cpu"), torch.float32)
        if compiled:
            gpt.compile(fullgraph=True, dynamic=False)
    else:
        import fused

        import train

        gpt.read_finished = fused.read_finished
        if compiled:
            train.compile_parts(gpt, torch.device("cpu"))
    trained = [p for p in gpt.parameters() if p.requires_grad]
    groups = [[p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]]
    decays = [dict(params=group, weight_decay=decay) for group, decay in zip(groups, (0.1, 0.0))]
    optimizer = torch.optim.AdamW(decays, lr=1e-3, betas=(0.9, 0.95), fused=True)
    passes, micro_batch = batch
    ids = torch.randint(sizes["vocab_size"], (passes, micro_batch, sizes["context"] + 1))
    batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in ids]

    def update():
        for idx, targets in batches:
            (gpt(idx, targets)[1] / passes).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    update()
    first = time.perf_counter() - began
    sys.path.insert(0, str(HERE))
    from lib.measurement import kept_bytes

    kept = kept_bytes(lambda: gpt(*batches[0])[1], gpt.parameters())
    update(), update()
    print(json.dumps(dict(first_s=first, kept_bytes=kept)), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        update()
        print(json.dumps(dict(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)), flush=True)


class Entrant:
    """A worker process and what it said."""

    def __init__(self, checkout, variant, arguments):
        self.checkout, self.variant, self.steps = checkout, variant, []
        call = json.dumps([str(Path(checkout).resolve()), variant, *arguments])
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen([sys.executable, __file__, "--worker", call], cwd=checkout, **pipes)

    def said(self):
        return json.loads(self.process.stdout.readline())

    def step(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.steps.append(self.said())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="folder of the other checkout")
    parser.add_argument("config", help="a file of configs/")
    parser.add_argument("--variants", default="prenorm,block,rd")
    parser.add_argument("--compile", choices=("true", "false"), default="false")
    parser.add_argument("--micro_batch", type=int, help="sequences per pass (default: the config's)")
    parser.add_argument("--batch_tokens", type=int, help="tokens per update (default: the config's)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", required=True, help="where everything measured goes")
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    from lib.devices import cpu_model
    from lib.measurement import of_rounds, ratio_interval, versions

    table = tomllib.loads(Path(args.config).read_text())
    sizes = {name: table[name] for name in SIZES if name in table} | {"vocab_size": table.get("vocab_size", 257)}
    micro_batch = args.micro_batch or table["micro_batch"]
    passes = (args.batch_tokens or table["batch_tokens"]) // (micro_batch * table["context"])
    arguments = (args.compile == "true", sizes, (passes, micro_batch))
    report = dict(options=vars(args), cpu=cpu_model(), threads=os.environ.get("OMP_NUM_THREADS"))
    report |= dict(here=versions(HERE), other=versions(Path(args.other)), rows=[])
    for variant in args.variants.split(","):
        entrants = [Entrant(checkout, variant, arguments) for checkout in (HERE, args.other)]
        starts = [e.said() for e in entrants]
        for _ in range(args.rounds):
            for e in random.sample(entrants, 2):
                e.step()
        row = dict(variant=variant, first_s=[s["first_s"] for s in starts])
        row["kept"] = starts[0]["kept_bytes"] / starts[1]["kept_bytes"]
        for clock in ("wall", "cpu"):
            seconds = [[step[clock] for step in e.steps] for e in entrants]
            row[clock] = dict(ratio=ratio_interval(*seconds, of_rounds), seconds=seconds)
        report["rows"].append(row)
        shown = ["{:.3f} [{:.3f}, {:.3f}]".format(*row[clock]["ratio"]) for clock in ("wall", "cpu")]
        first = " and ".join(f"{s:.0f}" for s in row["first_s"])
        print(f"{variant:<9} speed {shown[0]} (processor {shown[1]}), kept {row['kept']:.3f}, first step {first} s")
        for e in entrants:
            e.process.stdin.close()
            e.process.wait()
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*json.loads(sys.argv[2]))
    else:
        main()
