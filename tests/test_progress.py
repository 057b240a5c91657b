"""lib/progress.py: a folder that is whole, begun, damaged or another preparation's."""

import json

import pytest
from preparations import contents, prepare, prepare_until, some_documents, write_jsonl

import prepare_data
from lib.errors import UserError
from lib.progress import load_progress, sound


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", some_documents(50))


EDITS = {
    "nothing": lambda p: p.clear(),
    "request": lambda p: p.update(request=5),
    "no splits": lambda p: p.pop("splits"),
    "list of files": lambda p: p.update(files=[]),
    "documents": lambda p: p.update(documents="x"),
    "negative": lambda p: p.update(empty_documents=-1),
    "hash": lambda p: p.update(corpus_sha256=None),
    "growing": lambda p: p["splits"]["train"].update(growing="a"),
    "split": lambda p: p["splits"].update(val=3),
    "file": lambda p: p["files"].update(a=1),
    "no position": lambda p: p.pop("position"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_progress_file_is_refused_in_one_line(tmp_path, edit):
    request = {"max_tokens": None}
    progress = load_progress(tmp_path, request)
    progress["files"]["train_000000.bin"] = {"tokens": 3, "sha256": "ab"}
    (tmp_path / "progress.json").write_text(json.dumps(progress))
    assert load_progress(tmp_path, request) == progress
    EDITS[edit](progress)
    (tmp_path / "progress.json").write_text(json.dumps(progress))
    with pytest.raises(UserError, match="progress.json: prepare_data.py did not write it so; delete .* prepare again"):
        load_progress(tmp_path, request)


def test_what_was_begun_with_other_text_or_arguments_is_refused(tmp_path, monkeypatch):
    documents = some_documents(100)
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    monkeypatch.setattr(prepare_data, "BATCH", 1000)
    prepare_until(1, tmp_path / "out", source, shard_tokens=2000)
    progress = (tmp_path / "out/progress.json").read_bytes()
    assert sound(json.loads(progress))
    with pytest.raises(UserError, match="another val_frac"):
        prepare(tmp_path / "out", source, shard_tokens=2000, val_frac=0.1)
    write_jsonl(source, [documents[0].replace("0", "1"), *documents[1:]])  # as long as before
    with pytest.raises(UserError, match="begun with other text"):
        prepare(tmp_path / "out", source, shard_tokens=2000)
    assert (tmp_path / "out/progress.json").read_bytes() == progress
    assert not (tmp_path / "out/manifest.json").exists()
    write_jsonl(source, documents)
    prepare(tmp_path / "out", source, shard_tokens=2000)
    prepare(tmp_path / "whole", source, shard_tokens=2000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_finished_but_damaged_since_is_said(tmp_path, source):
    prepare(tmp_path / "out", source)
    shard = tmp_path / "out" / "train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(UserError, match="train_000000.bin: the header says"):
        prepare(tmp_path / "out", source)
    shard.unlink()
    with pytest.raises(UserError, match="train_000000.bin is missing .*; delete the folder"):
        prepare(tmp_path / "out", source)


def test_finished_is_left_alone(tmp_path, source, capsys):
    prepare(tmp_path / "out", source)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    prepare(tmp_path / "out", source, threads=1)
    assert "already prepared" in capsys.readouterr().out
    for key, value in {"tokenizer": "gpt2", "test_frac": 0.2, "max_tokens": 10, "shard_tokens": 10}.items():
        with pytest.raises(UserError, match=f"prepared with another {key}; name another folder"):
            prepare(tmp_path / "out", source, **{key: value})
    other = write_jsonl(tmp_path / "b.jsonl", some_documents(50))
    with pytest.raises(UserError, match="another source"):
        prepare(tmp_path / "out", other)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_shards_from_elsewhere_are_left_alone(tmp_path, source):
    prepare(tmp_path / "out", source)
    (tmp_path / "out/manifest.json").unlink()
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match="shards from elsewhere"):
        prepare(tmp_path / "out", source)
    assert contents(tmp_path / "out") == before
