"""What the scripts share: errors, files, configuration, token bins and their order, run folders.

Nothing here imports torch at the top, so that `--help` and a mistyped key answer at once.
"""

import contextlib
import dataclasses
import difflib
import fcntl
import functools
import hashlib
import json
import os
import sys
import time
import tomllib
import typing
import zipfile
from pathlib import Path

import numpy as np

# ---- errors ----------------------------------------------------------------------------------------------------------


class UserError(Exception):
    """Something the user can mend. The message is one line that names the file or key and the way out."""


class RankError(UserError):
    """A UserError that one rank of several met alone: every rank prints its own. Of the others rank 0 speaks for all."""


def or_exit(function, *arguments):
    """function(*arguments), but a UserError becomes one line on stderr and exit status 2."""
    try:
        return function(*arguments)
    except UserError as error:
        if isinstance(error, RankError) or os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # the first rank to end ends all under torchrun: let rank 0 speak
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from what is complete", file=sys.stderr, flush=True)
        sys.exit(130)


def run_main(main):
    """Run a script: main() returns its exit status. It ends with 1 and without a word where the reader of its output has gone
    (`| head`), with one line where the output cannot be written."""
    try:
        status = or_exit(main)
        sys.stdout.flush()
        sys.exit(status)
    except OSError as error:
        if error.filename is not None:  # about a file, not about the output
            raise
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def log(message):
    """One line on stdout, from rank 0 alone. Where nobody can take it any more - its reader has gone, the disk under it is full -
    the run goes on without."""
    if os.environ.get("RANK", "0") == "0":
        try:
            print(message, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def warn(message):
    """One line on stderr; of several ranks rank 0's alone."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {message}", file=sys.stderr, flush=True)


# ---- files -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_write(path, mode="wb"):
    """Open `path` for writing so that it appears under its name only when complete: temporary name, fsync, rename.

    A failed or killed write leaves what stood there before. The temporary name is fixed (`NAME.tmp`): one writer a folder.
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
    """Create the folder that config key or flag `key` names."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{key}: cannot create the folder {path}: {error.strerror}; name another with --{key}") from error


def lock_folder(folder, wait=False):
    """Hold `folder` for this process until it ends; where another process has it, refuse, or wait for that one to end.
    Returns the open lock file: keep it."""
    try:
        file = open(Path(folder) / ".lock", "a")
    except OSError as error:
        raise UserError(f"cannot write in {folder}: {error.strerror}; name another folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise UserError(f"{folder} is in use by another process; let it end (--wait does), or name another folder") from None
        warn(f"{folder} is in use by another process; waiting for it to end")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:  # some cluster file systems are mounted without locks
        warn(f"{folder} cannot be locked ({error.strerror}); make sure that no other process uses it")
    return file


def file_sha256(path):
    """sha256 of a file's bytes, hex; reads in bounded chunks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path):
    """The JSON object in a file (a dict)."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        return value
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}; write it again, or take it from a copy") from error


# ---- tokenizers ------------------------------------------------------------------------------------------------------

TOKENIZERS = ("gpt2", "bytes")
END_OF_TEXT = "<|endoftext|>"


def get_tokenizer(name):
    """A tiktoken.Encoding by name: `gpt2` (50257 tokens) or `bytes` (256 bytes and <|endoftext|>, 257 tokens).

    Raises UserError for another name, and when the GPT-2 vocabulary is neither cached nor reachable.
    """
    import tiktoken

    if name == "bytes":
        # One token a byte. The pattern only says where tiktoken cuts the text; short pieces keep its merge loop linear.
        return tiktoken.Encoding(
            "bytes",
            pat_str=r"[\s\S]{1,256}",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={END_OF_TEXT: 256},
        )
    if name != "gpt2":
        raise UserError(f"tokenizer {name!r} is not known; choose one of {', '.join(TOKENIZERS)}")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken lets whatever its download raised through
        raise UserError(
            "the GPT-2 vocabulary is not cached and could not be downloaded "
            f"({type(error).__name__}); put vocab.bpe and encoder.json into a folder as "
            "6d1cbeee0f20b3d9449abfede4726ed8212e3aee and 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6 "
            "and set TIKTOKEN_CACHE_DIR to it"
        ) from error


# ---- shards: llm.c's token files -------------------------------------------------------------------------------------

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


# ---- configuration: dataclass <- TOML file <- command line -------------------------------------------------------------


def key(default, help, zero=False, choices=None, machine=False):
    """A config key. `zero`: 0 is allowed. `machine`: may differ between the runs of a pair and at a resume; every other
    key is part of a run's identity. This table is what train.py's resume and diagnose.py's pairing go by."""
    return dataclasses.field(
        default=default, metadata=dict(help=help, zero=zero, choices=choices, machine=machine)
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. The file gives what differs from these defaults, the command line what differs from the file."""

    # model (model.py's ModelConfig)
    variant: str = key("rd", "how sublayers read the depth states, a name in model.py's VARIANTS")
    vocab_size: int = key(0, "true vocabulary, in tokens; 0: the manifest's, or GPT-2's where there is none", zero=True)
    n_layer: int = key(16, "layers, of two sublayers each")
    n_head: int = key(9, "attention heads")
    d_model: int = key(576, "width")
    d_mlp: int = key(2528, "hidden width of the MLP")
    context: int = key(1024, "tokens a sequence")
    n_blocks: int = key(8, "blocks of depth; divides 2 n_layer")
    norm_eps: float = key(1e-8, "added to the mean square in every RMSNorm")
    rope_theta: float = key(10000.0, "base of the rotary frequencies")
    init_std: float = key(0.02, "standard deviation of the initial weights")
    # data
    data_dir: str = key("data/fineweb-edu", "folder of *train*.bin and *val*.bin shards", machine=True)
    tokenizer: str = key("", "tokenizer of shards without a manifest: gpt2 or bytes; else the manifest's")
    verify: bool = key(False, "hash every shard against the manifest before the run", machine=True)
    # protocol; tokens are predicted tokens
    seed: int = key(1, "drives initialisation and the order of the data", zero=True)
    batch_tokens: int = key(2**19, "tokens an update, over all ranks")
    max_tokens: int = key(2_000_000_000, "tokens of the schedule")
    stop_tokens: int = key(0, "tokens after which this run stops, on the same schedule; 0: max_tokens", zero=True, machine=True)
    warmup_tokens: int = key(100_000_000, "tokens of linear warm-up", zero=True)
    lr: float = key(6e-4, "peak learning rate")
    min_lr_ratio: float = key(0.1, "final over peak learning rate, reached by a cosine", zero=True)
    weight_decay: float = key(0.1, "AdamW's, on matrices only", zero=True)
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW's")
    adam_eps: float = key(1e-8, "AdamW's")
    grad_clip: float = key(1.0, "global gradient norm; 0: no clipping", zero=True)
    # evaluation and reporting
    eval_tokens: int = key(2**22, "tokens of the fixed validation windows (and of the test windows at the end)")
    milestones: tuple[int, ...] = key((), "tokens at which to evaluate; empty: 1/8, 1/4, 1/2 and all of max_tokens", machine=True)
    eval_interval: int = key(0, "updates between further evaluations; 0: milestones and the end only", zero=True, machine=True)
    log_interval: int = key(10, "updates between log lines", machine=True)
    checkpoint_minutes: float = key(10.0, "minutes between checkpoints", machine=True)
    checkpoint_interval: int = key(0, "updates between further checkpoints; 0: by the clock only", zero=True, machine=True)
    out_dir: str = key("", "the run's folder; empty: out/CONFIG/VARIANT-sSEED", machine=True)
    wait: bool = key(False, "where another process trains this very run, wait for it to end", machine=True)
    # machine
    device: str = key("auto", "auto: cuda, else mps, else cpu; or cpu, cuda, cuda:1, mps", machine=True)
    dtype: str = key("auto", "auto: bfloat16 autocast on CUDA, else float32", choices=("auto", "float32", "bfloat16", "float64"))
    compile: str = key("auto", "torch.compile; auto: on CUDA only (on a CPU it needs g++)",
                       choices=("auto", "true", "false"), machine=True)  # fmt: skip
    fused: str = key("auto", "phase 1 of the depth reads by fused.c; auto: on a CPU with a C compiler, in float32 or float64",
                     choices=("auto", "true", "false"), machine=True)  # fmt: skip
    micro_batch: int = key(16, "sequences a rank a pass", machine=True)
    deterministic: bool = key(False, "only kernels that give the same bits every time; slower on a GPU", machine=True)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, meta = getattr(self, field.name), field.metadata
            for number in value if isinstance(value, tuple) else [value]:
                if isinstance(number, (int, float)) and not (number > 0 or (number == 0 and (meta["zero"] or field.type is bool))):
                    raise UserError(f"config key {field.name}: {value} must be {'zero or more' if meta['zero'] else 'above zero'}")
            if meta["choices"] and value not in meta["choices"]:
                raise UserError(f"config key {field.name}: {value!r} is none of {', '.join(meta['choices'])}")
        for name in ("stop_tokens", "milestones"):
            value = max(self.milestones, default=0) if name == "milestones" else getattr(self, name)
            if value > self.max_tokens:
                why = f"config key {name}: {value} is beyond the schedule's end, max_tokens = {self.max_tokens}; lower one or raise the other"
                raise UserError(f"{why}, or --milestones= for 1/8, 1/4, 1/2 and all of it" if name == "milestones" else why)
        if self.seed >= 2**32:
            raise UserError(f"config key seed: {self.seed} must be below 2**32, numpy's limit")
        if self.tokenizer and self.tokenizer not in TOKENIZERS:
            raise UserError(f"config key tokenizer: {self.tokenizer!r} is none of {', '.join(TOKENIZERS)}")
        if not all(beta < 1 for beta in self.betas):
            raise UserError(f"config key betas: {self.betas} must lie below 1")


def identity(config):
    """The keys of a config (a dict) that must agree for a resume and, but for `variant`, within a pair of runs."""
    machine = {field.name for field in dataclasses.fields(TrainConfig) if field.metadata["machine"]}
    return {name: value for name, value in config.items() if name not in machine}


def coerce(name, kind, value):
    """`value`, from TOML or as command-line text, as the dataclass type `kind`. Whole floats such as 2e9 are ints."""
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str):  # --betas=0.9,0.95
            value = [part for part in value.strip("[]() ").split(",") if part.strip()]
        kinds = typing.get_args(kind)
        if isinstance(value, list) and (kinds[-1] is ... or len(kinds) == len(value)):
            return tuple(coerce(name, kinds[0], item) for item in value)
    elif kind is str:
        if isinstance(value, (str, bool)):
            return str(value).lower() if isinstance(value, bool) else value  # compile = true
    elif kind is bool:
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
    elif not isinstance(value, bool):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            number = float(value)
            if kind is float and np.isfinite(number):
                return number
            if kind is int and number == int(number):
                return int(value) if isinstance(value, int) or str(value).lstrip("-").isdigit() else int(number)
    wanted = getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else str(kind)
    raise UserError(f"config key {name}: {value!r} is not of type {wanted}")


def check_config(values):
    """Raise UserError unless `values` (a dict, as json reads it) have the types and ranges of TrainConfig."""
    types = {field.name: field.type for field in dataclasses.fields(TrainConfig)}
    typed = {name: coerce(name, types[name], value) for name, value in values.items()}
    for name, value in values.items():
        if typed[name] != (tuple(value) if isinstance(value, list) else value):
            raise UserError(f"config key {name}: {value!r} is of another type")
    TrainConfig(**typed)


def parse_config(argv, description):
    """(TrainConfig, name of the config) from `[CONFIG.toml] [--key=value ...]`; `--key value` and a bare `--flag` work too.

    Raises UserError for an unknown key, naming the nearest known one, and for a value of the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    if "--help" in argv or "-h" in argv:
        print(f"{description}\n\nusage: train.py [CONFIG.toml] [--key=value ...]\n\nkeys, with their defaults:")
        for field in fields.values():
            default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
            print(f"  --{field.name}={default}".ljust(34), field.metadata["help"])
        sys.exit(0)
    values, name, rest = {}, "default", list(argv)

    def put(key_name, value, origin):
        if key_name not in fields:
            near = difflib.get_close_matches(key_name, fields, n=1)
            raise UserError(f"{origin}: unknown key {key_name!r}" + (f"; did you mean {near[0]!r}?" if near else "; see train.py --help"))
        values[key_name] = coerce(key_name, fields[key_name].type, value)

    if rest and not rest[0].startswith("--"):
        path = Path(rest.pop(0))
        name = path.stem
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"config file {path}: {error.strerror}; the known ones are configs/*.toml") from error
        except ValueError as error:  # TOML syntax, or not UTF-8
            raise UserError(f"config file {path}: not TOML: {error}") from error
        for key_name, value in table.items():
            put(key_name, value, path)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise UserError(f"command line: {word!r} is not --key=value (the one CONFIG.toml comes first); see train.py --help")
        key_name, equals, value = word[2:].partition("=")
        key_name = key_name.replace("-", "_")
        if not equals and key_name in fields:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif fields[key_name].type is bool:
                value = "true"
            else:
                raise UserError(f"command line: --{key_name} wants a value: --{key_name}=...")
        put(key_name, value, "command line")
    return TrainConfig(**values), name


# ---- run folders: config.json, metrics.jsonl, ckpt.pt -----------------------------------------------------------------

CHECKPOINT_FORMAT = 1


def read_metrics(path):
    """The records of a metrics.jsonl; a line that a kill cut short is left out."""
    records = []
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and isinstance(record.get("step"), int)]


