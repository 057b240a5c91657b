"""The keys of a run, from three places: a dataclass's defaults <- a TOML file <- the command line."""

import argparse
import dataclasses
import difflib
import math
import re
import tomllib
import typing
from decimal import Decimal
from functools import partial
from pathlib import Path

from lib.errors import Parser, UserError
from lib.tokenizers import TOKENIZERS


def key(default, help, zero=False, choices=None, machine=False):
    """A key that is part of a run's identity. `zero`: 0 is allowed. `choices`: the values allowed."""
    meta = dict(help=help, zero=zero, choices=choices, machine=machine)
    return dataclasses.field(default=default, metadata=meta)


# A key of the machine (device, compile) or of reporting (out_dir, milestones, stop_tokens). Both kinds may differ when
# a run resumes and between the runs of a pair.
machine = partial(key, machine=True)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. Raises UserError, naming the key, for a value out of range."""

    # model (model.py's ModelConfig)
    variant: str = key("rd", "how sublayers read the depth states, a name in model.py's VARIANTS")
    vocab_size: int = key(0, "true vocabulary, in tokens; 0: the manifest's, or GPT-2's where there is none", zero=True)
    n_layer: int = key(16, "layers, of two sublayers each")
    n_head: int = key(9, "attention heads")
    d_model: int = key(576, "width")
    d_mlp: int = key(2528, "hidden width of the MLP")
    context: int = key(1024, "tokens per sequence")
    n_blocks: int = key(8, "blocks of depth; divides 2 n_layer")
    norm_eps: float = key(1e-8, "added to the mean square in every RMSNorm")
    rope_theta: float = key(10000.0, "base of the rotary frequencies")
    init_std: float = key(0.02, "standard deviation of the initial weights")
    # data
    data_dir: str = machine("data/fineweb-edu", "folder of *train*.bin and *val*.bin shards")
    tokenizer: str = key(
        "", "tokenizer of shards without a manifest: gpt2 or bytes; else the manifest's", choices=("", *TOKENIZERS)
    )
    verify: bool = machine(False, "hash every shard against the manifest before the run")
    # protocol; tokens are predicted tokens
    seed: int = key(1, "drives initialisation and the order of the data", zero=True)
    batch_tokens: int = key(2**19, "tokens per update, over all ranks")
    max_tokens: int = key(2_000_000_000, "tokens of the schedule")
    stop_tokens: int = machine(0, "tokens at which to stop, on the same schedule; 0: max_tokens", zero=True)
    warmup_tokens: int = key(100_000_000, "tokens of linear warm-up", zero=True)
    lr: float = key(6e-4, "peak learning rate")
    min_lr_ratio: float = key(0.1, "final over peak learning rate, reached by a cosine", zero=True)
    weight_decay: float = key(0.1, "AdamW's, on matrices only", zero=True)
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW's")
    adam_eps: float = key(1e-8, "AdamW's")
    grad_clip: float = key(1.0, "global gradient norm; 0: no clipping", zero=True)
    # evaluation and reporting
    eval_tokens: int = key(2**22, "tokens of the fixed validation windows, and of the test windows at the end")
    milestones: tuple[int, ...] = machine((), "tokens at which to evaluate; empty: 1/8, 1/4, 1/2 and all of max_tokens")
    eval_interval: int = machine(0, "updates between further evaluations; 0: milestones and the end only", zero=True)
    log_interval: int = machine(10, "updates between log lines")
    checkpoint_minutes: float = machine(10.0, "minutes between checkpoints")
    checkpoint_interval: int = machine(0, "updates between further checkpoints; 0: by the clock only", zero=True)
    out_dir: str = machine("", "the run's folder; empty: out/CONFIG/VARIANT-sSEED")
    wait: bool = machine(False, "where another process trains this very run, wait for it to end")
    # machine
    device: str = machine("auto", "auto: cuda, else mps, else cpu; or cpu, cuda, cuda:1, mps")
    dtype: str = key(
        "auto", "auto: bfloat16 autocast on CUDA, else float32", choices=("auto", "float32", "bfloat16", "float64")
    )
    compile: str = machine(
        "auto", "torch.compile; auto: on CUDA only (on a CPU it needs g++)", choices=("auto", "true", "false")
    )
    reads: str = machine(
        "auto",
        "backend of the depth reads, in kernels/; auto: cpu for float32 or float64 on a CPU with a C compiler",
        choices=("auto", "plain", "cpu"),
    )
    micro_batch: int = machine(16, "sequences per rank per pass")
    deterministic: bool = machine(False, "only kernels that give the same bits every time; slower on a GPU")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, zero, choices = getattr(self, field.name), field.metadata["zero"], field.metadata["choices"]
            if field.type not in (str, bool):
                numbers = value if isinstance(value, tuple) else (value,)
                if not all(number > 0 or (number == 0 and zero) for number in numbers):
                    wanted = "zero or more" if zero else "above zero"
                    raise UserError(f"config key {field.name}: {value} must be {wanted}")
            if choices and value not in choices:
                raise UserError(f"config key {field.name}: {value!r} is none of {', '.join(map(repr, choices))}")
        end = f"is beyond the schedule's end, max_tokens = {self.max_tokens}; lower one or raise the other"
        if self.stop_tokens > self.max_tokens:
            raise UserError(f"config key stop_tokens: {self.stop_tokens} {end}")
        if max(self.milestones, default=0) > self.max_tokens:
            default = "--milestones= for 1/8, 1/4, 1/2 and all of it"
            raise UserError(f"config key milestones: {max(self.milestones)} {end}, or {default}")
        if self.seed >= 2**32:
            raise UserError(f"config key seed: {self.seed} must be below 2**32, numpy's limit")
        if max(self.betas) >= 1:
            raise UserError(f"config key betas: {self.betas} must lie below 1")


KEYS = {field.name: field for field in dataclasses.fields(TrainConfig)}
RENAMED = {"fused": "reads"}


def identity(config):
    """The part of a config dict that must match when a run resumes. Two runs of a pair may differ in `variant`.

    Keys that TrainConfig does not have are left out: the configs of older runs have a machine key `fused`.
    """
    return {name: value for name, value in config.items() if name in KEYS and not KEYS[name].metadata["machine"]}


def check_config(values):
    """Raise UserError unless `values` (a dict from JSON) have TrainConfig's types and ranges. Unknown keys pass."""
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in KEYS}
    typed = {name: coerce(name, value) for name, value in values.items()}
    for name, value in values.items():
        if typed[name] != value:
            raise UserError(f"config key {name}: {value!r} is of another type")
    TrainConfig(**typed)


