"""The promises that common.py keeps: configuration, shards, windows and their order, files, tokenizers.

The shards are written here, by the format's description, without common.py.
"""
import ast
import dataclasses
import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lib.config import TrainConfig, coerce, identity, parse_config
from lib.errors import RankError, UserError, or_exit, warn
from lib.files import atomic_write
from lib.run_folder import load_checkpoint, read_metrics, save_checkpoint
from lib.shards import Windows, batch_windows, check_data, epoch_order, find_shards, read_shard_header, shard_header
from lib.tokenizers import END_OF_TEXT, get_tokenizer
from model import ModelConfig

from helpers import ENV, ROOT, write_folder, write_shard

KEYS = {field.name: field for field in dataclasses.fields(TrainConfig)}
MODEL_KEYS = {field.name: field for field in dataclasses.fields(ModelConfig)}
MACHINE = {"fused", "data_dir", "verify", "stop_tokens", "milestones", "eval_interval", "log_interval", "checkpoint_interval", "checkpoint_minutes", "out_dir",
           "device", "compile", "micro_batch", "wait", "deterministic"}
MAY_BE_ZERO = {"vocab_size", "seed", "stop_tokens", "warmup_tokens", "min_lr_ratio", "weight_decay", "grad_clip", "eval_interval", "checkpoint_interval"}


@pytest.fixture
def folder(tmp_path):
    """train: 10 and 7 windows of 4, with tails; val: 3 windows; test: 2."""
    count = iter(range(10_000))
    return write_folder(tmp_path / "data", **{name: [next(count) % 251 for _ in range(size)]
                                             for name, size in {"train_000000": 43, "train_000001": 29, "val_000000": 15, "test_000000": 9}.items()})


def parse(*argv):
    return parse_config(list(map(str, argv)), "description")[0]


def script(*argv, python=()):
    return subprocess.run([sys.executable, *python, ROOT / "train.py", *argv], env=ENV, capture_output=True, text=True, timeout=120)


# ---- configuration ----

def test_the_command_line_goes_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('variant = "block"\nn_layer = 4\nlr = 1e-3\nbetas = [0.8, 0.9]\nverify = true\ncompile = false\n')
    config, name = parse_config([str(path), "--n_layer=6", "--seed", "3"], "description")
    assert name == "mine"
    assert config == TrainConfig(variant="block", n_layer=6, lr=1e-3, betas=(0.8, 0.9), verify=True, compile="false", seed=3)


def test_without_a_file_the_defaults_stand():
    assert parse_config([], "description") == (TrainConfig(), "default")


@pytest.mark.parametrize("argv", ["--warmup_tokens=7", "--warmup_tokens 7", "--warmup-tokens=7", "--warmup-tokens 7"])
def test_a_key_may_be_spelled_with_an_equals_sign_or_a_space_dashes_or_underscores(argv):
    assert parse(*argv.split()) == TrainConfig(warmup_tokens=7)


def test_flags_may_stand_bare_and_say_true_or_false():
    assert parse("--verify").verify and parse("--verify", "--seed=2").verify and parse("--verify=TRUE").verify
    assert not parse("--verify=false").verify and not parse("--verify", "false").verify
    assert parse("--betas=0.8,0.9").betas == parse("--betas=[0.8, 0.9]").betas == (0.8, 0.9)
    assert parse("--milestones=").milestones == () and parse("--milestones=5,6e3").milestones == (5, 6000)


def test_an_unknown_key_is_refused_and_the_nearest_known_one_named(tmp_path):
    with pytest.raises(UserError, match=r"^command line: unknown key 'warmup_token'; did you mean 'warmup_tokens'\?$"):
        parse("--warmup_token=5")
    path = tmp_path / "mine.toml"
    path.write_text("learning = 1\nn_layers = 3\n")
    with pytest.raises(UserError, match=r"unknown key 'learning'; see train.py --help"):
        parse(path)
    path.write_text("n_layers = 3\n")
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: unknown key 'n_layers'; did you mean 'n_layer'\?$"):
        parse(path)
    path.write_text("[model]\nn_layer = 3\n")
    with pytest.raises(UserError, match="unknown key 'model'"):  # a table is no namespace
        parse(path)


