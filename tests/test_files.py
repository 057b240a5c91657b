"""lib/files.py: files that appear whole or not at all, and what is said where one cannot be written or read."""

import errno
import fcntl
import os

import pytest

from lib.errors import UserError
from lib.files import atomic_write, file_sha256, lock_folder, make_folder, read_json


@pytest.fixture
def path(tmp_path):
    """A file that stands, in a folder of its own."""
    with atomic_write(tmp_path / "file.json", "w") as file:
        file.write("old")
        assert not (tmp_path / "file.json").exists()  # nothing under the name before it is complete
    return tmp_path / "file.json"


def assert_nothing_else(path):
    assert [other.name for other in path.parent.iterdir()] == [path.name] and path.read_text() == "old"


def test_a_write_that_is_broken_off_leaves_what_stood_there(path):
    with pytest.raises(KeyboardInterrupt):
        with atomic_write(path, "w") as file:
            file.write("half of the n")
            raise KeyboardInterrupt
    assert_nothing_else(path)


def test_a_full_disk_is_named_and_leaves_what_stood_there(path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    why = r"file\.json: No space left on device; files written earlier are intact"
    with pytest.raises(UserError, match=f"^cannot write .*{why}$"):
        with atomic_write(path, "w") as file:
            file.write("new")
    assert_nothing_else(path)


def test_a_folder_that_cannot_be_made_or_written_is_named(path):
    with pytest.raises(
        UserError, match=r"^out_dir: cannot create the folder .*file\.json.*; name another with --out_dir$"
    ):
        make_folder(path / "inside", "out_dir")
    make_folder(path.parent, "out_dir")  # there already
    with pytest.raises(UserError, match="^cannot write in .*nowhere: No such file or directory; name another folder$"):
        lock_folder(path.parent / "nowhere")


def test_a_folder_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, capsys):
    def none_here(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none_here)
    lock_folder(tmp_path).close()
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path} cannot be locked (No locks available); make sure")


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_file_that_holds_no_json_object_is_named(content, tmp_path):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"^cannot read .*config\.json: .*; write it again, or take it from a copy$"):
        read_json(path)


def test_a_hash_is_of_the_whole_file(path):
    assert (
        file_sha256(path) == "cba06b5736faf67e54b07b561eae94395e774c517a7d910a54369e1263ccfbd4"
    )  # sha256sum's of "old"
