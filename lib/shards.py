"""A folder of token shards in llm.c's format: its checks, its windows, and the order in which training reads them."""

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
HEADER_BYTES = 4 * HEADER_INTS
SPLITS = ("train", "val", "test")
WAY_OUT = "write one with prepare_data.py (see its --help), or name another with --data_dir"


def shard_header(n_tokens):
    """The header bytes of a shard: int32 magic, version, token count, zeros."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, n_tokens
    return header.tobytes()


def read_shard_header(path):
    """Number of tokens in the shard `path`. Raises UserError where the header or the file's size is wrong."""
    try:
        size = os.path.getsize(path)
        header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if len(header) < HEADER_INTS:
        raise UserError(f"{path}: {size} bytes is too short for a shard's header of {HEADER_BYTES}; prepare it again")
    magic, version, n_tokens = map(int, header[:3])
    if (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
        raise UserError(
            f"{path}: not a token shard (magic {magic}, version {version}; expected {SHARD_MAGIC}, {SHARD_VERSION}); "
            "write shards with prepare_data.py"
        )
    expected = HEADER_BYTES + 2 * n_tokens
    if n_tokens < 0 or size != expected:
        raise UserError(
            f"{path}: the header says {n_tokens} tokens, so {expected} bytes, but the file has {size}; "
            "it is truncated or damaged: prepare or copy it again"
        )
    return n_tokens


def load_manifest(data_dir):
    """manifest.json of a prepared folder, or None where there is none (other people's shards).

    Raises UserError where the manifest lacks what a run needs.
    """
    path = Path(data_dir) / "manifest.json"
    if not path.exists():
        return None
    manifest = read_json(path)
    for name, kind in (("tokenizer", str), ("vocab_size", int), ("files", dict)):
        if name not in manifest:
            raise UserError(f"{path}: has no {name!r}; prepare the data again")
        if not isinstance(manifest[name], kind):
            wrong = f"{name!r} is {manifest[name]!r}, not of type {kind.__name__}"
            raise UserError(f"{path}: {wrong}; prepare the data again")
    for name, entry in manifest["files"].items():
        if not isinstance(entry, dict) or not {"tokens", "sha256"} <= entry.keys():
            raise UserError(f"{path}: {name} has no tokens or sha256; prepare the data again")
    return manifest


def find_shards(data_dir):
    """{split: shard paths, sorted} of a folder, by `*train*.bin`, `*val*.bin`, `*test*.bin`."""
    if not Path(data_dir).is_dir():
        raise UserError(f"data_dir: {data_dir} is not a folder; {WAY_OUT}")
    shards = {split: [] for split in SPLITS}
    for path in sorted(Path(data_dir).glob("*.bin")):
        splits = [split for split in SPLITS if split in path.name]
        if len(splits) > 1:
            raise UserError(f"{path}: its name fits the splits {' and '.join(splits)}; rename it to fit one")
        for split in splits:
            shards[split].append(path)
    return shards


def check_data(data_dir, verify=False):
    """Check a folder of shards before a run; returns (manifest or None, data_id). Raises UserError naming the file.

    Headers and sizes are read, and compared with the manifest where there is one; `verify` hashes every file too.
    data_id identifies the content. It is the manifest's sha256, since the manifest holds every file's. Without a
    manifest it is a hash of the shards' names, sizes and ends.
    """
    if not data_dir:
        raise UserError("data_dir: is empty; name a folder that prepare_data.py wrote with --data_dir")
    shards = find_shards(data_dir)
    tokens = {path.name: read_shard_header(path) for paths in shards.values() for path in paths}
    manifest = load_manifest(data_dir)
    for split in ("train", "val"):
        if not shards[split]:
            raise UserError(f"{data_dir}: has no *{split}*.bin shard; {WAY_OUT}")
    if manifest is None:
        return None, hash_of_ends(data_dir, tokens)
    listed = {name: entry["tokens"] for name, entry in manifest["files"].items()}
    for name in sorted(listed.keys() | tokens.keys()):
        if listed.get(name) != tokens.get(name):
            there = f"has {tokens[name]} tokens" if name in tokens else "is missing"
            said = f"has {listed[name]} in the manifest" if name in listed else "is not in the manifest"
            way_out = "prepare the folder again, or move what is not its own"
            raise UserError(f"{data_dir}: {name} {there} but {said}; {way_out}")
        if verify and file_sha256(Path(data_dir) / name) != manifest["files"][name]["sha256"]:
            raise UserError(f"{data_dir}: {name} differs from its sha256 in the manifest; prepare or copy it again")
    return manifest, file_sha256(Path(data_dir) / "manifest.json")


def hash_of_ends(data_dir, tokens):
    """sha256 over each shard's name, token count, first and last 64 KiB. tokens: {shard name: token count}."""
    digest = hashlib.sha256()
    for name, count in tokens.items():
        with open(Path(data_dir) / name, "rb") as file:
            head = file.read(1 << 16)
            file.seek(-min(1 << 16, HEADER_BYTES + 2 * count), os.SEEK_END)
            digest.update(f"{name} {count} ".encode() + head + file.read())
    return digest.hexdigest()


class Windows:
    """The windows of one split: `context` + 1 tokens, with stride `context` inside a shard.

    So each token is predicted once. A shard's tail, shorter than a window, is dropped. Windows are numbered through the
    shards in the order of their names.
    """

    def __init__(self, data_dir, split, context, vocab_size):
        self.context, self.vocab_size = context, vocab_size
        self.paths = find_shards(data_dir)[split]
        counts = [max(0, read_shard_header(path) - 1) // context for path in self.paths]
        self.first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # first window of each shard, and the end
        self.tokens = [
            np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES) if count else None
            for path, count in zip(self.paths, counts)
        ]
        if not len(self):
            raise UserError(
                f"{data_dir}: no {split} shard is longer than the context of {context} tokens; "
                "prepare more text or lower --context"
            )

    def __len__(self):
        return int(self.first[-1])

    def read(self, ids):
        """(len(ids), context + 1) int64 tokens. Raises UserError for a token beyond the vocabulary."""
        rows = np.empty((len(ids), self.context + 1), dtype=np.int64)
        shards = np.searchsorted(self.first, ids, side="right") - 1
        starts = (np.asarray(ids) - self.first[shards]) * self.context
        for row, shard, start in zip(rows, shards, starts):
            row[:] = self.tokens[shard][start : start + self.context + 1]
        if rows.size and rows.max() >= self.vocab_size:
            row, column = np.argwhere(rows >= self.vocab_size)[0]
            place = f"{self.paths[shards[row]]}: token {starts[row] + column}"
            raise UserError(
                f"{place} is {rows[row, column]}, beyond the vocabulary of {self.vocab_size}; "
                "set --vocab_size to the tokenizer's, or prepare the data again"
            )
        return rows

    def spread(self, tokens):
        """Ids of evenly spaced windows that hold about `tokens` predicted tokens: the same ones every time."""
        count = min(len(self), max(1, tokens // self.context))
        return np.arange(count) * len(self) // count


@functools.lru_cache(maxsize=2)  # a batch touches at most two epochs, unless the data is smaller than a batch
def epoch_order(seed, epoch, n_windows):
    """A permutation of the windows, a pure function of (seed, epoch). numpy froze RandomState's stream (NEP 19)."""
    return np.random.RandomState([seed, epoch]).permutation(n_windows)


def batch_windows(seed, step, batch, n_windows):
    """The `batch` window ids of update `step` (from 0): the same for every variant, world size and micro-batch size.

    The epochs' orders stand one after another; update `step` takes the step-th slice of that stream.
    """
    position = np.arange(step * batch, (step + 1) * batch)
    epochs, offsets = np.divmod(position, n_windows)
    return np.concatenate([epoch_order(seed, int(e), n_windows)[offsets[epochs == e]] for e in np.unique(epochs)])