@pytest.mark.parametrize("line", ["n_layer = 1.5", 'n_layer = "many"', "n_layer = true", "n_layer = [1]", "n_layer = nan", "n_layer = inf",
                                  'lr = "fast"', "lr = true", "lr = nan", "lr = inf", "lr = 2026-01-01", "verify = 1", 'verify = "yes"',
                                  "variant = 3", "variant = [1]", "betas = 0.9", "betas = [0.9]", "betas = [0.9, 0.95, 0.99]", 'betas = ["a", "b"]',
                                  "milestones = 5", "milestones = [1.5]", "data_dir = 7"])  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_by_name(line, tmp_path):
    (tmp_path / "mine.toml").write_text(line)
    with pytest.raises(UserError, match=f"^config key {line.split()[0]}: .* is not of type "):
        parse(tmp_path / "mine.toml")


@pytest.mark.parametrize("argument", ["--n_layer=1.5", "--n_layer=", "--n_layer=many", "--lr=fast", "--lr=nan", "--verify=maybe", "--betas=0.9",
                                      "--betas=0.9,0.9,0.9", "--milestones=1,x"])  # fmt: skip
def test_command_line_text_of_the_wrong_type_is_refused_by_name(argument):
    with pytest.raises(UserError, match=f"^config key {argument[2:].partition('=')[0]}: .* is not of type "):
        parse(argument)


def test_whole_floats_are_ints_and_no_digit_of_a_long_int_is_lost(tmp_path):
    (tmp_path / "mine.toml").write_text("max_tokens = 3e9\nmilestones = [1e9, 2e9]\nlr = 1\n")
    config = parse(tmp_path / "mine.toml", "--batch_tokens=1e3")
    assert (config.max_tokens, config.milestones, config.batch_tokens, config.lr) == (3_000_000_000, (10**9, 2 * 10**9), 1000, 1.0)
    assert all(type(n) is int for n in (config.max_tokens, *config.milestones, config.batch_tokens)) and type(config.lr) is float
    assert coerce("max_tokens", int, str(2**60 + 1)) == coerce("max_tokens", int, 2**60 + 1) == 2**60 + 1


@pytest.mark.parametrize("name", [name for name, field in KEYS.items() if field.type not in (str, bool)])
def test_numbers_below_zero_are_refused_and_zero_only_where_it_means_something(name):
    pair = name == "betas"
    below, zero = ((-1.0, 0.5), (0.0, 0.5)) if pair else ((-1,), (0,)) if name == "milestones" else (-1, 0)
    with pytest.raises(UserError, match=f"^config key {name}: .* must be (zero or more|above zero)$"):
        TrainConfig(**{name: below})
    if name in MAY_BE_ZERO:
        assert getattr(TrainConfig(**{name: zero}), name) == 0
    else:
        with pytest.raises(UserError, match=f"^config key {name}: .* must be above zero$"):
            TrainConfig(**{name: zero})


def test_settings_that_cannot_fit_together_are_refused():
    fits = dict(max_tokens=10, milestones=(5, 10), stop_tokens=10)
    assert TrainConfig(**fits).stop_tokens == 10
    for name, value in dict(milestones=(5, 20), stop_tokens=20).items():
        with pytest.raises(UserError, match=rf"^config key {name}: 20 is beyond the schedule's end, max_tokens = 10;"):
            TrainConfig(**(fits | {name: value}))
    assert TrainConfig(seed=2**32 - 1).seed == 2**32 - 1 and len(batch_windows(2**32 - 1, 0, 4, 17)) == 4
    with pytest.raises(UserError, match="^config key seed: 4294967296 must be below"):
        TrainConfig(seed=2**32)
    with pytest.raises(UserError, match="^config key betas"):
        TrainConfig(betas=(0.9, 1.0))
    for name, value in dict(dtype="float16", compile="yes", tokenizer="gpt4").items():
        with pytest.raises(UserError, match=f"^config key {name}: '{value}' is none of "):
            TrainConfig(**{name: value})


