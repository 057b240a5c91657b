"""lib/shard_writer.py: full shards, resumed shards, names."""

import hashlib

import numpy as np
import pytest
from preparations import contents, read_shard, read_split

from lib.errors import UserError
from lib.shard_writer import ShardWriter, publish


def write(writer, start, stop, step):
    """Write the tokens start ... stop - 1, `step` at a time."""
    for first in range(start, stop, step):
        writer.write(np.arange(first, min(first + step, stop), dtype="<u2"))


@pytest.mark.parametrize("step", [1, 3, 10, 25, 33])
def test_shards_are_full_and_join_to_what_was_written(tmp_path, step):
    """33 tokens make three shards of 10 and one of 3, however the tokens come."""
    writer = ShardWriter(tmp_path, "val", 10, {}, 0)
    write(writer, 0, 33, step)
    assert (writer.tokens, len(writer.files)) == (3, 3)
    writer.finish()
    writer.finish()  # there is no growing shard any more
    publish(tmp_path, writer.files)
    names = [f"val_00000{i}.bin" for i in range(4)]
    assert sorted(contents(tmp_path)) == names == list(writer.files)
    assert [len(read_shard(tmp_path / name)) for name in names] == [10, 10, 10, 3]
    assert read_split(tmp_path, "val") == list(range(33))
    for name, about in writer.files.items():
        digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        assert about == {"tokens": len(read_shard(tmp_path / name)), "sha256": digest}


def test_nothing_written_leaves_no_file(tmp_path):
    writer = ShardWriter(tmp_path, "test", 10, {}, 0)
    writer.write(np.array([], dtype="<u2"))
    writer.sync()
    writer.finish()
    assert contents(tmp_path) == {} and writer.files == {}


def test_a_shard_that_grew_past_its_record_is_cut_back(tmp_path):
    first = ShardWriter(tmp_path, "train", 10, {}, 0)
    write(first, 0, 19, 19)
    first.sync()
    second = ShardWriter(tmp_path, "train", 10, first.files, 4)  # nine tokens are on disk, four were recorded
    write(second, 14, 25, 5)
    second.finish()
    publish(tmp_path, second.files)
    assert read_split(tmp_path, "train") == list(range(25))


def test_a_shard_shorter_than_its_record_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"val_000000.bin.part is not what progress.json says.*delete "):
        ShardWriter(tmp_path, "val", 10, {}, 4)
    writer = ShardWriter(tmp_path, "val", 10, {}, 0)
    write(writer, 0, 3, 3)
    writer.sync()
    with pytest.raises(UserError, match=r"val_000000.bin.part is not what progress.json says.*delete "):
        ShardWriter(tmp_path, "val", 10, {}, 4)


def test_publishing_goes_on_where_a_kill_came_between(tmp_path):
    writer = ShardWriter(tmp_path, "val", 2, {}, 0)
    write(writer, 0, 6, 6)
    (tmp_path / "val_000000.bin.part").rename(tmp_path / "val_000000.bin")
    for _ in range(2):
        publish(tmp_path, writer.files)
        assert read_split(tmp_path, "val") == list(range(6)) and not list(tmp_path.glob("*.part"))
