"""lib/shards.py: headers, checks of a folder, windows, and the order of the data.

The shards are written by helpers.py, from the format's description alone.
"""

import hashlib
import json

import numpy as np
import pytest
import torch
from helpers import write_folder, write_shard

from lib.errors import UserError
from lib.shards import Windows, batch_windows, check_data, epoch_order, find_shards, read_shard_header, shard_header


@pytest.fixture
def folder(tmp_path):
    """train: 10 and 7 windows of 4, with tails; val: 3 windows; test: 2."""
    tokens = [n % 251 for n in range(43 + 29 + 15 + 9)]
    cut = {"train_000000": tokens[:43], "train_000001": tokens[43:72], "val_000000": tokens[72:87]}
    return write_folder(tmp_path / "data", **cut, test_000000=tokens[87:])


# ---- a folder and its checks ----


def test_a_shards_header_makes_the_round_trip(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(shard_header(3) + np.array([5, 6, 65535], dtype="<u2").tobytes())
    assert read_shard_header(path) == 3
    assert path.read_bytes() == write_shard(tmp_path / "other.bin", [5, 6, 65535]).read_bytes()
    assert read_shard_header(write_shard(tmp_path / "empty.bin", [])) == 0


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda path: write_shard(path, [1, 2, 3], magic=20240521), "not a token shard .*magic 20240521"),
        (lambda path: write_shard(path, [1, 2, 3], version=2), "not a token shard .*version 2"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "says 3 tokens, so 1030 bytes, but the file has 1029"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "says 3 tokens, so 1030 bytes, .* has 1031"),
        (lambda path: write_shard(path, [1, 2, 3], count=4), "says 4 tokens, so 1032 bytes, but the file has 1030"),
        (lambda path: write_shard(path, [1, 2, 3], count=2), "says 2 tokens, so 1028 bytes, but the file has 1030"),
        (lambda path: write_shard(path, [], count=-1), "header says -1 tokens"),
        (lambda path: path.write_bytes(b""), "0 bytes is too short"),
        (lambda path: path.write_bytes(path.read_bytes()[:1023]), "1023 bytes is too short"),
        (lambda path: path.unlink() or path.mkdir(), "cannot be read|too short"),
    ],
)
def test_a_damaged_shard_is_found_before_the_run_and_named(damage, message, folder):
    write_shard(folder / "train_000000.bin", [1, 2, 3])
    damage(folder / "train_000000.bin")
    with pytest.raises(UserError, match=rf"train_000000\.bin: .*({message})"):
        check_data(folder)


def test_a_folder_that_is_missing_or_has_no_train_or_val_shard_is_named(tmp_path, folder):
    with pytest.raises(UserError, match=r"data_dir: is empty; name a folder"):
        check_data("")
    with pytest.raises(UserError, match=r"data_dir: .*nowhere is not a folder; write one with"):
        check_data(tmp_path / "nowhere")
    for split in ("train", "val"):
        bare = write_folder(
            tmp_path / split, manifest=False, **{f"{'val' if split == 'train' else 'train'}_0": [1, 2, 3]}
        )
        with pytest.raises(UserError, match=rf"{split}: has no \*{split}\*\.bin shard"):
            check_data(bare)


def test_shards_are_found_by_their_split_in_the_order_of_their_names(tmp_path):
    write_folder(
        tmp_path, manifest=False, fineweb_val_000000=[1], fineweb_train_000002=[1], fineweb_train_000001=[1], other=[1]
    )
    names = {split: [path.name for path in paths] for split, paths in find_shards(tmp_path).items()}
    assert names == {
        "train": ["fineweb_train_000001.bin", "fineweb_train_000002.bin"],
        "val": ["fineweb_val_000000.bin"],
        "test": [],
    }


@pytest.mark.parametrize("name", ["train_val_000000", "my_test_of_train", "valtest"])
def test_a_name_that_fits_two_splits_is_refused(name, folder):
    write_shard(folder / f"{name}.bin", [1])
    with pytest.raises(UserError, match=rf"{name}\.bin: its name fits the splits \w+ and \w+; rename it"):
        check_data(folder)