def test_a_config_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"^config file .*nowhere.toml: No such file"):
        parse(tmp_path / "nowhere.toml")
    (tmp_path / "broken.toml").write_text("n_layer = \n")
    with pytest.raises(UserError, match=r"^config file .*broken.toml: not TOML: "):
        parse(tmp_path / "broken.toml")
    (tmp_path / "latin.toml").write_bytes(b'variant = "\xe9"\n')
    with pytest.raises(UserError, match=r"^config file .*latin.toml: not TOML: "):
        parse(tmp_path / "latin.toml")


def test_stray_words_and_missing_values_are_refused():
    with pytest.raises(UserError, match="^command line: 'block' is not --key=value"):
        parse("--variant=rd", "block")
    for argv in (["--seed"], ["--seed", "--verify"]):
        with pytest.raises(UserError, match="^command line: --seed wants a value"):
            parse(*argv)


def test_every_config_in_the_repository_parses():
    paths = sorted((ROOT / "configs").glob("*.toml"))
    assert paths
    for path in paths:
        assert parse_config([str(path)], "description")[1] == path.stem


def test_a_config_cannot_be_changed_after_its_checks():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().seed = 2


def test_help_lists_every_key_with_its_default_without_importing_torch():
    """The heavy import is what makes --help slow; python itself says what was imported."""
    result = script("--help", python=["-X", "importtime"])
    assert result.returncode == 0
    for name, field in KEYS.items():
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
        (line,) = re.findall(rf"^ *--{name}=(.*)$", result.stdout, re.MULTILINE)
        assert line.startswith(default + " ") or not default, name
        assert line.endswith(field.metadata["help"]) and field.metadata["help"], name
    imported = set(re.findall(r"\| +([\w.]+)$", result.stderr, re.MULTILINE))
    assert "numpy" in imported and not imported & {"torch", "tiktoken", "datasets", "matplotlib"}


def test_a_mistyped_key_answers_in_one_line_without_importing_torch():
    result = script("--n_layr=3", python=["-X", "importtime"])
    lines = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    assert (result.returncode, result.stdout) == (2, "")
    assert lines == ["error: command line: unknown key 'n_layr'; did you mean 'n_layer'?"]
    assert not re.search(r"\| +torch$", result.stderr, re.MULTILINE)


def test_the_model_keys_have_one_default_in_both_dataclasses():
    """But vocab_size, where TrainConfig's 0 stands for the manifest's."""
    assert MODEL_KEYS.keys() <= KEYS.keys()
    assert {n: KEYS[n].default for n in MODEL_KEYS if n != "vocab_size"} == {n: f.default for n, f in MODEL_KEYS.items() if n != "vocab_size"}
    assert {n: KEYS[n].type for n in MODEL_KEYS} == {n: f.type for n, f in MODEL_KEYS.items()}


def test_no_key_is_dead():
    """Every key is read as config.KEY in train.py or model.py, outside the checks, or by one of ModelConfig's properties."""
    read = set()
    for name in ("train.py", "model.py"):
        tree = ast.parse((ROOT / name).read_text())
        for scope in ast.walk(tree):
            if not isinstance(scope, ast.FunctionDef) or scope.name == "__post_init__":
                continue
            is_property = any(getattr(decorator, "id", "") == "property" for decorator in scope.decorator_list)
            for node in ast.walk(scope):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
                    if owner == "config" or (owner == "self" and is_property):
                        read.add(node.attr)
    assert KEYS.keys() - read == set()


def test_one_table_says_which_keys_are_the_machines_and_all_others_are_identity():
    assert {name for name, field in KEYS.items() if field.metadata["machine"]} == MACHINE
    config = dataclasses.asdict(TrainConfig())
    assert identity(config) == {name: value for name, value in config.items() if name not in MACHINE}
    assert identity({"seed": 3, "device": "cpu"}) == {"seed": 3}


# ---- shards ----

