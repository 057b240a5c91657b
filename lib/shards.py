"""Token shards in llm.c's format, the windows that training reads from them, and their order."""

import functools
import hashlib
import os
from pathlib import Path

import numpy as np

from lib.errors import UserError
from lib.files import file_sha256, read_json


SHARD_MAGIC = 20240520
SHARD_VERSION = 1
HEADER_INTS = 256  # int32
SPLITS = ("train", "val", "test")


def shard_header(n_tokens):
    """The 1024 header bytes of a shard: int32 magic, version, token count, zeros."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, n_tokens
    return header.tobytes()


def read_shard_header(path):
    """Number of tokens in the shard `path`. Raises UserError when the header or the file's size is wrong."""
    try:
        size = os.path.getsize(path)
        header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if len(header) < HEADER_INTS:
        raise UserError(f"{path}: {size} bytes is too short for a shard's header of {4 * HEADER_INTS}; prepare it again")
    if header[0] != SHARD_MAGIC or header[1] != SHARD_VERSION:
        raise UserError(f"{path}: not a token shard (magic {header[0]}, version {header[1]}; "
                        f"expected {SHARD_MAGIC}, {SHARD_VERSION}); write shards with prepare_data.py")  # fmt: skip
    expected = 4 * HEADER_INTS + 2 * int(header[2])
    if header[2] < 0 or size != expected:
        raise UserError(f"{path}: the header says {header[2]} tokens, so {expected} bytes, but the file has {size}; "
                        "it is truncated or damaged: prepare or copy it again")  # fmt: skip
    return int(header[2])


def load_manifest(data_dir):
    """manifest.json of a prepared folder, or None where there is none (other people's shards)."""
    path = Path(data_dir) / "manifest.json"
    if not path.exists():
        return None
    manifest = read_json(path)
    for name, kind in (("tokenizer", str), ("vocab_size", int), ("files", dict)):
        if name not in manifest:
            raise UserError(f"{path}: has no {name!r}; prepare the data again")
        if not isinstance(manifest[name], kind):
            raise UserError(f"{path}: {name!r} is {manifest[name]!r}, not of type {kind.__name__}; prepare the data again")
    for name, entry in manifest["files"].items():
        if not isinstance(entry, dict) or not {"tokens", "sha256"} <= entry.keys():
            raise UserError(f"{path}: {name} has no tokens or sha256; prepare the data again")
    return manifest


def find_shards(data_dir):
    """{split: sorted shard paths} of a folder, by `*train*.bin`, `*val*.bin`, `*test*.bin`."""
    if not Path(data_dir).is_dir():
        raise UserError(f"data_dir: {data_dir} is not a folder; write one with prepare_data.py (see its --help), or name another with --data_dir")
    shards = {split: [] for split in SPLITS}
    for path in sorted(Path(data_dir).glob("*.bin")):
        splits = [split for split in SPLITS if split in path.name]
        if len(splits) > 1:
            raise UserError(f"{path}: its name fits the splits {' and '.join(splits)}; rename it to fit one")
        for split in splits:
            shards[split].append(path)
    return shards


