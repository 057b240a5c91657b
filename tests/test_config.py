"""lib/config.py: defaults <- TOML file <- command line, and which keys make a run what it is."""

import ast
import dataclasses
import re
import subprocess
import sys

import pytest
from helpers import ENV, MACHINE, ROOT

from lib.config import KEYS, TrainConfig, check_config, coerce, identity, parse_config
from lib.errors import UserError
from lib.shards import batch_windows
from model import ModelConfig

MODEL_KEYS = {field.name: field for field in dataclasses.fields(ModelConfig)}
MAY_BE_ZERO = set(
    """vocab_size seed stop_tokens warmup_tokens min_lr_ratio weight_decay grad_clip
    eval_interval checkpoint_interval""".split()
)
WITHOUT_TORCH = {"torch", "tiktoken", "datasets", "matplotlib", "scipy"}  # what --help must not wait for


def parse(*argv):
    return parse_config(list(map(str, argv)), "description")[0]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "mine.toml"


# ---- what is read ----


def test_the_command_line_goes_over_the_file_and_the_file_over_the_defaults(file):
    file.write_text('variant = "block"\nn_layer = 4\nlr = 1e-3\nbetas = [0.8, 0.9]\nverify = true\ncompile = false\n')
    config, name = parse_config([str(file), "--n_layer=6", "--seed", "3"], "description")
    assert name == "mine"
    assert config == TrainConfig(
        variant="block", n_layer=6, lr=1e-3, betas=(0.8, 0.9), verify=True, compile="false", seed=3
    )


def test_without_a_file_the_defaults_stand():
    assert parse_config([], "description") == (TrainConfig(), "default")


@pytest.mark.parametrize("argv", ["--warmup_tokens=7", "--warmup_tokens 7", "--warmup-tokens=7", "--warmup-tokens 7"])
def test_a_key_may_be_spelled_with_an_equals_sign_or_a_space_dashes_or_underscores(argv):
    assert parse(*argv.split()) == TrainConfig(warmup_tokens=7)


def test_only_a_key_is_respelled_and_the_last_of_two_values_stands():
    assert parse("--out-dir=a-b=c--d", "--seed=2", "--seed=3") == TrainConfig(out_dir="a-b=c--d", seed=3)
    assert parse("--data_dir", "two words", "--tokenizer=").data_dir == "two words"


def test_flags_may_stand_bare_and_say_true_or_false():
    assert parse("--verify").verify and parse("--verify", "--seed=2").verify and parse("--verify=TRUE").verify
    assert not parse("--verify=false").verify and not parse("--verify", "false").verify


def test_tuples_are_written_with_commas():
    assert parse("--betas=0.8,0.9").betas == parse("--betas=[0.8, 0.9]").betas == (0.8, 0.9)
    assert parse("--milestones=").milestones == () and parse("--milestones=5,6e3").milestones == (5, 6000)


def test_whole_floats_are_ints_and_no_digit_of_a_long_int_is_lost(file):
    file.write_text("max_tokens = 3e9\nmilestones = [1e9, 2e9]\nlr = 1\n")
    config = parse(file, "--batch_tokens=1e3", "--warmup_tokens=2_000")
    assert (config.max_tokens, config.milestones, config.batch_tokens) == (3_000_000_000, (10**9, 2 * 10**9), 1000)
    assert config.warmup_tokens == 2000 and type(config.lr) is float and config.lr == 1
    ints = (config.max_tokens, *config.milestones, config.batch_tokens, config.warmup_tokens)
    assert all(type(n) is int for n in ints)
    long = 2**60 + 1
    assert coerce("max_tokens", str(long)) == coerce("max_tokens", long) == coerce("max_tokens", f"{long:_}") == long


def test_every_config_in_the_repository_parses():
    paths = sorted((ROOT / "configs").glob("*.toml"))
    assert paths
    for path in paths:
        assert parse_config([str(path)], "description")[1] == path.stem


# ---- what is refused ----


def test_an_unknown_key_is_refused_and_the_nearest_known_one_named(file):
    for word in ("--warmup_token=5", "--warmup-token=5", "--warmup_token"):
        with pytest.raises(
            UserError, match="^command line: unknown key 'warmup_token'; did you mean 'warmup_tokens'\\?$"
        ):
            parse(word)
    with pytest.raises(UserError, match="^command line: unknown key 'warmup'"):  # a part of a key is none
        parse("--warmup=5")
    for key, hint in dict(learning="see train.py --help", n_layers=r"did you mean 'n_layer'\?").items():
        file.write_text(f"{key} = 3\n")
        with pytest.raises(UserError, match=f"^{re.escape(str(file))}: unknown key '{key}'; {hint}$"):
            parse(file)
    file.write_text("[model]\nn_layer = 3\n")
    with pytest.raises(UserError, match="unknown key 'model'"):  # a table is no namespace
        parse(file)


WRONG = """
n_layer = 1.5; n_layer = "many"; n_layer = true; n_layer = [1]; n_layer = nan; n_layer = inf; lr = "fast"; lr = true
lr = nan; lr = inf; lr = 2026-01-01; verify = 1; verify = "yes"; variant = 3; variant = [1]; data_dir = 7
betas = 0.9; betas = [0.9]; betas = [0.9, 0.95, 0.99]; betas = ["a", "b"]; milestones = 5; milestones = [1.5]
"""


@pytest.mark.parametrize("line", re.split(r"; |\n", WRONG.strip()))
def test_a_value_of_the_wrong_type_is_refused_by_name(line, file):
    file.write_text(line)
    with pytest.raises(UserError, match=f"^config key {line.split()[0]}: .* is not of type "):
        parse(file)


