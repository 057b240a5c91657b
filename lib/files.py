"""Files that appear whole or not at all, and folders that one process holds."""

import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path

from lib.errors import UserError, warn


@contextlib.contextmanager
def atomic_write(path, mode="wb"):
    """Open `path` for writing; it appears under its name only when complete: temporary name, fsync, rename.

    A failed or killed write leaves what stood there before. The temporary name is always NAME.tmp, so a folder has one
    writer at a time. Raises UserError where the disk refuses.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; files written earlier are intact") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(folder):
    """Make a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path, key):
    """Create the folder that the config key or flag `key` names. Raises UserError where that cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot create the folder {path}: {error.strerror}"
        raise UserError(f"{key}: {why}; name another with --{key}") from error


def lock_folder(folder, wait=False):
    """Lock `folder` until this process ends; returns the open lock file, to be kept.

    Where another process holds the folder: raises UserError, or with `wait` blocks until that process ends.
    """
    try:
        file = open(Path(folder) / ".lock", "a")
    except OSError as error:
        raise UserError(f"cannot write in {folder}: {error.strerror}; name another folder") from error
    busy = f"{folder} is in use by another process"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise UserError(f"{busy}; let it end (--wait does), or name another folder") from None
        warn(f"{busy}; waiting for it to end")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:  # some cluster file systems are mounted without locks
        warn(f"{folder} cannot be locked ({error.strerror}); make sure that no other process uses it")
    return file


def file_sha256(path):
    """sha256 of a file's bytes, in hex; the file is read in bounded chunks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path):
    """The JSON object in a file, as a dict. Raises UserError where the file is absent, damaged or holds no object."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        return value
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}; write it again, or take it from a copy") from error