def test_a_shards_header_makes_the_round_trip(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(shard_header(3) + np.array([5, 6, 65535], dtype="<u2").tobytes())
    assert read_shard_header(path) == 3
    assert path.read_bytes() == write_shard(tmp_path / "other.bin", [5, 6, 65535]).read_bytes()
    assert read_shard_header(write_shard(tmp_path / "empty.bin", [])) == 0


@pytest.mark.parametrize("damage, message", [
    (lambda path: write_shard(path, [1, 2, 3], magic=20240521), "not a token shard .*magic 20240521"),
    (lambda path: write_shard(path, [1, 2, 3], version=2), "not a token shard .*version 2"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "header says 3 tokens, so 1030 bytes, but the file has 1029"),
    (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "header says 3 tokens, so 1030 bytes, but the file has 1031"),
    (lambda path: write_shard(path, [1, 2, 3], count=4), "header says 4 tokens, so 1032 bytes, but the file has 1030"),
    (lambda path: write_shard(path, [1, 2, 3], count=2), "header says 2 tokens, so 1028 bytes, but the file has 1030"),
    (lambda path: write_shard(path, [], count=-1), "header says -1 tokens"),
    (lambda path: path.write_bytes(b""), "0 bytes is too short"),
    (lambda path: path.write_bytes(path.read_bytes()[:1023]), "1023 bytes is too short"),
    (lambda path: path.unlink() or path.mkdir(), "cannot be read|too short"),
])  # fmt: skip
def test_a_damaged_shard_is_found_before_the_run_and_named(damage, message, folder):
    write_shard(folder / "train_000000.bin", [1, 2, 3])
    damage(folder / "train_000000.bin")
    with pytest.raises(UserError, match=rf"train_000000\.bin: .*({message})"):
        check_data(folder)


def test_a_folder_that_is_missing_or_has_no_train_or_val_shard_is_named(tmp_path, folder):
    with pytest.raises(UserError, match=r"data_dir: is empty; name a folder"):
        check_data("")
    with pytest.raises(UserError, match=r"data_dir: .*nowhere is not a folder; write one with"):
        check_data(tmp_path / "nowhere")
    for split in ("train", "val"):
        bare = write_folder(tmp_path / split, manifest=False, **{f"{'val' if split == 'train' else 'train'}_0": [1, 2, 3]})
        with pytest.raises(UserError, match=rf"{split}: has no \*{split}\*\.bin shard"):
            check_data(bare)


def test_shards_are_found_by_their_split_in_the_order_of_their_names(tmp_path):
    write_folder(tmp_path, manifest=False, fineweb_val_000000=[1], fineweb_train_000002=[1], fineweb_train_000001=[1], other=[1])
    names = {split: [path.name for path in paths] for split, paths in find_shards(tmp_path).items()}
    assert names == {"train": ["fineweb_train_000001.bin", "fineweb_train_000002.bin"], "val": ["fineweb_val_000000.bin"], "test": []}


@pytest.mark.parametrize("name", ["train_val_000000", "my_test_of_train", "valtest"])
def test_a_name_that_fits_two_splits_is_refused(name, folder):
    write_shard(folder / f"{name}.bin", [1])
    with pytest.raises(UserError, match=rf"{name}\.bin: its name fits the splits \w+ and \w+; rename it"):
        check_data(folder)


def test_a_folder_that_differs_from_its_manifest_is_refused(folder):
    manifest, data_id = check_data(folder)
    assert manifest == json.loads((folder / "manifest.json").read_text())
    assert data_id == hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()

    whole = (folder / "train_000001.bin").read_bytes()
    (folder / "train_000001.bin").unlink()
    with pytest.raises(UserError, match=r"train_000001\.bin is missing but has 29 in the manifest"):
        check_data(folder)
    write_shard(folder / "train_000001.bin", [1, 2])
    with pytest.raises(UserError, match=r"train_000001\.bin has 2 tokens but has 29 in the manifest"):
        check_data(folder)
    (folder / "train_000001.bin").write_bytes(whole)
    write_shard(folder / "train_000002.bin", [1, 2])
    with pytest.raises(UserError, match=r"train_000002\.bin has 2 tokens but is not in the manifest"):
        check_data(folder)
    (folder / "train_000002.bin").unlink()
    assert check_data(folder)[1] == data_id


def test_verify_finds_altered_content_that_counts_cannot_show(folder):
    check_data(folder, verify=True)
    path = folder / "train_000001.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\7\0")
    check_data(folder)
    with pytest.raises(UserError, match=r"train_000001\.bin differs from its sha256 in the manifest"):
        check_data(folder, verify=True)


