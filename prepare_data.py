"""Text -> token shards and manifest.json, for train.py.

    python prepare_data.py --tokenizer bytes --out data/docs-bytes                      # needs no network
    python prepare_data.py --source fineweb-edu --max-tokens 2.2e9 --out data/fineweb-edu
    python prepare_data.py --source a.jsonl b.parquet c.txt --tokenizer bytes --out data/mine

Sources   docs: docstrings of the standard library and of pinned distributions, each text once. fineweb-edu:
          HuggingFaceFW/fineweb-edu, sample-10BT, streamed. Files: .jsonl (one object with "text" per line), .parquet (a
          column `text`; FineWeb-Edu's own files fit), .txt (cut at blank lines into documents of 2 kB to 1 MB; the last
          may be shorter, and a longer paragraph is cut inside). Duplicates in files and in FineWeb-Edu are kept.
Tokens    A document is <|endoftext|> and its text, in which special tokens are ordinary text. Empty documents are
          skipped and counted. A lone surrogate becomes U+FFFD.
Split     A function of the text alone (split_rule in manifest.json). Equal texts never straddle splits, and adding
          files moves nothing.
Shards    llm.c's: 256 int32 (magic, version, token count), then uint16 tokens. A document may run on into the next one.
Resume    A shard grows as NAME.part. Whenever one is full, progress.json records where each split and the source stand.
          The same command goes on from there, to the same bytes. FineWeb-Edu's stream seeks. Other sources are re-read
          to that point and checked by hash.
"""

import argparse
import collections
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from lib.errors import UserError, run_main
from lib.files import atomic_write, lock_folder, make_folder
from lib.progress import already, load_progress
from lib.shard_writer import ShardWriter, publish
from lib.shards import SPLITS
from lib.sources import open_source
from lib.tokenizers import TOKENIZERS, get_tokenizer

# ---- documents -> tokens ---------------------------------------------------------------------------------------------

BATCH = 1 << 18  # characters per thread and task
PIECE = 1 << 20  # characters tiktoken gets at once: bounds memory inside a long document
BOUNDARY = re.compile(r".*\S(?=[ \n])", re.DOTALL)


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    digest: bytes  # sha256 of the document's text
    size: int | None  # UTF-8 bytes of the document; None on later parts of it
    content: str | np.ndarray  # text, and then its uint16 tokens


def encoded_batches(documents, encoding, threads):
    """What `batches` yields, as tokens. `threads` threads work a few batches ahead; tiktoken releases the GIL."""
    ahead = collections.deque()
    with ThreadPoolExecutor(threads) as pool:
        for batch, *after in batches(documents):
            ahead.append((pool.submit(encode_batch, encoding, batch), after))
            if len(ahead) > 2 * threads:
                encoded, after = ahead.popleft()
                yield encoded.result(), *after
        for encoded, after in ahead:
            yield encoded.result(), *after


def batches(documents):
    """Yield (pieces, whether the last one ends its document, the source's position after that document).

    `documents` yields (text, position after it), as sources do.
    """
    batch, size = [], 0
    for text, position in documents:
        text, digest, n_bytes = fingerprint(text)
        start = 0
        while start < len(text) or n_bytes is not None:
            end = len(text) if len(text) - start <= PIECE else cut(text, start, start + PIECE)
            batch.append(Piece(digest, n_bytes, text[start:end]))
            size += end - start + 100  # what a piece takes beside its text
            start, n_bytes = end, None
            if size >= BATCH:
                yield batch, end == len(text), position
                batch, size = [], 0
        del text  # it may be long, and the next one is about to be read
    if batch:
        yield batch, True, position


