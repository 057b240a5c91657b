"""Text -> token shards and manifest.json, for train.py.

    python prepare_data.py --tokenizer bytes --out data/docs-bytes                      # needs no network
    python prepare_data.py --source fineweb-edu --max-tokens 2.2e9 --out data/fineweb-edu
    python prepare_data.py --source a.jsonl b.parquet c.txt --tokenizer bytes --out data/mine

Sources   docs: de-duplicated docstrings of the standard library and of DISTRIBUTIONS below. fineweb-edu: HuggingFaceFW/
          fineweb-edu, sample-10BT, streamed. Files: .jsonl (an object with "text" a line), .parquet (a column `text`;
          FineWeb-Edu's own files fit), .txt (cut at blank lines into documents of 2 kB to 1 MB; the last may be shorter,
          a longer paragraph is cut inside). Duplicates in files and FineWeb-Edu are kept.
Tokens    A document is <|endoftext|> and its text, in which special tokens are ordinary text. Empty documents are skipped
          and counted; a lone surrogate becomes U+FFFD.
Split     By SPLIT_RULE, a function of the text alone: equal texts never straddle splits, and adding files moves nothing.
Shards    llm.c's: 256 int32 (magic, version, token count), then uint16 tokens. A document may run on into the next shard.
Resume    A shard grows as NAME.part. Whenever one is full, progress.json records where each split and the source stand, and
          the same command goes on from there, to the same bytes. FineWeb-Edu's stream seeks; other text is read again up
          to there and must have the same running hash.
"""

import argparse
import ast
import codecs
import collections
import gc
import hashlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import re
import sys
import sysconfig
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from lib.errors import UserError, run_main, warn
from lib.files import atomic_write, file_sha256, fsync_folder, lock_folder, make_folder, read_json
from lib.shards import HEADER_INTS, SPLITS, load_manifest, read_shard_header, shard_header
from lib.tokenizers import TOKENIZERS, get_tokenizer
from tqdm import tqdm


SPLIT_RULE = "u = sha256(text)[:8] / 2**64: test if u < test_frac, val if u < test_frac + val_frac, else train"
TXT_MIN, TXT_MAX = 2_000, 1_000_000  # bytes of a document cut from a .txt
BATCH = 1 << 18  # characters a thread tokenises at a time
PIECE = 1 << 20  # characters tiktoken gets at once: bounds memory inside a long document
FINEWEB, FINEWEB_CONFIG = "HuggingFaceFW/fineweb-edu", "sample-10BT"


class Source:
    """`about` is for the manifest. `texts(position)` yields documents, from the start or from where `at` once stood."""

    at = None  # where a source that can seek stands


# ---- source: docstrings of what is installed anyway ------------------------------------------------------------------

PYTHON = "3.11"
DISTRIBUTIONS = {  # pinned by the requirements; those with much text
    "torch": "2.13.0", "sympy": "1.14.0", "pandas": "3.1.1", "networkx": "3.6.1", "numpy": "2.4.6", "matplotlib": "3.11.2",
    "huggingface_hub": "2.4.0", "datasets": "5.2.0", "fonttools": "4.68.0", "mpmath": "1.3.0", "pillow": "13.0.0",
    "fsspec": "2026.9.0", "pyarrow": "26.0.1",
}  # fmt: skip


def docstrings(path):
    """The docstrings of a Python source file in their order; none if it does not parse."""
    warnings.simplefilter("ignore")  # invalid escapes in other people's sources
    found = []

    def visit(node):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(ast.get_docstring(node) or "")
        for field in ("body", "handlers", "orelse", "finalbody"):
            for child in getattr(node, field, ()):
                visit(child)

    try:
        visit(ast.parse(Path(path).read_bytes()))
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [text for text in found if text]


