"""The keys of a run: dataclass <- TOML file <- command line."""

import contextlib
import dataclasses
import difflib
import sys
import tomllib
import typing
from pathlib import Path

import numpy as np

from lib.errors import UserError
from lib.tokenizers import TOKENIZERS


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