def fingerprint(text):
    """(text without lone surrogates, sha256 of its UTF-8, bytes of its UTF-8)."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # as tiktoken does
        data = text.encode()
    return text, hashlib.sha256(data).digest(), len(data)


def cut(text, start, end):
    """Where to cut text[start:end] so that tokenising both sides apart changes nothing, as late as possible.

    No match of GPT-2's pattern runs from a non-space into a space, and none looks behind. A word or a run of spaces
    that long has no such place. The cut is then at `end`, and a token or two there may differ.
    """
    match = BOUNDARY.match(text, start, end)
    return match.end() if match else end


def encode_batch(encoding, batch):
    """The pieces of `batch` as tokens, with <|endoftext|> in front of each document that is not empty."""
    encoded = []
    for piece in batch:
        start = [encoding.eot_token] if piece.size else []
        tokens = np.concatenate([start, encode(encoding, piece.content)], dtype="<u2", casting="unsafe")
        encoded.append(piece._replace(content=tokens))
    return encoded


def encode(encoding, text):
    """uint32 tokens of `text`, special tokens as ordinary text."""
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except ValueError:  # a run of a million spaces overflows the stack of tiktoken's regex engine
        middle = cut(text, 0, len(text) // 2)
        return np.concatenate([encode(encoding, text[:middle]), encode(encoding, text[middle:])])


# ---- tokens -> splits -> shards -> manifest --------------------------------------------------------------------------

SPLIT_RULE = "u = sha256(text)[:8] / 2**64: test if u < test_frac, val if u < test_frac + val_frac, else train"


def split_of(digest, request):
    """The split of a document with this sha256, by SPLIT_RULE."""
    u = int.from_bytes(digest[:8], "big") / 2**64
    return "test" if u < request["test_frac"] else "val" if u < request["test_frac"] + request["val_frac"] else "train"


def link(chain, digest):
    """The running hash of a corpus: sha256 over the one before (hex) and a document's sha256."""
    return hashlib.sha256(bytes.fromhex(chain) + digest).hexdigest()


def prepare(source, request, encoding, out, threads):
    """Write the shards of `source` and manifest.json into `out`, from the start or from progress.json on.

    Returns {split: {documents, bytes of text, tokens}}.
    """
    progress = load_progress(out, request)
    writers = open_writers(out, progress)
    documents = source.documents(progress["position"])
    if progress["position"] is None:
        skip_written(out, progress, documents)
    try:
        write_shards(out, progress, writers, encoded_batches(documents, encoding, threads))
        check_splits(progress)
        for writer in writers.values():
            writer.finish()
        checkpoint(out, progress, writers)
    finally:
        if not (out / "progress.json").exists():  # nothing to go on from
            for path in out.glob("*.part"):
                path.unlink()
    return write_manifest(out, progress, encoding)


def write_shards(out, progress, writers, encoded):
    """Write what encoded_batches yields, up to max_tokens, and count it in `progress`. Record full shards at once."""
    request, counts = progress["request"], progress["splits"]
    total, limit = sum(count["tokens"] for count in counts.values()), request["max_tokens"] or float("inf")
    bar = tqdm(total=request["max_tokens"], initial=total, unit="tok", unit_scale=True, mininterval=1, disable=None)
    with bar:
        for pieces, whole, position in encoded:
            for digest, size, tokens in pieces:
                if size is not None:  # a document starts
                    if total >= limit:
                        return
                    split = split_of(digest, request)
                    progress["documents"] += 1
                    progress["empty_documents"] += not size
                    progress["corpus_sha256"] = link(progress["corpus_sha256"], digest)
                    counts[split]["documents"] += size > 0
                    counts[split]["bytes"] += size
                writers[split].write(tokens)
                counts[split]["tokens"] += len(tokens)
                total += len(tokens)
            bar.update(total - bar.n)
            if whole:
                progress["position"] = position
                if sum(len(writer.files) for writer in writers.values()) > len(progress["files"]):
                    checkpoint(out, progress, writers)


def check_splits(progress):
    """Raise UserError where the text is empty or leaves a split empty that was asked for."""
    if not any(count["tokens"] for count in progress["splits"].values()):
        raise UserError("--source: there is not one document with text in it; give other files")
    for split in ("val", "test"):
        fraction = progress["request"][f"{split}_frac"]
        if fraction and not progress["splits"][split]["tokens"]:
            raise UserError(
                f"--{split}-frac: {fraction} of {progress['documents']} documents left {split} empty; "
                f"raise it, or set it to 0 to do without {split}"
            )


def write_manifest(out, progress, encoding):
    """Write manifest.json, which says that the folder is whole. Returns its `splits`."""
    counts = progress["splits"]
    splits = {split: {key: counts[split][key] for key in ("documents", "bytes", "tokens")} for split in SPLITS}
    manifest = {
        "format": 1,
        **progress["request"],
        "vocab_size": encoding.n_vocab,
        "versions": {"tiktoken": importlib.metadata.version("tiktoken")},
        "source_revision": (progress["position"] or {}).get("revision"),
        "documents": progress["documents"],
        "empty_documents": progress["empty_documents"],
        "corpus_sha256": progress["corpus_sha256"],
        "splits": splits,
        "files": dict(sorted(progress["files"].items())),
    }
    with atomic_write(out / "manifest.json", "w") as file:
        json.dump(manifest, file, indent=1)
    (out / "progress.json").unlink()
    return splits