class Docs(Source):
    def __init__(self, threads):
        self.threads = threads
        self.versions = {}
        for name, recorded in {"python": PYTHON, **DISTRIBUTIONS}.items():
            try:
                version = platform.python_version() if name == "python" else importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                version = None
            self.versions[name] = version and version.split("+")[0]  # torch's +cpu, +cu130
            if version is None:
                warn(f"docs: {name} {recorded} is not installed; its docstrings are missing from this corpus")
            elif not f"{self.versions[name]}.".startswith(f"{recorded}."):
                warn(f"docs: this corpus is recorded with {name} {recorded}, installed is {version}; the text may differ")
        self.about = {"kind": "docs", "versions": self.versions}

    def files(self):
        """Source files in a fixed order, without tests and private packages."""
        library = Path(sysconfig.get_path("stdlib"))
        paths = [(path.relative_to(library), path) for path in library.rglob("*.py")]
        groups = [[pair for pair in paths if pair[0].parts[0].removesuffix(".py") in sys.stdlib_module_names]]
        for name in DISTRIBUTIONS:
            if self.versions[name]:
                listed = importlib.metadata.files(name) or []
                groups.append([(path, Path(path.locate())) for path in listed if path.suffix == ".py"])
        return [str(path) for group in groups for name, path in sorted(group) if path.is_file()
                and not any(part in ("test", "tests", "testing", "idle_test") or part[0] == "_" for part in name.parts[:-1])]  # fmt: skip

    def texts(self, position):
        seen = set()
        with multiprocessing.get_context("spawn").Pool(self.threads, initializer=gc.disable) as pool:  # trees have no cycles
            for found in pool.imap(docstrings, self.files(), chunksize=16):
                for text in found:
                    if text not in seen:
                        seen.add(text)
                        yield text


# ---- source: local files ---------------------------------------------------------------------------------------------


def read_lines(path, limit=-1):
    """(line number, text) of a UTF-8 file; lines beyond `limit` bytes come in pieces."""
    decoder, number = codecs.getincrementaldecoder("utf-8-sig")(), 1
    with open(path, "rb") as file:
        while True:
            line = file.readline(limit)
            try:
                text = decoder.decode(line, final=not line)
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: not UTF-8 ({error.reason}); convert it, e.g. with iconv") from None
            if not line:
                return
            yield number, text
            number += line.endswith(b"\n")


def read_txt(path):
    parts, size = [], 0
    for _, line in read_lines(path, limit=1 << 16):
        blank = line.endswith("\n") and not line.strip()
        length = len(line.encode())
        if size + length > TXT_MAX or (blank and size >= TXT_MIN):
            yield "".join(parts).strip("\r\n")
            parts, size = [], 0
        if not blank or parts:
            parts.append(line)
            size += length
    if parts:
        yield "".join(parts).strip("\r\n")


def read_jsonl(path):
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not JSON ({getattr(error, 'msg', error)}); mend or remove the line") from None
        if not isinstance(record, dict) or "text" not in record:
            raise UserError(f'{path}:{number}: no "text"; every line must be an object like {{"text": "..."}}')
        yield checked(record["text"], f"{path}:{number}")


def open_parquet(path, file=None):
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(file or path, buffer_size=1 << 20, pre_buffer=False)  # else it holds a whole row group
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({first_line(error)}); fetch it again") from None
    if "text" not in file.schema_arrow.names:
        raise UserError(f"{path}: has no column `text`, only {', '.join(file.schema_arrow.names)}; rename the one to use")
    return file


def read_parquet(path, file=None, skip=0):
    """The texts after the first `skip` rows of `path`, which may be open as `file`."""
    import pyarrow as pa

    row, file = 0, open_parquet(path, file)
    try:
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            if row + about.num_rows <= skip:
                row += about.num_rows
                continue
            rows = int(4e6 * about.num_rows / max(1, about.total_byte_size))  # about 4 MB of text at a time
            for batch in file.iter_batches(max(1, min(rows, 1024)), row_groups=[group], columns=["text"], use_threads=False):
                for row, value in enumerate(batch.column(0), row + 1):
                    if row > skip:
                        yield checked(value.as_py(), f"{path}: row {row}")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: row {row + 1}: not UTF-8 ({error.reason}); write the file again") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read after row {row} ({first_line(error)}); fetch it again") from None


def checked(text, where):
    if not isinstance(text, str):
        raise UserError(f"{where}: text is of type {type(text).__name__}, not a string; mend or remove it")
    return text


def first_line(error):
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}