def check_data(data_dir, verify=False):
    """Check a folder of shards before a run; returns (manifest or None, data_id).

    Headers and sizes are read, and compared with the manifest where there is one; `verify` hashes every file too. data_id
    identifies the content: the manifest's sha256 (it holds every file's), or without one a hash of names, sizes and ends.
    """
    if not data_dir:
        raise UserError("data_dir: is empty; name a folder that prepare_data.py wrote with --data_dir")
    shards = find_shards(data_dir)
    tokens = {path.name: read_shard_header(path) for paths in shards.values() for path in paths}
    manifest = load_manifest(data_dir)
    for split in ("train", "val"):
        if not shards[split]:
            raise UserError(f"{data_dir}: has no *{split}*.bin shard; write a folder with prepare_data.py (see its --help), or name another with --data_dir")
    if manifest is None:
        digest = hashlib.sha256()
        for name, count in tokens.items():
            with open(Path(data_dir) / name, "rb") as file:
                head = file.read(1 << 16)
                file.seek(-min(1 << 16, 4 * HEADER_INTS + 2 * count), os.SEEK_END)
                digest.update(f"{name} {count} ".encode() + head + file.read())
        return None, digest.hexdigest()
    listed = {name: entry["tokens"] for name, entry in manifest["files"].items()}
    for name in sorted(listed.keys() | tokens.keys()):
        if listed.get(name) != tokens.get(name):
            there = "is missing" if name not in tokens else f"has {tokens[name]} tokens"
            said = "is not in the manifest" if name not in listed else f"has {listed[name]} in the manifest"
            raise UserError(f"{data_dir}: {name} {there} but {said}; prepare the folder again, or move what is not its own")
        if verify and file_sha256(Path(data_dir) / name) != manifest["files"][name]["sha256"]:
            raise UserError(f"{data_dir}: {name} differs from its sha256 in the manifest; prepare or copy it again")
    return manifest, file_sha256(Path(data_dir) / "manifest.json")


class Windows:
    """The windows of one split: `context` + 1 tokens with stride `context` inside a shard, so that each token is predicted
    once; a shard's tail is dropped. Windows are numbered through the shards in the order of their names."""

    def __init__(self, data_dir, split, context, vocab_size):
        self.context, self.vocab_size = context, vocab_size
        self.paths = find_shards(data_dir)[split]
        counts = [max(0, read_shard_header(path) - 1) // context for path in self.paths]
        self.first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # first window of each shard, and the end
        self.tokens = [np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER_INTS) if count else None
                       for path, count in zip(self.paths, counts)]  # fmt: skip
        if not len(self):
            raise UserError(f"{data_dir}: no {split} shard is longer than the context of {context} tokens; "
                            "prepare more text or lower --context")  # fmt: skip

    def __len__(self):
        return int(self.first[-1])

    def read(self, ids):
        """(len(ids), context + 1) int64 tokens. Raises UserError for a token beyond the vocabulary."""
        rows = np.empty((len(ids), self.context + 1), dtype=np.int64)
        shard_of = np.searchsorted(self.first, ids, side="right") - 1
        for row, window, shard in zip(rows, ids, shard_of):
            start = int(window - self.first[shard]) * self.context
            row[:] = self.tokens[shard][start : start + self.context + 1]
        if rows.size and rows.max() >= self.vocab_size:
            row, column = np.argwhere(rows >= self.vocab_size)[0]
            start = int(ids[row] - self.first[shard_of[row]]) * self.context
            raise UserError(f"{self.paths[shard_of[row]]}: token {start + column} is {rows[row, column]}, beyond the vocabulary "
                            f"of {self.vocab_size}; set --vocab_size to the tokenizer's, or prepare the data again")  # fmt: skip
        return rows

    def spread(self, tokens):
        """Ids of evenly spaced windows that hold about `tokens` predicted tokens: the same ones every time."""
        count = min(len(self), max(1, tokens // self.context))
        return np.arange(count) * len(self) // count


@functools.lru_cache(maxsize=2)  # a batch touches at most two epochs, unless the data is smaller than a batch
def epoch_order(seed, epoch, n_windows):
    """A permutation of the windows: a pure function of (seed, epoch). RandomState, because numpy froze its stream (NEP 19)."""
    return np.random.RandomState([seed, epoch]).permutation(n_windows)


def batch_windows(seed, step, batch, n_windows):
    """Window ids of the global batch of update `step` (from 0): `batch` ids, the same for every variant, world size and
    micro-batch size. The epochs' orders stand one after another, and batch b is the b-th slice of that stream."""
    position = np.arange(step * batch, (step + 1) * batch)
    epochs, offsets = np.divmod(position, n_windows)
    return np.concatenate([epoch_order(seed, int(e), n_windows)[offsets[epochs == e]] for e in np.unique(epochs)])
