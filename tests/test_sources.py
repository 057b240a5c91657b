"""lib/sources.py: what each source gives, and what it says to bad input."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ROOT
from preparations import (
    SPLITS,
    TRICKY,
    WORDS,
    contents,
    prepare,
    prepare_until,
    read_documents,
    read_split,
    some_documents,
    write_jsonl,
    write_parquet,
)

import prepare_data
from lib import sources
from lib.errors import UserError


def texts(*names):
    return [text for text, _ in sources.open_source([str(name) for name in names], 1).documents(None)]


# ---- docs ------------------------------------------------------------------------------------------------------------


def test_docstrings_in_order_from_everywhere(tmp_path):
    (tmp_path / "m.py").write_text(
        '"""module"""\n'
        'if x:\n    def f():\n        "f \\ud800"\n        class A:\n            """A\n            two"""\n'
        'try:\n    pass\nexcept E:\n    async def g():\n        """g"""\nelse:\n    x = "no docstring"\n'
        'def h(): return "neither"\n'
    )
    assert sources.docstrings(tmp_path / "m.py") == ["module", "f \ud800", "A\ntwo", "g"]
    (tmp_path / "bad.py").write_text("print 'python 2'")
    assert sources.docstrings(tmp_path / "bad.py") == []


@pytest.mark.slow
def test_docs_reads_the_installed_files_once_without_tests():
    files = sources.Docs(1).files()
    assert len(files) > 1000 and len(set(files)) == len(files)
    assert not [path for path in files if "/tests/" in path or "/test/" in path]
    assert [path for path in files if path.endswith("/argparse.py")]
    assert [path for path in files if path.endswith("/torch/nn/functional.py")]


@pytest.mark.slow
def test_docs_from_files_to_shards(tmp_path, monkeypatch):
    """Two modules stand in for the long list: duplicates once, the same whatever the number of processes."""
    slow = "x = [1, 2, 3]\n" * 1000  # so that the later file is done first where two processes work
    (tmp_path / "x.py").write_text(
        '"""Once."""\ndef f():\n    """Twice."""\ndef g():\n    """Twice."""\n' + slow,
    )
    (tmp_path / "y.py").write_text('"""Twice."""\ndef f():\n    """Thrice."""\n')
    names = [str(tmp_path / "x.py")] * 16 + [str(tmp_path / "y.py")]
    monkeypatch.setattr(sources.Docs, "files", lambda self: names)
    assert list(sources.Docs(1).documents(None)) == [("Once.", None), ("Twice.", None), ("Thrice.", None)]
    manifest = prepare(tmp_path / "out", "docs", threads=2, val_frac=0, test_frac=0)
    assert read_documents(tmp_path / "out", "train") == ["Once.", "Twice.", "Thrice."]
    assert manifest["source"]["kind"] == "docs" and manifest["source"]["versions"]["numpy"] == np.__version__


def test_docs_says_which_distributions_differ(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "DISTRIBUTIONS", {"numpy": "0.1", "no-such-thing": "1.0"})
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))  # an empty standard library
    source = sources.Docs(1)
    said = capsys.readouterr().err
    assert "numpy 0.1, installed is " + np.__version__ in said and "no-such-thing 1.0 is not installed" in said
    assert source.versions["no-such-thing"] is None
    assert source.files() and all("numpy" in path for path in source.files())


def test_docs_reads_what_the_requirements_pin():
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    pinned = dict(line.split("==") for line in lines if "==" in line)
    assert sources.DISTRIBUTIONS.items() <= pinned.items()


# ---- local files -----------------------------------------------------------------------------------------------------


def test_files_one_after_another(tmp_path):
    """Every text of every file, in order, duplicates too, blank lines skipped; rows in groups of any size."""
    first, more = TRICKY + [""], some_documents(50)
    jsonl = write_jsonl(tmp_path / "a.jsonl", first)
    jsonl.write_text("\ufeff\n" + jsonl.read_text() + " \n" + '{"text": "a\\ud800b"}')
    parquet = write_parquet(tmp_path / "b.parquet", more + first, row_group_size=7)
    assert texts(parquet, jsonl, parquet) == more + first + first + ["a\ud800b"] + more + first


def test_a_text_file_is_cut_at_blank_lines(tmp_path):
    """Documents of 2 kB to 1 MB, also where one paragraph is longer. Nothing but newlines at their ends is lost."""
    rng = random.Random(3)
    paragraphs = [" ".join(rng.choices(WORDS, k=rng.randint(5, 700))) + "\nand é" for _ in range(300)]
    paragraphs.insert(200, "日本 " * 400_000)  # 2.8 MB in one line
    whole = "\ufeff" + "".join(text + rng.choice(["\n\n", "\n \n\n"]) for text in paragraphs)
    (tmp_path / "a.txt").write_text(whole)
    documents = texts(tmp_path / "a.txt")
    sizes = [len(text.encode()) for text in documents]
    assert len(documents) > 50 and min(sizes[:-1]) >= 1990 and 900_000 < max(sizes) <= 1_000_000
    assert "".join("".join(documents).split()) == "".join("".join(paragraphs).split())
    starts = {paragraph.split("\n")[0] for paragraph in paragraphs}
    assert sum(text.split("\n")[0] in starts for text in documents) >= len(documents) - 3


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)


BAD_UTF8 = pa.array([b"a", b"b", b"\xff", b"c"], pa.binary()).view(pa.string())
BAD = {  # name of the source: (its content, or what makes it; what the message must say)
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
    "columns.parquet": (
        lambda path: parquet(path, content=["a"], id=[1]),
        r"columns.parquet: has no column `text`, only content, id",
    ),
    "numbers.parquet": (
        lambda path: parquet(path, text=[1, 2]),
        r"numbers.parquet: row 1: text is of type int, not a string",
    ),
    "null.parquet": (
        lambda path: parquet(path, text=["a", None]),
        r"null.parquet: row 2: text is of type NoneType",
    ),
    "utf8.parquet": (lambda path: parquet(path, text=BAD_UTF8), r"utf8.parquet: row 3: not UTF-8"),
    "not.parquet": (b"PAR1 or not PAR1", r"not.parquet: not a readable parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_in_one_line(tmp_path, name):
    content, message = BAD[name]
    if callable(content):
        content(tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    good = write_jsonl(tmp_path / "good.jsonl", some_documents(5))
    with pytest.raises(UserError, match=message) as error:
        texts(good, tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_file_without_rows_has_no_documents(tmp_path):
    parquet(tmp_path / "norows.parquet", text=pa.array([], pa.string()))
    assert texts(tmp_path / "norows.parquet") == []


def test_damage_inside_a_parquet_file(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", some_documents(2000), row_group_size=100)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 5000] = bytes(5000)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a.parquet: (cannot be read after row \d+|row \d+: not UTF-8)"):
        texts(path)


def test_docs_and_fineweb_stand_alone(tmp_path):
    good = write_jsonl(tmp_path / "good.jsonl", ["x"])
    for name in ("docs", "fineweb-edu"):
        with pytest.raises(UserError, match="docs and fineweb-edu stand alone"):
            texts(good, name)


# ---- FineWeb-Edu -----------------------------------------------------------------------------------------------------

CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """A folder laid out as the dataset's repository is, which `datasets` takes in the hub's place.

    Returns (folder of the sample's files, documents).
    """
    huggingface_hub = pytest.importorskip("huggingface_hub")
    documents, folder = some_documents(300), tmp_path / "hub"
    (folder / "sample/10BT").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "README.md").write_text(CARD)
    write_parquet(folder / "data/0.parquet", ["another configuration"] * 50)
    for i in range(3):
        part = documents[100 * i : 100 * (i + 1)]
        write_parquet(folder / f"sample/10BT/00{i}_00000.parquet", part, row_group_size=7)
    monkeypatch.setattr(sources, "FINEWEB", str(folder))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: type("Info", (), {"sha": "abc123"}))
    return folder / "sample/10BT", documents


def test_fineweb_streams_to_what_its_files_give(tmp_path, local_hub):
    folder, _ = local_hub
    manifest = prepare(tmp_path / "streamed", "fineweb-edu")
    prepare(tmp_path / "local", *sorted(folder.glob("*.parquet")))
    for split in SPLITS:
        assert read_split(tmp_path / "streamed", split) == read_split(tmp_path / "local", split)
    assert manifest["source_revision"] == "abc123"
    about = {"kind": "fineweb-edu", "dataset": "HuggingFaceFW/fineweb-edu", "config": "sample-10BT"}
    assert manifest["source"] == about


def test_fineweb_goes_on_behind_any_position(local_hub):
    documents = local_hub[1]
    streamed = list(sources.FineWebEdu().documents(None))
    assert [text for text, _ in streamed] == documents
    for last in (0, 6, 98, 99, 100, 250, 299):
        rest = list(sources.FineWebEdu().documents(streamed[last][1]))
        assert rest == streamed[last + 1 :]


@pytest.mark.parametrize("nth, max_tokens", [(3, 10**6), (4, 10**6), (3, 90_000)])
def test_a_killed_stream_seeks(tmp_path, local_hub, monkeypatch, nth, max_tokens):
    """It goes on behind what it has read: the first file may have become unreadable by then."""
    folder, _ = local_hub
    monkeypatch.setattr(prepare_data, "BATCH", 700)
    flags = {"shard_tokens": 20_000, "max_tokens": max_tokens}
    prepare(tmp_path / "whole", "fineweb-edu", **flags)
    prepare_until(nth, tmp_path / "cut", "fineweb-edu", **flags)
    (folder / "000_00000.parquet").write_bytes(b"no longer there")
    prepare(tmp_path / "cut", "fineweb-edu", **flags)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_without_the_hub_it_says_how_to_bring_files(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_, **__):
        raise ConnectionError("name resolution failed\nand more lines")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(UserError, match=r"name resolution failed\); .*--source FILE.parquet") as error:
        prepare(tmp_path / "out", "fineweb-edu")
    assert "\n" not in str(error.value) and contents(tmp_path / "out") == {}