# ---- resuming --------------------------------------------------------------------------------------------------------


def open_writers(out, progress):
    """{split: ShardWriter} as `progress` says. Shards begun after it was written are deleted."""
    writers = {}
    for split in SPLITS:
        files = {name: entry for name, entry in progress["files"].items() if name.startswith(split)}
        growing = progress["splits"][split]["growing"]
        writers[split] = ShardWriter(out, split, progress["request"]["shard_tokens"], files, growing)
    for path in set(out.glob("*.part")) - {writer.growing for writer in writers.values() if writer.tokens}:
        path.unlink()
    return writers


def skip_written(out, progress, documents):
    """Read past the documents that are written already. Raises UserError unless they are the same ones."""
    chain = ""
    for text, _ in itertools.islice(documents, progress["documents"]):
        chain = link(chain, fingerprint(text)[1])
    if chain != progress["corpus_sha256"]:
        raise UserError(f"{out} was begun with other text than the source has now; restore that, or delete the folder")


def checkpoint(out, progress, writers):
    """Record in progress.json what is written, and give full shards their names."""
    for split, writer in writers.items():
        writer.sync()
        progress["splits"][split]["growing"] = writer.tokens
    progress["files"] = {name: entry for writer in writers.values() for name, entry in writer.files.items()}
    with atomic_write(out / "progress.json", "w") as file:
        json.dump(progress, file, indent=1)
    publish(out, progress["files"])


# ---- command line ----------------------------------------------------------------------------------------------------


def number(text):
    """A whole number above zero; 2.5e9 is one too."""
    value = float(text)
    if not 1 <= value < 2**53 or value % 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above zero")
    return int(value)


def parse(argv):
    """The checked command line. Raises UserError where a value cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, default = parser.add_argument, "default: %(default)s"
    add("--source", nargs="+", default=["docs"], help="docs (default), fineweb-edu, or .txt, .jsonl, .parquet files")
    add("--tokenizer", choices=TOKENIZERS, default="gpt2", help=default)
    add("--out", required=True, help="folder for shards and manifest.json")
    add("--max-tokens", type=number, help="stop after the document that reaches so many, all splits together")
    add("--val-frac", type=float, default=0.01, help=f"of the documents; {default}")
    add("--test-frac", type=float, default=0.01, help=f"of the documents; {default}")
    add("--shard-tokens", type=number, default=100_000_000, help=f"tokens per shard; {default}")
    add("--threads", type=number, default=min(os.cpu_count() or 1, 16), help=default)
    add("--wait", action="store_true", help="where another process prepares this folder, wait for it to end")
    args = parser.parse_args(argv)
    if args.shard_tokens >= 2**31:
        raise UserError(f"--shard-tokens: {args.shard_tokens} does not fit a shard's header; stay below {2**31}")
    val, test = args.val_frac, args.test_frac
    if not (val >= 0 and test >= 0 and val + test < 1):
        raise UserError(f"--val-frac {val} and --test-frac {test}: give two from 0 up that leave some to train")
    if not args.out:
        raise UserError("--out: is empty; name a folder for the shards")
    return args


def main(argv=None):
    args = parse(argv)
    source, out = open_source(args.source, args.threads), Path(args.out)
    request = {
        "source": source.about,
        "tokenizer": args.tokenizer,
        "split_rule": SPLIT_RULE,
        "val_frac": args.val_frac,
        "test_frac": args.test_frac,
        "max_tokens": args.max_tokens,
        "shard_tokens": args.shard_tokens,
    }
    if already(out, request):
        return
    encoding = get_tokenizer(args.tokenizer)
    if encoding.n_vocab > 2**16:
        raise UserError(f"--tokenizer: {args.tokenizer} has {encoding.n_vocab} tokens; a uint16 holds at most {2**16}")
    make_folder(out, "out")
    with lock_folder(out, args.wait):
        if already(out, request):  # by the process that was waited for
            return
        start = time.time()
        try:
            splits = prepare(source, request, encoding, out, args.threads)
        except OSError as error:
            where = error.filename or f"cannot write in {out}"
            raise UserError(
                f"{where}: {error.strerror}; mend that and run the same command: full shards are kept"
            ) from error
    seconds, megabytes = time.time() - start, sum(split["bytes"] for split in splits.values()) / 1e6
    tokens = ", ".join(f"{split} {count['tokens']:,}" for split, count in splits.items())
    print(f"{out}: {tokens} tokens; {megabytes:.1f} MB of text in {seconds:.1f} s")


if __name__ == "__main__":
    run_main(main)