class Files(Source):
    def __init__(self, names):
        self.paths = [Path(name) for name in names]
        for path in self.paths:
            if not path.is_file():
                raise UserError(f"--source: {path} is {'a folder, give its files' if path.is_dir() else 'not there'}; "
                                "it takes docs, fineweb-edu or files")  # fmt: skip
            if path.suffix not in READERS:
                raise UserError(f"--source: {path}: unknown extension {path.suffix!r}; use one of {', '.join(READERS)}")
            if path.stat().st_size == 0:
                raise UserError(f"--source: {path} is empty; leave it out")
            if path.suffix == ".parquet":
                open_parquet(path)  # complain now, not after hours
        self.about = {"kind": "files", "files": [{"name": path.name, "bytes": path.stat().st_size} for path in self.paths]}

    def texts(self, position):
        for path in self.paths:
            yield from READERS[path.suffix](path)


# ---- source: FineWeb-Edu from the hub --------------------------------------------------------------------------------


class FineWebEdu(Source):
    """The hub's parquet files, found and opened by `datasets` but read as local ones are: its own iterator holds a gigabyte and
    may hang when it is not read to the end (apache/arrow#45214)."""

    about = {"kind": "fineweb-edu", "dataset": FINEWEB, "config": FINEWEB_CONFIG}

    def texts(self, position):
        try:
            import datasets
            import huggingface_hub
            from datasets.utils.file_utils import xopen

            self.at = at = position or {"revision": huggingface_hub.HfApi().dataset_info(FINEWEB, timeout=20).sha, "file": 0, "row": 0}
            builder = datasets.load_dataset_builder(FINEWEB, FINEWEB_CONFIG, revision=at["revision"])
            for index, url in list(enumerate(builder.config.data_files["train"]))[at["file"] :]:
                skip = at["row"] if index == at["file"] else 0
                with xopen(url, "rb") as file:
                    for row, text in enumerate(read_parquet(url, file, skip), skip + 1):
                        self.at = {"revision": at["revision"], "file": index, "row": row}
                        yield text
        except Exception as error:  # the hub's client lets whatever its network layers raised through
            raise UserError(f"fineweb-edu: cannot read {FINEWEB} from the hub ({type(error).__name__}: {first_line(error)}); try "
                            f"again, or fetch its sample/10BT/*.parquet elsewhere and give them: --source FILE.parquet ...") from error  # fmt: skip


# ---- documents -> tokens ---------------------------------------------------------------------------------------------

BOUNDARY = re.compile(r".*\S(?=[ \n])", re.DOTALL)


def cut(text, start, end):
    """Where to cut text[start:end] so that tokenising both sides apart changes nothing, as late as possible.

    No match of GPT-2's pattern runs from a non-space into a space, and none looks behind. Where there is no such place
    (a word or a run of spaces that long) the cut is at `end`, and a token or two there may differ.
    """
    match = BOUNDARY.match(text, start, end)
    return match.end() if match else end