def pick_device(name, key="--device", rank=0):
    """The torch.device `name`; auto is a GPU where there is one. `cuda` is the GPU of this local rank. UserError, naming the key, for one that is not here."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{key}: {name!r} is none of auto, cpu, cuda, cuda:N, mps") from None
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(device.type, 0)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", rank)
    if (device.index or 0) >= here:
        raise UserError(f"{key}: {device} is not available here ({here} of its kind are); try --device=cpu")
    return device


def save_checkpoint(path, state):
    """Write a checkpoint so that a whole one stands under `path` or `ckpt.prev.pt` at every moment."""
    import torch

    path = Path(path)
    fresh = path.with_name("ckpt.new.pt")
    try:
        with atomic_write(fresh) as file:
            torch.save({"format": CHECKPOINT_FORMAT, **state}, file)
    except RuntimeError as error:  # torch's zip writer fails once more after the write that failed, and hides why
        cause = error.__context__.strerror if isinstance(error.__context__, OSError) else str(error).splitlines()[0]
        raise UserError(f"cannot write {path}: {cause}; earlier checkpoints are intact") from error
    if path.exists():
        os.replace(path, path.with_name("ckpt.prev.pt"))
    os.replace(fresh, path)
    fsync_folder(path.parent)


def load_checkpoint(run_dir, device="cpu"):
    """The newest whole checkpoint of a run folder (a dict), or None where there has been none. A damaged one is named in a
    warning and the one before is used; UserError where all are damaged. Only tensors and plain values are unpickled."""
    import torch

    damaged = {}  # {name: why}
    # ckpt.new.pt: a kill between the renames leaves the last whole one there, where the one before is damaged
    for path in (Path(run_dir) / name for name in ("ckpt.pt", "ckpt.prev.pt", "ckpt.new.pt")):
        if not path.exists():
            continue
        try:
            with zipfile.ZipFile(path) as archive:  # torch.load does not check the archive's checksums
                if archive.testzip() is not None:
                    raise ValueError("checksum mismatch")
            state = torch.load(path, map_location=device, weights_only=True)
            if not isinstance(state, dict):
                raise ValueError("not a checkpoint")
        except Exception as error:  # a damaged file fails in many ways
            damaged[path.name] = (str(error) or type(error).__name__).splitlines()[0]
            warn(f"{path} is damaged ({damaged[path.name]}); looking for the one before")
            continue
        if state.get("format") != CHECKPOINT_FORMAT:
            raise UserError(f"{path}: checkpoint format {state.get('format')}, this code reads {CHECKPOINT_FORMAT}")
        return state
    if damaged:
        raise UserError(f"{run_dir}: has no checkpoint that can be read ({' and '.join(damaged)} damaged); bring one back from a copy, "
                        "or delete them to train from the start")  # fmt: skip
    return None


def one_line(error):
    """An exception's whole text in one line: torch names the tensor on the second one."""
    return " ".join(str(error).split())[:300]


def load_run(run_dir, device="cpu"):
    """(model, checkpoint) of a run folder's newest whole checkpoint. Raises UserError where there is none, or none that fits."""
    from model import GPT, ModelConfig

    state = load_checkpoint(run_dir, device)
    if state is None:
        raise UserError(f"{run_dir}: has no checkpoint (ckpt.pt); name a run's folder, such as out/demo/rd-s1")
    try:
        model = GPT(ModelConfig(**{field.name: state["config"][field.name] for field in dataclasses.fields(ModelConfig)}))
        model.load_state_dict(state["model"])
        state["config"]["tokenizer"], state["step"]
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{run_dir}/ckpt.pt does not fit model.py: {one_line(error)}; name another run") from error
    return model.to(device), state
