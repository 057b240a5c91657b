"""The shards of one split as they grow, and the names that full ones get.

A shard grows as NAME.part. `publish` gives full shards their names, after progress.json has recorded them.
"""

import os

import numpy as np
from tqdm import tqdm

from lib.errors import UserError
from lib.files import file_sha256, fsync_folder
from lib.shards import HEADER_INTS, shard_header


class ShardWriter:
    """Cuts one split's tokens into shards of `shard_tokens`: SPLIT_000000.bin.part, SPLIT_000001.bin.part, ...

    files    {name: {"tokens", "sha256"}} of the full shards, published or not
    tokens   tokens in the growing shard; a resumed one is cut back to these

    Raises UserError where the growing shard on disk is shorter than `tokens`.
    """

    def __init__(self, out, split, shard_tokens, files, tokens):
        self.out, self.split, self.shard_tokens = out, split, shard_tokens
        self.files, self.tokens = files, tokens
        self.file = None
        if tokens:
            size = 4 * HEADER_INTS + 2 * tokens
            if not self.growing.exists() or self.growing.stat().st_size < size:
                raise UserError(f"{self.growing} is not what progress.json says; nothing can go on here: delete {out}")
            self.file = open(self.growing, "r+b")
            self.file.truncate(size)
            self.file.seek(0, os.SEEK_END)

    @property
    def growing(self):
        """The path of the growing shard."""
        return self.out / f"{self.split}_{len(self.files):06d}.bin.part"

    def write(self, tokens):
        """Append uint16 `tokens`; a document may run on into the next shard."""
        while len(tokens):
            if self.file is None:
                self.file = open(self.growing, "wb")
                self.file.write(shard_header(0))  # finish() knows the count
            part, tokens = np.split(tokens, [self.shard_tokens - self.tokens])
            self.file.write(part.data)
            self.tokens += len(part)
            if self.tokens == self.shard_tokens:
                self.finish()

    def finish(self):
        """End the growing shard: its header, its bytes on disk, its entry in `files`."""
        if self.file is not None:
            self.file.seek(0)
            self.file.write(shard_header(self.tokens))
            self.sync()
            self.file.close()
            path = self.growing
            self.files[path.stem] = {"tokens": self.tokens, "sha256": file_sha256(path)}
            self.file, self.tokens = None, 0

    def sync(self):
        """Put what is written on disk."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())


def publish(out, files):
    """Rename NAME.part to NAME for the full shards `files`. Repeatable: a kill may have come between."""
    for name in files:
        if (out / f"{name}.part").exists():
            os.replace(out / f"{name}.part", out / name)
            tqdm.write(f"{out / name}: {files[name]['tokens']:,} tokens")
    fsync_folder(out)