@pytest.mark.parametrize("name", ["tokenizer", "vocab_size", "files"])
def test_a_manifest_without_what_a_run_needs_is_named(name, folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest[name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=rf"manifest\.json: has no '{name}'"):
        check_data(folder)
    for content in ("{", "[]", "\xff"):
        (folder / "manifest.json").write_text(content, encoding="latin-1")
        with pytest.raises(UserError, match=r"cannot read .*manifest\.json"):
            check_data(folder)


@pytest.mark.parametrize("change, message", [
    (dict(vocab_size="257"), "'vocab_size' is '257', not of type int"),
    (dict(files=[]), r"'files' is \[\], not of type dict"),
    (dict(files={"train_000000.bin": 43}), r"train_000000\.bin has no tokens or sha256"),
    (dict(files={"train_000000.bin": {"tokens": 43}}), r"train_000000\.bin has no tokens or sha256"),
])  # fmt: skip
def test_a_manifest_that_was_written_otherwise_is_named(change, message, folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(UserError, match=rf"manifest\.json: {message}; prepare the data again"):
        check_data(folder)


def test_without_a_manifest_data_are_known_by_names_sizes_and_ends(folder, tmp_path):
    """The same shards in another folder are the same data; another name, length, first or last token makes other data."""
    (folder / "manifest.json").unlink()
    manifest, data_id = check_data(folder)
    assert manifest is None
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.glob("*.bin"):
        (copy / path.name).write_bytes(path.read_bytes())
    assert check_data(copy) == (None, data_id)
    path, whole = copy / "train_000001.bin", (copy / "train_000001.bin").read_bytes()
    seen = {data_id}
    for content in (whole[:1024] + b"\7\0" + whole[1026:], whole[:-2] + b"\7\0", shard_header(28) + whole[1024:-2]):
        path.write_bytes(content)
        seen.add(check_data(copy)[1])
    path.write_bytes(whole)
    path.rename(copy / "train_000003.bin")
    seen.add(check_data(copy)[1])
    assert len(seen) == 5
    big = write_folder(tmp_path / "big", manifest=False, train_0=[1] * 100_000, val_0=[1])
    before = check_data(big)[1]
    write_shard(big / "train_0.bin", [1] * 99_999 + [2])
    assert check_data(big)[1] != before


# ---- windows ----

def naive_windows(folder, split, context):
    """Cut each shard into context + 1 tokens, every `context` tokens, as long as they are whole."""
    windows = []
    for path in sorted(folder.glob(f"{split}*.bin")):
        tokens = list(memoryview(path.read_bytes()[1024:]).cast("H"))
        while len(tokens) > context:
            windows.append(tokens[: context + 1])
            tokens = tokens[context:]
    return windows


@pytest.mark.parametrize("split, context, count", [("train", 4, 10 + 7), ("val", 4, 3), ("test", 4, 2), ("train", 7, 6 + 4), ("train", 30, 1), ("train", 42, 1)])
def test_read_gives_the_naive_slices_of_every_shard(split, context, count, folder):
    windows = Windows(folder, split, context, 257)
    expected = naive_windows(folder, split, context)
    assert len(windows) == len(expected) == count
    rows = windows.read(np.arange(count))
    assert rows.dtype == np.int64 and rows.tolist() == expected
    order = [*range(count)][::-1] + [0, 0]
    assert windows.read(order).tolist() == [expected[i] for i in order]


def test_each_token_but_a_shards_first_and_tail_is_predicted_once(folder):
    write_shard(folder / "train_000000.bin", range(43))  # 10 windows of 4: targets 1 .. 40, and 41, 42 are the tail
    write_shard(folder / "train_000001.bin", range(100, 129))  # 7 windows: targets 101 .. 128, no tail
    windows = Windows(folder, "train", 4, 257)
    targets = windows.read(np.arange(len(windows)))[:, 1:].flatten().tolist()
    assert sorted(targets) == [*range(1, 41), *range(101, 129)]


def test_shards_shorter_than_a_window_are_passed_over_and_none_longer_is_an_error(folder):
    write_shard(folder / "train_000000.bin", range(5))  # one window of 4
    write_shard(folder / "train_000001.bin", range(4))  # none
    write_shard(folder / "train_000002.bin", [])
    write_shard(folder / "train_000003.bin", range(50, 60))  # two
    windows = Windows(folder, "train", 4, 257)
    assert windows.read([0, 1, 2]).tolist() == [[0, 1, 2, 3, 4], [50, 51, 52, 53, 54], [54, 55, 56, 57, 58]]
    assert len(windows) == 3
    assert len(Windows(folder, "val", 14, 257)) == 1  # 15 tokens
    with pytest.raises(UserError, match=r"no val shard is longer than the context of 15 tokens; .*lower --context"):
        Windows(folder, "val", 15, 257)


def test_a_token_beyond_the_vocabulary_names_file_and_place(folder):
    write_shard(folder / "train_000001.bin", [1] * 13 + [99] + [1] * 15)
    windows = Windows(folder, "train", 4, 99)
    rows = [i for i in range(10, 17) if i != 13]
    write = windows.read(rows)  # without the window that holds it
    assert write.max() == 1
    with pytest.raises(UserError, match=r"train_000001\.bin: token 13 is 99, beyond the vocabulary of 99; set --vocab_size"):
        windows.read([10, 13])
    assert Windows(folder, "train", 4, 100).read([13]).max() == 99


def test_spread_windows_are_fixed_evenly_spaced_and_distinct(folder):
    windows = Windows(folder, "train", 4, 257)  # 17
    assert windows.spread(20).tolist() == windows.spread(23).tolist() == [0, 3, 6, 10, 13]
    for tokens in range(1, 80):
        ids = windows.spread(tokens)
        assert len(ids) == min(17, max(1, tokens // 4)) and ids[0] == 0 and ids[-1] < 17
        gaps = np.diff([*ids, 17])
        assert gaps.min() > 0 and gaps.max() - gaps.min() <= 1
    assert windows.spread(10**9).tolist() == list(range(17))


# ---- the order of the data ----

@pytest.mark.parametrize("batch", [1, 4, 5, 17, 30])
def test_every_window_is_read_once_an_epoch_and_batches_run_across_epochs(batch):
    """Also where a batch is longer than the data: 30 of 17."""
    stream = np.concatenate([batch_windows(3, step, batch, 17) for step in range(-(-17 * 4 // batch))])[: 17 * 4]
    epochs = [stream[i * 17 : (i + 1) * 17].tolist() for i in range(4)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4  # shuffled anew
    assert epochs == [np.random.RandomState([3, epoch]).permutation(17).tolist() for epoch in range(4)]  # NEP 19: frozen


def test_the_order_is_a_pure_function_of_seed_and_epoch():
    """Whatever was asked before, in whatever order."""
    first = [batch_windows(1, step, 4, 17).tolist() for step in range(20)]
    epoch_order.cache_clear()
    assert [batch_windows(1, step, 4, 17).tolist() for step in reversed(range(20))] == first[::-1]
    assert [batch_windows(2, step, 4, 17).tolist() for step in range(20)] != first
    assert np.concatenate(first).tolist() == np.concatenate([batch_windows(1, step, 8, 17) for step in range(10)]).tolist()


def test_the_order_neither_reads_nor_moves_a_global_generator():
    np.random.seed(5)
    torch.manual_seed(5)
    before = np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state()
    ids = [batch_windows(1, step, 4, 17).tolist() for step in range(20)]
    assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == before[:2] and torch.equal(torch.get_rng_state(), before[2])
    np.random.seed(6)
    torch.manual_seed(6)
    epoch_order.cache_clear()
    assert [batch_windows(1, step, 4, 17).tolist() for step in range(20)] == ids


# ---- files and errors ----

def test_a_write_that_fails_leaves_what_stood_there(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    with atomic_write(path, "w") as file:
        file.write("old")
        assert not path.exists()  # nothing under the name before it is complete
    assert path.read_text() == "old"
    with pytest.raises(ZeroDivisionError):
        with atomic_write(path, "w") as file:
            file.write("half of the n")
            1 / 0
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"] and path.read_text() == "old"

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*file\.json: No space left on device; files written earlier are intact"):
        with atomic_write(path, "w") as file:
            file.write("new")
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"] and path.read_text() == "old"


def test_a_name_appears_only_when_its_content_is_on_disk(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync") or fsync(descriptor))
    monkeypatch.setattr(os, "replace", lambda source, target: calls.append(Path(target).name) or replace(source, target))
    save_checkpoint(tmp_path / "ckpt.pt", {"step": 1})
    assert calls == ["fsync", "ckpt.new.pt", "fsync", "ckpt.pt", "fsync"]  # the file, and the folder after each rename


def test_a_full_disk_at_a_checkpoint_is_one_line_and_keeps_the_earlier_one(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "ckpt.pt", {"step": 1})

    def full(state, file):
        file.write(b"PK")
        raise RuntimeError("[enforce fail at inline_container.cc] unexpected pos\nand more")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"^cannot write .*ckpt\.pt: \[enforce fail at inline_container\.cc\] unexpected pos; earlier checkpoints are intact$"):
        save_checkpoint(tmp_path / "ckpt.pt", {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.pt"] and load_checkpoint(tmp_path)["step"] == 1


def test_a_warning_comes_once_from_several_ranks(capsys, monkeypatch):
    for rank, line in [(None, True), ("0", True), ("1", False)]:
        monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
        warn("mind X")
        assert capsys.readouterr() == ("", "warning: mind X\n" if line else "")


def test_the_checkpoint_before_stays_beside_the_newest(tmp_path):
    assert load_checkpoint(tmp_path) is None
    for step in (1, 2, 3):
        save_checkpoint(tmp_path / "ckpt.pt", {"step": step})
    assert {path.name: torch.load(path, weights_only=True)["step"] for path in tmp_path.iterdir()} == {"ckpt.pt": 3, "ckpt.prev.pt": 2}
    (tmp_path / "ckpt.pt").rename(tmp_path / "ckpt.new.pt")  # killed between the two renames
    assert load_checkpoint(tmp_path)["step"] == 2
    (tmp_path / "ckpt.prev.pt").write_bytes(b"")
    assert load_checkpoint(tmp_path)["step"] == 3


def test_a_checkpoint_of_another_format_is_refused_by_name(tmp_path):
    torch.save({"format": 0, "step": 1}, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=r"ckpt\.pt: checkpoint format 0, this code reads 1"):
        load_checkpoint(tmp_path)


def test_a_metrics_line_that_a_kill_cut_short_is_left_out(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n7\n\x00\xff\n{}\n')  # what a power cut may leave
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_a_users_error_is_one_line_and_status_2(capsys, monkeypatch):
    """Of several ranks rank 0 speaks, but each for what it met alone; who does not speak leaves the others the time to."""
    def fail(kind):
        raise kind("file X: mend it")

    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    assert or_exit(int, "3") == 3
    for rank, kind, line in [(None, UserError, True), ("0", UserError, True), ("1", UserError, False), ("1", RankError, True)]:
        monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as exit:
            or_exit(fail, kind)
        assert exit.value.code == 2
        assert capsys.readouterr() == ("", "error: file X: mend it\n" if line else "")
        assert len(slept) == (not line)
        slept.clear()
    with pytest.raises(ZeroDivisionError):  # our own faults keep their traceback
        or_exit(lambda: 1 / 0)


# ---- tokenizers ----

def test_the_bytes_tokenizer_is_one_token_a_byte():
    tokenizer = get_tokenizer("bytes")
    text = "naïve \x00 <|endoftext|>\n\n" + "a" * 100
    ids = tokenizer.encode(text, disallowed_special=())
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.n_vocab == 257 and tokenizer.encode(END_OF_TEXT, allowed_special="all") == [256]


def test_a_tokenizer_that_is_not_known_or_not_reachable_is_a_users_error(monkeypatch):
    with pytest.raises(UserError, match="tokenizer 'gpt5' is not known; choose one of gpt2, bytes"):
        get_tokenizer("gpt5")
    import tiktoken

    def offline(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match=r"GPT-2 vocabulary .*ConnectionError.*TIKTOKEN_CACHE_DIR"):
        get_tokenizer("gpt2")
