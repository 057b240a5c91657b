"""lib/run_folder.py: what a run leaves in its folder, and what a later one finds there."""

import os
from pathlib import Path

import pytest
import torch

from lib.errors import UserError
from lib.run_folder import load_checkpoint, read_metrics, save_checkpoint


def test_a_name_appears_only_when_its_content_is_on_disk(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync") or fsync(descriptor))
    monkeypatch.setattr(os, "replace", lambda old, new: calls.append(Path(new).name) or replace(old, new))
    save_checkpoint(tmp_path / "ckpt.pt", {"step": 1})
    assert calls == ["fsync", "ckpt.new.pt", "fsync", "ckpt.pt", "fsync"]  # the file, and the folder after each rename


def test_a_full_disk_at_a_checkpoint_is_one_line_and_keeps_the_earlier_one(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "ckpt.pt", {"step": 1})

    def full(state, file):
        file.write(b"PK")
        raise RuntimeError("[enforce fail at inline_container.cc] unexpected pos\nand more")

    monkeypatch.setattr(torch, "save", full)
    why = r"\[enforce fail at inline_container\.cc\] unexpected pos; earlier checkpoints are intact"
    with pytest.raises(UserError, match=rf"^cannot write .*ckpt\.pt: {why}$"):
        save_checkpoint(tmp_path / "ckpt.pt", {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.pt"] and load_checkpoint(tmp_path)["step"] == 1


def test_the_checkpoint_before_stays_beside_the_newest(tmp_path):
    assert load_checkpoint(tmp_path) is None
    for step in (1, 2, 3):
        save_checkpoint(tmp_path / "ckpt.pt", {"step": step})
    steps = {path.name: torch.load(path, weights_only=True)["step"] for path in tmp_path.iterdir()}
    assert steps == {"ckpt.pt": 3, "ckpt.prev.pt": 2}
    (tmp_path / "ckpt.pt").rename(tmp_path / "ckpt.new.pt")  # killed between the two renames
    assert load_checkpoint(tmp_path)["step"] == 2
    (tmp_path / "ckpt.prev.pt").write_bytes(b"")
    assert load_checkpoint(tmp_path)["step"] == 3


def test_a_checkpoint_of_another_format_is_refused_by_name(tmp_path):
    torch.save({"format": 0, "step": 1}, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=r"ckpt\.pt: checkpoint format 0, this code reads 1"):
        load_checkpoint(tmp_path)


def test_a_metrics_line_that_a_kill_cut_short_is_left_out(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n7\n\x00\xff\n{}\n')  # what a power cut may leave
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]