def test_a_folder_that_differs_from_its_manifest_is_refused(folder):
    manifest, data_id = check_data(folder)
    assert manifest == json.loads((folder / "manifest.json").read_text())
    assert data_id == hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()

    whole = (folder / "train_000001.bin").read_bytes()
    (folder / "train_000001.bin").unlink()
    with pytest.raises(UserError, match=r"train_000001\.bin is missing but has 29 in the manifest"):
        check_data(folder)
    write_shard(folder / "train_000001.bin", [1, 2])
    with pytest.raises(UserError, match=r"train_000001\.bin has 2 tokens but has 29 in the manifest"):
        check_data(folder)
    (folder / "train_000001.bin").write_bytes(whole)
    write_shard(folder / "train_000002.bin", [1, 2])
    with pytest.raises(UserError, match=r"train_000002\.bin has 2 tokens but is not in the manifest"):
        check_data(folder)
    (folder / "train_000002.bin").unlink()
    assert check_data(folder)[1] == data_id


def test_verify_finds_altered_content_that_counts_cannot_show(folder):
    check_data(folder, verify=True)
    path = folder / "train_000001.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\7\0")
    check_data(folder)
    with pytest.raises(UserError, match=r"train_000001\.bin differs from its sha256 in the manifest"):
        check_data(folder, verify=True)


