"""Kill training at random moments, again and again, and compare what comes out with a run that nothing happened to.

    make soak                                        # 24 kills
    python tests/soak.py --kills 200 --seed 7

Each life is `train.py` with the same command line in a process of its own, ended by SIGKILL. The kill comes in turn at
any moment after its first update, inside an update, an evaluation, a checkpoint's writing, and while it starts. When a
run has come to its end, weights, optimizer state and metrics (but tokens_per_s) must equal, bitwise, those of an
uninterrupted run. Then another run begins, until there have been enough kills. Exit status 0 if all are equal.
"""

import argparse
import collections
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PHASES = {
    "s": "start",
    "u": "update",
    "e": "evaluation",
    "c": "checkpoint",
}  # as the child notes them, a byte in a file
SIZES = dict(n_layer=2, d_model=128, n_head=2, d_mlp=384, n_blocks=2, micro_batch=4, dtype="float32", reads="auto")
SIZES |= dict(checkpoint_interval=3, eval_interval=4, eval_tokens=11 * 32)
UPDATES = 100


def child(note):
    """train.py with the rest of the command line; the file `note` says what it is at."""
    from lib import run_folder
    from lib.shards import Windows

    descriptor = os.open(note, os.O_WRONLY)

    def at(phase):
        os.pwrite(descriptor, phase, 0)

    read, save = Windows.read, run_folder.save_checkpoint

    def noted_read(self, ids):
        at(b"u" if self.paths[0].name.startswith("train") else b"e")
        return read(self, ids)

    def noted_save(path, state):
        at(b"c")
        save(path, state)
        at(b"u")

    Windows.read, run_folder.save_checkpoint = noted_read, noted_save
    sys.argv = ["train.py", *sys.argv[4:]]
    runpy.run_path(str(Path(__file__).parent.parent / "train.py"), run_name="__main__")


def live(folder, argv, target, rng):
    """One life of a run -> the phase in which it was killed, or None if it ended first.

    target: a phase, or None for any but the start.
    """
    note = folder / "phase"
    note.write_bytes(b"s")
    command = [sys.executable, __file__, "--child", str(note), "--", *argv]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def wait(seconds, until=lambda: False):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and process.poll() is None and not until():
            time.sleep(0.002)

    if target == "s":
        wait(rng.uniform(0, 4))  # it imports torch for the most of that
    else:
        wait(60, lambda: note.read_bytes() != b"s")
        wait(rng.uniform(0, 1.5))
    if target in ("u", "e", "c"):
        wait(60, lambda: note.read_bytes() == target.encode())
        wait(rng.uniform(0, 0.01))
    process.kill()
    errors = process.communicate()[1]
    if process.returncode == 0:
        return None
    if process.returncode != -9:
        sys.exit(f"soak: train.py ended with status {process.returncode}:\n{errors}")
    return PHASES[note.read_text()]


def to_its_end(argv):
    train = Path(__file__).parent.parent / "train.py"
    subprocess.run([sys.executable, str(train), *argv], check=True, stdout=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the moments; default: %(default)s")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    import tiny_runs as tiny

    folder, rng = Path(tempfile.mkdtemp(prefix="soak-")), random.Random(args.seed)
    start = time.monotonic()
    data = tiny.make_data(folder / "data")
    keys = SIZES | dict(max_tokens=UPDATES * tiny.UPDATE, milestones=(UPDATES * tiny.UPDATE // 2,))
    kills, runs, differing, turn = collections.Counter(), 0, [], 0
    while sum(kills.values()) < args.kills:
        runs += 1
        names = [folder / f"{kind}{runs}" for kind in ("whole", "killed")]
        whole, killed = (tiny.arguments(data, name, seed=runs, **keys) for name in names)
        to_its_end(whole)
        ended = False
        while not ended and sum(kills.values()) < args.kills:
            phase = live(folder, killed, [None, "u", "e", "c", "s"][turn % 5], rng)
            turn, ended = turn + 1, phase is None
            if not ended:
                kills[phase] += 1
                left = [path.name for pattern in ("*.tmp", "ckpt.new.pt") for path in names[1].glob(pattern)]
                print(
                    f"kill {sum(kills.values())}: run {runs}, {phase}"
                    + (f"; it left {', '.join(left)}" if left else ""),
                    flush=True,
                )
        to_its_end(killed)
        try:
            tiny.assert_same_run(*map(tiny.result, names))
            print(f"run {runs}: equal to the uninterrupted one", flush=True)
        except AssertionError as error:
            differing.append(runs)
            print(f"run {runs}: DIFFERS from the uninterrupted one: {error}", flush=True)
    counted = ", ".join(f"{count} in {phase}" for phase, count in kills.most_common())
    lived = f"{sum(kills.values())} kills ({counted}) over {runs} runs of {UPDATES} updates"
    verdict = f"runs {differing} differ; kept in {folder}" if differing else "all bitwise equal to uninterrupted ones"
    print(f"soak: seed {args.seed}, {lived}, {time.monotonic() - start:.0f} s: {verdict}")
    if not differing:
        shutil.rmtree(folder)
    return bool(differing)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        sys.exit(main())
