"""train.py under observation: `observe.py SPEC.json --key=value ...` runs it as a script, under torchrun too.

SPEC.json is an object; a MOMENT is {"rank", "read"}: a rank's nth read of training data.

    log           PREFIX: to PREFIX + RANK go .pid at the start, and .json at the end: the reads, the number of reads
                  before each meeting of gradients, the names written below `out`, and the exit status
    out           the run's folder
    sigterm       MOMENT at which the rank sends itself SIGTERM
    sigterm_all   MOMENT at which the rank sends torchrun SIGTERM, and waits until that has come back to it
    sigkill       MOMENT at which the rank kills itself
    sigkill_at    NAME: the process kills itself where it would rename a file to NAME
"""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tiny_runs import ROOT, reading  # noqa: E402


def main():
    spec, rank = json.loads(Path(sys.argv[1]).read_text()), int(os.environ.get("RANK", 0))
    log, received = {"synced_after_reads": [], "written": []}, []
    handle, rename = signal.signal, os.replace
    Path(f"{spec['log']}{rank}.pid").write_text(str(os.getpid()))

    def watched_signal(number, handler):
        def noting(*arguments):
            received.append(number)
            handler(*arguments)

        return handle(number, noting if callable(handler) else handler)

    def watched_rename(source, target):
        if Path(target).name == spec.get("sigkill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    def audit(event, arguments):
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event in ("os.rename", "os.remove", "os.mkdir"):
            for path in arguments[:2]:
                if isinstance(path, (str, os.PathLike)) and "out" in spec and str(path).startswith(spec["out"]):
                    log["written"].append(Path(path).name)

    def before(split, read):
        here = {"rank": rank, "read": read} if split == "train" else None
        if here == spec.get("sigterm", 0):
            os.kill(os.getpid(), signal.SIGTERM)
        if here == spec.get("sigkill", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if here == spec.get("sigterm_all", 0):
            os.kill(os.getppid(), signal.SIGTERM)
            deadline = time.monotonic() + 60
            while not received and time.monotonic() < deadline:
                time.sleep(0.01)

    class Watched(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, self.hook)

        @staticmethod
        def hook(group, bucket):
            if bucket.is_last():
                log["synced_after_reads"].append(sum(split == "train" for split, _ in log["reads"]))
            return allreduce_hook(group, bucket)

    signal.signal, os.replace, torch.nn.parallel.DistributedDataParallel = watched_signal, watched_rename, Watched
    sys.addaudithook(audit)
    sys.argv = ["train.py", *sys.argv[2:]]
    with reading(before) as log["reads"]:
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as exit:
            log["status"] = exit.code
            raise
        finally:
            Path(f"{spec['log']}{rank}.json").write_text(json.dumps(log))


if __name__ == "__main__":
    main()