# ---- from TOML or text to a key's type: each raises LookupError, TypeError or ValueError where that cannot be ----


def flag(value):
    return {"true": True, "false": False}[str(value).lower()]


def text(value):
    if isinstance(value, bool):
        return str(value).lower()  # compile = true
    if not isinstance(value, str):
        raise TypeError
    return value


def real(value):
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError
    return float(value)


def whole(value):
    """An int, also from 2e9, "2e9" and "2_000"."""
    real(value)  # it is a finite number
    exact = Decimal(value)  # a float would lose the last digits of a long int
    if exact != int(exact):
        raise ValueError
    return int(exact)


CONVERTERS = {bool: flag, str: text, float: real, int: whole}


def coerce(name, value):
    """`value`, from TOML, JSON or the command line, in the type of the key `name`. Raises UserError naming the key."""
    kind = KEYS[name].type
    try:
        if not typing.get_args(kind):
            return CONVERTERS[kind](value)
        items = value
        if isinstance(value, str):  # --betas=0.9,0.95
            items = [part for part in value.strip("[]() ").split(",") if part.strip()]
        first, last = typing.get_args(kind)  # (int, ...) or (float, float)
        if not isinstance(items, (list, tuple)) or (last is not ... and len(items) != 2):
            raise TypeError
        return tuple(CONVERTERS[first](item) for item in items)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        wanted = kind if typing.get_args(kind) else kind.__name__
        raise UserError(f"config key {name}: {value!r} is not of type {wanted}") from None


def check_key(name, origin):
    """Raise UserError unless `name` is a key; the nearest one is named."""
    if name not in KEYS:
        near = [RENAMED[name]] if name in RENAMED else difflib.get_close_matches(name, KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see train.py --help"
        raise UserError(f"{origin}: unknown key {name!r}; {hint}")


def read_toml(path):
    """{key: value} of the config file `path`. Raises UserError naming the file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config file {path}: {error.strerror}; the known ones are configs/*.toml") from error
    except ValueError as error:  # TOML syntax, or not UTF-8
        raise UserError(f"config file {path}: not TOML: {error}") from error
    for name in table:
        check_key(name, path)
    return {name: coerce(name, value) for name, value in table.items()}


def parse_config(argv, description):
    """(TrainConfig, name of the config) from `[CONFIG.toml] [--key=value ...]`. Raises UserError.

    `--key value`, `--some-key=value` and a bare `--flag` work too. --help prints the description and all keys.
    """
    parser = Parser(
        usage="%(prog)s [CONFIG.toml] [--key=value ...]",
        description=description,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
        allow_abbrev=False,
    )
    group = parser.add_argument_group("keys, with their defaults")
    for name, field in KEYS.items():
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
        bare = dict(nargs="?", const=True) if field.type is bool else {}
        convert = partial(coerce, name)
        group.add_argument(
            f"--{name}", type=convert, default=argparse.SUPPRESS, metavar=default, help=field.metadata["help"], **bare
        )
    path, *words = argv if argv and not argv[0].startswith("-") else [None, *argv]
    words = [re.sub("^--[^=]+", lambda match: "--" + match[0][2:].replace("-", "_"), word) for word in words]
    given, rest = parser.parse_known_args(words)
    for word in rest:
        if word.startswith("--"):
            check_key(word[2:].partition("=")[0], "command line")
        parser.error(f"{word!r} is not --key=value, and the one CONFIG.toml comes first")
    table, name = ({}, "default") if path is None else (read_toml(Path(path)), Path(path).stem)
    return TrainConfig(**(table | vars(given))), name