@pytest.mark.parametrize("name", ["tokenizer", "vocab_size", "files"])
def test_a_manifest_without_what_a_run_needs_is_named(name, folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest[name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=rf"manifest\.json: has no '{name}'"):
        check_data(folder)
    for content in ("{", "[]", "\xff"):
        (folder / "manifest.json").write_text(content, encoding="latin-1")
        with pytest.raises(UserError, match=r"cannot read .*manifest\.json"):
            check_data(folder)


@pytest.mark.parametrize("change, message", [
    (dict(vocab_size="257"), "'vocab_size' is '257', not of type int"),
    (dict(files=[]), r"'files' is \[\], not of type dict"),
    (dict(files={"train_000000.bin": 43}), r"train_000000\.bin has no tokens or sha256"),
    (dict(files={"train_000000.bin": {"tokens": 43}}), r"train_000000\.bin has no tokens or sha256"),
])  # fmt: skip
def test_a_manifest_that_was_written_otherwise_is_named(change, message, folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(UserError, match=rf"manifest\.json: {message}; prepare the data again"):
        check_data(folder)


def test_without_a_manifest_data_are_known_by_names_sizes_and_ends(folder, tmp_path):
    """The same shards in another folder are the same data. Another name, length, first or last token: other data."""
    (folder / "manifest.json").unlink()
    manifest, data_id = check_data(folder)
    assert manifest is None
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.glob("*.bin"):
        (copy / path.name).write_bytes(path.read_bytes())
    assert check_data(copy) == (None, data_id)
    path, whole = copy / "train_000001.bin", (copy / "train_000001.bin").read_bytes()
    seen = {data_id}
    for content in (whole[:1024] + b"\7\0" + whole[1026:], whole[:-2] + b"\7\0", shard_header(28) + whole[1024:-2]):
        path.write_bytes(content)
        seen.add(check_data(copy)[1])
    path.write_bytes(whole)
    path.rename(copy / "train_000003.bin")
    seen.add(check_data(copy)[1])
    assert len(seen) == 5
    big = write_folder(tmp_path / "big", manifest=False, train_0=[1] * 100_000, val_0=[1])
    before = check_data(big)[1]
    write_shard(big / "train_0.bin", [1] * 99_999 + [2])
    assert check_data(big)[1] != before


# ---- windows ----


def naive_windows(folder, split, context):
    """Cut each shard into context + 1 tokens, every `context` tokens, as long as they are whole."""
    windows = []
    for path in sorted(folder.glob(f"{split}*.bin")):
        tokens = list(memoryview(path.read_bytes()[1024:]).cast("H"))
        while len(tokens) > context:
            windows.append(tokens[: context + 1])
            tokens = tokens[context:]
    return windows


@pytest.mark.parametrize(
    "split, context, count",
    [("train", 4, 10 + 7), ("val", 4, 3), ("test", 4, 2), ("train", 7, 6 + 4), ("train", 30, 1), ("train", 42, 1)],
)
def test_read_gives_the_naive_slices_of_every_shard(split, context, count, folder):
    windows = Windows(folder, split, context, 257)
    expected = naive_windows(folder, split, context)
    assert len(windows) == len(expected) == count
    rows = windows.read(np.arange(count))
    assert rows.dtype == np.int64 and rows.tolist() == expected
    order = [*range(count)][::-1] + [0, 0]
    assert windows.read(order).tolist() == [expected[i] for i in order]


def test_each_token_but_a_shards_first_and_tail_is_predicted_once(folder):
    write_shard(folder / "train_000000.bin", range(43))  # 10 windows of 4: targets 1 .. 40, and 41, 42 are the tail
    write_shard(folder / "train_000001.bin", range(100, 129))  # 7 windows: targets 101 .. 128, no tail
    windows = Windows(folder, "train", 4, 257)
    targets = windows.read(np.arange(len(windows)))[:, 1:].flatten().tolist()
    assert sorted(targets) == [*range(1, 41), *range(101, 129)]


def test_shards_shorter_than_a_window_are_passed_over_and_none_longer_is_an_error(folder):
    write_shard(folder / "train_000000.bin", range(5))  # one window of 4
    write_shard(folder / "train_000001.bin", range(4))  # none
    write_shard(folder / "train_000002.bin", [])
    write_shard(folder / "train_000003.bin", range(50, 60))  # two
    windows = Windows(folder, "train", 4, 257)
    assert windows.read([0, 1, 2]).tolist() == [[0, 1, 2, 3, 4], [50, 51, 52, 53, 54], [54, 55, 56, 57, 58]]
    assert len(windows) == 3
    assert len(Windows(folder, "val", 14, 257)) == 1  # 15 tokens
    with pytest.raises(UserError, match=r"no val shard is longer than the context of 15 tokens; .*lower --context"):
        Windows(folder, "val", 15, 257)


def test_a_token_beyond_the_vocabulary_names_file_and_place(folder):
    write_shard(folder / "train_000001.bin", [1] * 13 + [99] + [1] * 15)
    windows = Windows(folder, "train", 4, 99)
    rows = [i for i in range(10, 17) if i != 13]
    write = windows.read(rows)  # without the window that holds it
    assert write.max() == 1
    with pytest.raises(
        UserError, match=r"train_000001\.bin: token 13 is 99, beyond the vocabulary of 99; set --vocab_size"
    ):
        windows.read([10, 13])
    assert Windows(folder, "train", 4, 100).read([13]).max() == 99


def test_spread_windows_are_fixed_evenly_spaced_and_distinct(folder):
    windows = Windows(folder, "train", 4, 257)  # 17
    assert windows.spread(20).tolist() == windows.spread(23).tolist() == [0, 3, 6, 10, 13]
    for tokens in range(1, 80):
        ids = windows.spread(tokens)
        assert len(ids) == min(17, max(1, tokens // 4)) and ids[0] == 0 and ids[-1] < 17
        gaps = np.diff([*ids, 17])
        assert gaps.min() > 0 and gaps.max() - gaps.min() <= 1
    assert windows.spread(10**9).tolist() == list(range(17))


# ---- the order of the data ----


@pytest.mark.parametrize("batch", [1, 4, 5, 17, 30])
def test_every_window_is_read_once_an_epoch_and_batches_run_across_epochs(batch):
    """Also where a batch is longer than the data: 30 of 17."""
    stream = np.concatenate([batch_windows(3, step, batch, 17) for step in range(-(-17 * 4 // batch))])[: 17 * 4]
    epochs = [stream[i * 17 : (i + 1) * 17].tolist() for i in range(4)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4  # shuffled anew
    assert epochs == [
        np.random.RandomState([3, epoch]).permutation(17).tolist() for epoch in range(4)
    ]  # NEP 19: frozen


def test_the_order_is_a_pure_function_of_seed_and_epoch():
    """Whatever was asked before, in whatever order."""
    first = [batch_windows(1, step, 4, 17).tolist() for step in range(20)]
    epoch_order.cache_clear()
    assert [batch_windows(1, step, 4, 17).tolist() for step in reversed(range(20))] == first[::-1]
    assert [batch_windows(2, step, 4, 17).tolist() for step in range(20)] != first
    assert (
        np.concatenate(first).tolist() == np.concatenate([batch_windows(1, step, 8, 17) for step in range(10)]).tolist()
    )


def test_the_order_neither_reads_nor_moves_a_global_generator():
    np.random.seed(5)
    torch.manual_seed(5)
    before = np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state()
    ids = [batch_windows(1, step, 4, 17).tolist() for step in range(20)]
    assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == before[:2] and torch.equal(
        torch.get_rng_state(), before[2]
    )
    np.random.seed(6)
    torch.manual_seed(6)
    epoch_order.cache_clear()
    assert [batch_windows(1, step, 4, 17).tolist() for step in range(20)] == ids