WRONG_TEXT = """
--n_layer=1.5 --n_layer= --n_layer=many --n_layer=1e999 --lr=fast --lr=nan --verify=maybe --verify=
--betas=0.9 --betas=0.9,0.9,0.9 --milestones=1,x
"""


@pytest.mark.parametrize("word", WRONG_TEXT.split())
def test_text_of_the_wrong_type_is_refused_by_name(word):
    name, _, value = word[2:].partition("=")
    with pytest.raises(UserError, match=f"^config key {name}: '{value}' is not of type "):
        parse(word)


@pytest.mark.parametrize("name", [name for name, field in KEYS.items() if field.type not in (str, bool)])
def test_numbers_below_zero_are_refused_and_zero_only_where_it_means_something(name):
    below, zero = dict(betas=((-1.0, 0.5), (0.0, 0.5)), milestones=((-1,), (0,))).get(name, (-1, 0))
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


def test_values_outside_their_range_or_choices_are_refused():
    assert TrainConfig(seed=2**32 - 1).seed == 2**32 - 1 and len(batch_windows(2**32 - 1, 0, 4, 17)) == 4
    with pytest.raises(UserError, match="^config key seed: 4294967296 must be below"):
        TrainConfig(seed=2**32)
    with pytest.raises(UserError, match="^config key betas"):
        TrainConfig(betas=(0.9, 1.0))
    for name, value in dict(dtype="float16", compile="yes", tokenizer="gpt4", reads="gpu").items():
        with pytest.raises(UserError, match=f"^config key {name}: '{value}' is none of .*'{KEYS[name].default}'"):
            TrainConfig(**{name: value})


def test_a_config_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match="^config file .*nowhere.toml: No such file"):
        parse(tmp_path / "nowhere.toml")
    with pytest.raises(UserError, match="^config file .: Is a directory"):
        parse("")  # such as an unset "$CONFIG": never the defaults
    for name, content in {"broken.toml": b"n_layer = \n", "latin.toml": b'variant = "\xe9"\n'}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"^config file .*{name}: not TOML: "):
            parse(tmp_path / name)


def test_stray_words_and_missing_values_are_refused():
    for argv in (["--variant=rd", "block"], ["-x"], ["--seed=1", "2"]):
        with pytest.raises(UserError, match=f"^command line: '{argv[-1]}' is not --key=value"):
            parse(*argv)
    for argv in (["--seed"], ["--seed", "--verify"]):
        with pytest.raises(UserError, match="^command line: argument --seed: expected one argument; see .* --help$"):
            parse(*argv)


def test_a_config_cannot_be_changed_after_its_checks():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().seed = 2


# ---- the answers that must come at once ----


def test_help_lists_every_key_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit:
        parse_config(["--seed=2", "--help"], "what it does\n\n  and how")
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    assert "\nwhat it does\n\n  and how\n" in shown
    for name, field in KEYS.items():
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
        words = rf"--{name} \[?{re.escape(default)}\]?\s+{re.escape(field.metadata['help'])}\n"
        assert field.metadata["help"] and len(re.findall(words, shown)) == 1, name


@pytest.mark.parametrize(
    "word, status, error",
    [("--help", 0, []), ("--n_layr=3", 2, ["error: command line: unknown key 'n_layr'; did you mean 'n_layer'?"])],
)
def test_help_and_a_mistyped_key_do_not_wait_for_torch(word, status, error):
    """python itself says what was imported."""
    command = [sys.executable, "-X", "importtime", ROOT / "train.py", word]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120)
    assert done.returncode == status and bool(done.stdout) == (status == 0)
    assert [line for line in done.stderr.splitlines() if not line.startswith("import time:")] == error
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "lib.config" in imported and not imported & WITHOUT_TORCH


# ---- the table of keys ----


def test_the_model_keys_have_one_default_in_both_dataclasses():
    """But vocab_size, where TrainConfig's 0 stands for the manifest's."""
    assert MODEL_KEYS.keys() <= KEYS.keys()
    for name, field in MODEL_KEYS.items():
        assert KEYS[name].type == field.type
        assert KEYS[name].default == field.default or name == "vocab_size"


def test_no_key_is_dead():
    """Every key is read as config.KEY in a function other than a check, or as self.KEY in a property of ModelConfig."""
    read = set()
    for name in ("train.py", "model.py", "lib/devices.py"):
        for scope in ast.walk(ast.parse((ROOT / name).read_text())):
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


def test_a_config_of_older_code_is_the_same_run():
    """Its `fused`, a key of the machine that has gone, counts for nothing, and neither does a missing `reads`."""
    old = {name: value for name, value in dataclasses.asdict(TrainConfig()).items() if name != "reads"}
    assert identity(old | {"fused": "true"}) == identity(dataclasses.asdict(TrainConfig()))
    check_config(old | {"fused": "true", "data_id": "0" * 64, "betas": [0.9, 0.95]})


@pytest.mark.parametrize("name, value", [("n_layer", "4"), ("verify", "true"), ("compile", True), ("n_layer", 1.5)])
def test_a_recorded_config_of_another_type_is_refused(name, value):
    """On the command line or in TOML the first three are welcome."""
    with pytest.raises(UserError, match=f"^config key {name}: {value!r} is (of another|not of) type"):
        check_config(dataclasses.asdict(TrainConfig()) | {name: value})


def test_a_key_that_was_renamed_names_its_successor():
    with pytest.raises(UserError, match="unknown key 'fused'; did you mean 'reads'?"):
        parse_config(["--fused=false"], "")