def encode(encoding, text):
    """uint32 tokens of `text`, special tokens as ordinary text."""
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except ValueError:  # a run of a million spaces overflows the stack of tiktoken's regex engine
        middle = cut(text, 0, len(text) // 2)
        return np.concatenate([encode(encoding, text[:middle]), encode(encoding, text[middle:])])


def encode_batch(encoding, batch):
    """[(digest, length, text)] -> [(digest, length, uint16 tokens)]; <|endoftext|> goes where a document starts."""
    encoded = []
    for digest, length, text in batch:
        start = [encoding.eot_token] if length else []
        encoded.append((digest, length, np.concatenate([start, encode(encoding, text)], dtype="<u2", casting="unsafe")))
    return encoded


def fingerprint(text):
    """(text without lone surrogates, sha256 of its UTF-8, their length)."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # as tiktoken does
        data = text.encode()
    return text, hashlib.sha256(data).digest(), len(data)


def batches(texts):
    """Batches of (digest, UTF-8 length, piece of text), and whether the batch ends where a document does. Only a document's
    first piece has its length; later ones have None."""
    batch, size = [], 0
    for text in texts:
        text, digest, length = fingerprint(text)
        start = 0
        while start < len(text) or length is not None:
            end = len(text) if len(text) - start <= PIECE else cut(text, start, start + PIECE)
            batch.append((digest, length, text[start:end]))
            size += end - start + 100  # what an item takes beside its text
            start, length = end, None
            if size >= BATCH:
                yield batch, end == len(text)
                batch, size = [], 0
        del text  # it may be long, and the next one is about to be read
    yield batch, True


def encoded_batches(source, texts, encoding, threads):
    """(encoded batch, position of the source after it, or False inside a document), in order; works a few batches ahead."""
    ahead = collections.deque()
    with ThreadPoolExecutor(threads) as pool:
        for batch, whole in batches(texts):
            ahead.append((pool.submit(encode_batch, encoding, batch), whole and source.at))
            if len(ahead) > 2 * threads:
                future, position = ahead.popleft()
                yield future.result(), position
        for future, position in ahead:
            yield future.result(), position


# ---- shards ----------------------------------------------------------------------------------------------------------


class Shards:
    """The shards of one split. One grows as NAME.part; `publish` gives the full ones their names."""

    def __init__(self, out, split, shard_tokens, files, tokens):
        self.out, self.split, self.shard_tokens = out, split, shard_tokens
        self.files = files  # {name: {tokens, sha256}} of the full ones, published or not
        self.tokens = tokens  # in the growing one
        self.file = None
        if tokens:
            size = 4 * HEADER_INTS + 2 * tokens
            if not self.growing.exists() or self.growing.stat().st_size < size:
                raise UserError(f"{self.growing} is not what progress.json says, so nothing can go on here; delete {out}")
            self.file = open(self.growing, "r+b")
            self.file.truncate(size)
            self.file.seek(0, os.SEEK_END)

    @property
    def growing(self):
        return self.out / f"{self.split}_{len(self.files):06d}.bin.part"

    def write(self, tokens):
        while len(tokens):
            if self.file is None:
                self.file = open(self.growing, "wb")
                self.file.write(shard_header(0))
            part, tokens = np.split(tokens, [self.shard_tokens - self.tokens])
            self.file.write(part.data)
            self.tokens += len(part)
            if self.tokens == self.shard_tokens:
                self.finish()

    def finish(self):
        if self.file is not None:
            self.file.seek(0)
            self.file.write(shard_header(self.tokens))
            self.sync()
            self.file.close()
            path = self.growing
            self.files[path.stem] = {"tokens": self.tokens, "sha256": file_sha256(path)}
            self.file, self.tokens = None, 0

    def sync(self):
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())


# ---- the preparation -------------------------------------------------------------------------------------------------


def split_of(digest, request):
    u = int.from_bytes(digest[:8], "big") / 2**64
    return "test" if u < request["test_frac"] else "val" if u < request["test_frac"] + request["val_frac"] else "train"


def link(chain, digest):
    """The running hash of a corpus: sha256 over the one before (hex) and a document's sha256."""
    return hashlib.sha256(bytes.fromhex(chain) + digest).hexdigest()


def already(out, request):
    """Whether `out` holds this preparation, whole. Raises UserError where it holds another."""
    manifest = load_manifest(out)
    if manifest is None:
        return False
    refuse_other(out, manifest, request)
    for name, entry in manifest["files"].items():
        if not (out / name).exists() or read_shard_header(out / name) != entry["tokens"]:
            raise UserError(f"--out: {out / name} is missing or not as {out}/manifest.json says; delete the folder to prepare it again")
    print(f"{out} is already prepared with these arguments; nothing to do")
    return True


def refuse_other(out, found, request):
    """Raise UserError unless what `out` holds was prepared as `request` (both dicts) says."""
    differing = [key for key in request if found.get(key) != request[key]]
    if differing:
        raise UserError(f"--out: {out} holds data prepared with another {', '.join(differing)}; name another folder or delete it")


def publish(out, files):
    """Give full shards their final names. Done after progress.json lists them, and again when a kill came between."""
    for name in files:
        if (out / f"{name}.part").exists():
            os.replace(out / f"{name}.part", out / name)
            tqdm.write(f"{out / name}: {files[name]['tokens']:,} tokens")
    fsync_folder(out)


def sound(progress):
    """Whether progress.json (a dict) has all that `prepare` goes on from, in the right types."""
    numbers = [progress.get("documents"), progress.get("empty_documents")]
    if not all(isinstance(progress.get(name), dict) for name in ("request", "files", "splits")) or not isinstance(progress.get("corpus_sha256"), str):
        return False
    for split in SPLITS:
        counts = progress["splits"].get(split)
        numbers += [counts.get(name) if isinstance(counts, dict) else None for name in ("documents", "bytes", "tokens", "growing")]
    numbers += [about.get("tokens") if isinstance(about, dict) else None for about in progress["files"].values()]
    return "position" in progress and all(type(n) is int and n >= 0 for n in numbers)


def prepare(source, request, encoding, out, threads):
    """Write the shards of `source` and manifest.json into `out`, from the start or from progress.json on.
    Returns {split: {documents, bytes of text, tokens}}."""
    if (out / "progress.json").exists():
        progress = read_json(out / "progress.json")
        if not sound(progress):
            raise UserError(f"{out / 'progress.json'}: prepare_data.py did not write it so; delete {out} and prepare again")
        refuse_other(out, progress["request"], request)
        publish(out, progress["files"])
        print(f"{out}: going on after {len(progress['files'])} full shards", flush=True)
    elif any(out.glob("*.bin")):
        raise UserError(f"--out: {out} holds shards from elsewhere; name another folder")
    else:
        progress = {"request": request, "documents": 0, "empty_documents": 0, "corpus_sha256": "", "position": None, "files": {},
                    "splits": {split: {"documents": 0, "bytes": 0, "tokens": 0, "growing": 0} for split in SPLITS}}  # fmt: skip
    counts = progress["splits"]
    shards = {}
    for split in SPLITS:
        files = {name: about for name, about in progress["files"].items() if name.startswith(split)}
        shards[split] = Shards(out, split, request["shard_tokens"], files, counts[split]["growing"])
    for path in set(out.glob("*.part")) - {writer.growing for writer in shards.values() if writer.tokens}:
        path.unlink()  # begun after progress.json was written

    def checkpoint():
        for split, writer in shards.items():
            writer.sync()
            counts[split]["growing"] = writer.tokens
        progress["files"] = {name: about for writer in shards.values() for name, about in writer.files.items()}
        with atomic_write(out / "progress.json", "w") as file:
            json.dump(progress, file, indent=1)
        publish(out, progress["files"])

    texts = source.texts(progress["position"])
    if progress["position"] is None:
        chain = ""
        for text in itertools.islice(texts, progress["documents"]):
            chain = link(chain, fingerprint(text)[1])
        if chain != progress["corpus_sha256"]:
            raise UserError(f"{out} was begun with other text than the source has now; restore that, or delete the folder")

    total = sum(count["tokens"] for count in counts.values())
    limit, stop = request["max_tokens"] or float("inf"), False
    try:
        with tqdm(total=request["max_tokens"], initial=total, unit="tok", unit_scale=True, mininterval=1, disable=None) as bar:
            for batch, position in encoded_batches(source, texts, encoding, threads):
                for digest, length, tokens in batch:
                    if length is not None:  # a document starts
                        if stop := total >= limit:
                            break
                        split = split_of(digest, request)
                        progress["documents"] += 1
                        progress["empty_documents"] += not length
                        progress["corpus_sha256"] = link(progress["corpus_sha256"], digest)
                        counts[split]["documents"] += length > 0
                        counts[split]["bytes"] += length
                    shards[split].write(tokens)
                    counts[split]["tokens"] += len(tokens)
                    total += len(tokens)
                bar.update(total - bar.n)
                if stop:
                    break
                if position is not False:
                    progress["position"] = position
                    if sum(len(writer.files) for writer in shards.values()) > len(progress["files"]):
                        checkpoint()
        if not total:
            raise UserError("--source: there is not one document with text in it; give other files")
        for split, fraction in ("val", request["val_frac"]), ("test", request["test_frac"]):
            if fraction and not counts[split]["tokens"]:
                raise UserError(f"--{split}-frac: {fraction} of {progress['documents']} documents left {split} empty; "
                                f"raise it, or set it to 0 to do without {split}")  # fmt: skip
        for writer in shards.values():
            writer.finish()
        checkpoint()
    finally:
        if not (out / "progress.json").exists():  # nothing to go on from
            for path in out.glob("*.part"):
                path.unlink()
    splits = {split: {key: count[key] for key in ("documents", "bytes", "tokens")} for split, count in counts.items()}
    manifest = {
        "format": 1, **request, "vocab_size": encoding.n_vocab, "versions": {"tiktoken": importlib.metadata.version("tiktoken")},
        "source_revision": (progress["position"] or {}).get("revision"), "documents": progress["documents"],
        "empty_documents": progress["empty_documents"], "corpus_sha256": progress["corpus_sha256"], "splits": splits,
        "files": dict(sorted(progress["files"].items())),
    }  # fmt: skip
    with atomic_write(out / "manifest.json", "w") as file:
        json.dump(manifest, file, indent=1)
    (out / "progress.json").unlink()
    return splits


def number(text):
    value = float(text)  # 2.5e9 is a number of tokens too
    if not 1 <= value < 2**53 or value % 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above zero")
    return int(value)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="+", default=["docs"], help="docs (default), fineweb-edu, or .txt, .jsonl, .parquet files")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="gpt2", help="default: %(default)s")
    parser.add_argument("--out", required=True, help="folder for shards and manifest.json")
    parser.add_argument("--max-tokens", type=number, help="stop after the document that reaches so many, all splits together")
    parser.add_argument("--val-frac", type=float, default=0.01, help="of the documents; default: %(default)s")
    parser.add_argument("--test-frac", type=float, default=0.01, help="of the documents; default: %(default)s")
    parser.add_argument("--shard-tokens", type=number, default=100_000_000, help="tokens a shard; default: %(default)s")
    parser.add_argument("--threads", type=number, default=min(os.cpu_count() or 1, 16), help="default: %(default)s")
    parser.add_argument("--wait", action="store_true", help="where another process prepares this folder, wait for it to end")
    args = parser.parse_args(argv)
    if args.shard_tokens >= 2**31:
        raise UserError(f"--shard-tokens: {args.shard_tokens} does not fit a shard's header; stay below {2**31}")
    if not (args.val_frac >= 0 and args.test_frac >= 0 and args.val_frac + args.test_frac < 1):
        raise UserError(f"--val-frac {args.val_frac} and --test-frac {args.test_frac}: give two from 0 up that leave some to train")
    named = {"docs": lambda: Docs(args.threads), "fineweb-edu": FineWebEdu}
    if len(args.source) > 1 and set(args.source) & set(named):
        raise UserError(f"--source: {' '.join(args.source)}: docs and fineweb-edu stand alone (a file of that name: ./docs)")
    source = named.get(args.source[0], lambda: Files(args.source))()
    request = {"source": source.about, "tokenizer": args.tokenizer, "split_rule": SPLIT_RULE, "val_frac": args.val_frac,
               "test_frac": args.test_frac, "max_tokens": args.max_tokens, "shard_tokens": args.shard_tokens}  # fmt: skip
    if not args.out:
        raise UserError("--out: is empty; name a folder for the shards")
    out = Path(args.out)
    if already(out, request):
        return
    encoding = get_tokenizer(args.tokenizer)
    if encoding.n_vocab > 2**16:
        raise UserError(f"--tokenizer: {args.tokenizer} has {encoding.n_vocab} tokens; shards are uint16, at most {2**16}")
    make_folder(out, "out")
    with lock_folder(out, args.wait):
        if already(out, request):  # by the process that was waited for
            return
        start = time.time()
        try:
            splits = prepare(source, request, encoding, out, args.threads)
        except OSError as error:
            where = error.filename or f"cannot write in {out}"
            raise UserError(f"{where}: {error.strerror}; mend that and run the same command: full shards are kept") from error
    megabytes, seconds = sum(split["bytes"] for split in splits.values()) / 1e6, time.time() - start
    print(f"{out}: " + ", ".join(f"{split} {about['tokens']:,}" for split, about in splits.items()) + " tokens; "
          f"{megabytes:.1f} MB of text in {seconds:.1f} s")  # fmt: skip


if __name__ == "__main__":
    run_main(main)
