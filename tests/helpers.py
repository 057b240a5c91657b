"""What several test files use: where things are, which keys are the machine's, shards written by the format alone."""

import hashlib
import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}  # several threads only spin on models this small

# The keys that may differ at a resume and within a pair, by README; lib/config.py must say the same.
MACHINE = set(
    """data_dir verify stop_tokens milestones eval_interval log_interval checkpoint_interval checkpoint_minutes out_dir
    wait device compile reads micro_batch deterministic""".split()
)


def write_shard(path, tokens, count=None, magic=20240520, version=1):
    """llm.c's format: 256 int32 (magic, version, number of tokens, zeros), then uint16 tokens, little-endian."""
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    words = [n.to_bytes(4, "little", signed=True) for n in header] + [int(t).to_bytes(2, "little") for t in tokens]
    path.write_bytes(b"".join(words))
    return path


def write_folder(folder, manifest=True, vocab_size=257, tokenizer="bytes", **shards):
    """A folder of shards {name: tokens}, and the manifest that prepare_data.py would leave. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, tokens in shards.items():
        path = write_shard(folder / f"{name}.bin", tokens)
        files[path.name] = {"tokens": len(tokens), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    if manifest:
        content = {"tokenizer": tokenizer, "vocab_size": vocab_size, "files": files}
        (folder / "manifest.json").write_text(json.dumps(content))
    return folder
