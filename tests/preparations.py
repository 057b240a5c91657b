"""Texts, files of them, preparations of them, and shards read back by the format's description alone."""

import hashlib
import json
import random
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ROOT

import prepare_data

SPLITS = ("train", "val", "test")
WORDS = "the a of to and in is that it was for on are as with his they at be this from I have or by one had not".split()
TRICKY = [
    "It's <|endoftext|> as text, <|fim_prefix|> too.",
    "naïve 日本語 \U0001f600 \u2003wide\u00a0spaces \x1c\x1d controls\r\n\r\n",
    "  leading and trailing  \n\n\n",
    "a",
    " ",
    "\n",
    "x" * 5000,
    "1234567890" * 50,
    "tabs\t\tand\n\n\n  def f():\n\treturn 'we'll'",
]


def some_documents(n, seed=0, words=60):
    rng = random.Random(seed)
    return [f"{i}: " + " ".join(rng.choices(WORDS, k=rng.randint(1, 2 * words))) + ".\n" for i in range(n)]


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"text": text, "id": str(i)}) + "\n" for i, text in enumerate(documents)))
    return path


def write_parquet(path, documents, **options):
    """A file with FineWeb-Edu's columns."""
    n = len(documents)
    columns = {
        "text": documents,
        "id": [f"<urn:{i}>" for i in range(n)],
        "dump": ["CC-MAIN-2013-20"] * n,
        "url": ["http://a.b"] * n,
        "file_path": ["s3://c"] * n,
        "language": ["en"] * n,
        "language_score": [0.9] * n,
        "token_count": list(range(n)),
        "score": [2.7] * n,
        "int_score": [3] * n,
    }
    pq.write_table(pa.table(columns), path, **options)
    return path


def arguments(out, *sources, **flags):
    """prepare_data.py's arguments; three tenths of the documents go to val and test each unless told otherwise."""
    flags = {"tokenizer": "bytes", "val_frac": 0.3, "test_frac": 0.3, "threads": 2} | flags
    words = [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return ["--source", *map(str, sources), "--out", str(out), *words]


def command(out, *sources, **flags):
    return [sys.executable, str(ROOT / "prepare_data.py"), *arguments(out, *sources, **flags)]


def prepare(out, *sources, **flags):
    """Run it in this process and return the manifest."""
    prepare_data.main(arguments(out, *sources, **flags))
    return json.loads((out / "manifest.json").read_text())


class Killed(BaseException):
    """Stands in for a kill: no `except Exception` holds it."""


def cut_off(patch, name, nth, done=False):
    """Replace prepare_data's function `name`: its nth call raises Killed, in its place or, if `done`, after it."""
    calls, original = [], getattr(prepare_data, name)

    def replacement(*about):
        calls.append(about)
        if len(calls) < nth or done:
            result = original(*about)
        if len(calls) == nth:
            raise Killed
        return result

    patch.setattr(prepare_data, name, replacement)


def prepare_until(nth, *about, name="publish", done=False, **flags):
    """Prepare, but stop as a kill would at the nth call of `name`: where the nth full shard is to get its name."""
    with pytest.MonkeyPatch.context() as patch:
        cut_off(patch, name, nth, done)
        with pytest.raises(Killed):
            prepare(*about, **flags)


def read_shard(path):
    """The tokens of a shard."""
    raw = path.read_bytes()
    header = np.frombuffer(raw[:1024], dtype="<i4")
    assert list(header[:2]) == [20240520, 1] and not header[3:].any()
    tokens = np.frombuffer(raw[1024:], dtype="<u2")
    assert len(tokens) == header[2]
    return tokens.tolist()


def read_split(out, split):
    return [token for path in sorted(out.glob(f"{split}_*.bin")) for token in read_shard(path)]


def read_documents(out, split):
    """The texts of a split, of shards in bytes."""
    data = bytes(0xFF if token == 256 else token for token in read_split(out, split))  # 0xff is in no UTF-8
    return [document.decode() for document in data.split(b"\xff")[1:]]


def expected_split(text, val_frac=0.3, test_frac=0.3):
    u = int(hashlib.sha256(text.encode("utf-8")).hexdigest()[:16], 16) / 16**16
    return "test" if u < test_frac else "val" if u < test_frac + val_frac else "train"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
