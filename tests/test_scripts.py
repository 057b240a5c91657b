"""runs/pairs.sh, sample.py and the output of scripts, as a user calls them."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from lib.errors import UserError
from lib.run_folder import load_run
import sample
from helpers import ENV, ROOT
from test_train import config_for, data, run  # noqa: F401 - data is a fixture


def pairs(*words, **env):
    path = f"{os.path.dirname(sys.executable)}:{ENV.get('PATH', os.environ['PATH'])}"
    return subprocess.run([ROOT / "runs/pairs.sh", *words], env={**ENV, "PATH": path, **env}, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("words, env", [
    (["configs/demo.toml", "rd"], {}), (["configs/demo.toml", "rd", ""], {}), (["configs/demo.toml", "", "1"], {}),
    (["nowhere.toml", "rd", "1"], {}), (["--device=cpu", "rd", "1"], {}), (["configs/demo.toml", "rd", "1"], {"JOBS": "0"}),
    (["configs/demo.toml", "rd", "1"], {"JOBS": "many"}), (["configs/demo.toml", "rd", "1", "--out-dir=x"], {}),
    (["configs/demo.toml", "\t", "1"], {}), (["configs/demo.toml", "rd", "1"], {"NPROC": "x"}),
    (["configs/demo.toml", "rd", "1", "--seed=2"], {}), (["configs/demo.toml", "rd", "1", "--variant", "block"], {}),
])  # fmt: skip
def test_pairs_refuses_what_it_cannot_do(words, env, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = pairs(*words, **env)
    assert result.returncode == 2 and result.stderr and not result.stdout


def test_a_star_is_a_word_and_no_list_of_files(monkeypatch):
    monkeypatch.chdir(ROOT)
    result = pairs("configs/demo.toml", "nope *", "1")
    assert result.returncode == 2 and result.stdout == "run 1 of 2: nope, seed 1\n"


def test_pairs_trains_each_run_once_side_by_side_and_reports_a_failure(data, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    config = config_for(data, "", max_tokens=512, milestones=())
    lines = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in ("variant", "seed", "out_dir") and value != ():
            lines.append(f"{field.name} = {json.dumps(list(value) if isinstance(value, tuple) else value)}\n")
    (tmp_path / "tiny.toml").write_text("".join(lines))
    first = pairs("tiny.toml", "block rd", "1", JOBS="2")
    assert first.returncode == 0, first.stderr
    folders = sorted(path.name for path in (tmp_path / "out" / "tiny").iterdir())
    assert folders == ["block-s1", "rd-s1"] and "run 2 of 2: rd, seed 1" in first.stdout
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    again = pairs("tiny.toml", "block nope", "1")
    assert again.returncode == 2 and "block-s1: finished" in again.stdout and "variant 'nope' is none of" in again.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


class SmallTokenizer:
    """The tests' vocabulary is smaller than any real tokenizer's."""

    eot_token = 1
    encode_ordinary = staticmethod(lambda text: [ord(letter) % 40 for letter in text])
    decode = staticmethod(lambda ids: " ".join(map(str, ids)))


def test_sample_continues_a_prompt_the_same_way_for_the_same_seed(data, tmp_path, capsys, monkeypatch):  # noqa: F811
    out = run(data, tmp_path / "out", dtype="float32").out
    monkeypatch.setattr(sample, "get_tokenizer", lambda name: SmallTokenizer)
    capsys.readouterr()
    said = []
    for extra in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--temperature", "0"]):
        sample.main([str(out), "--prompt", "ab", "--tokens", "5", *extra])
        said.append(capsys.readouterr().out.split())
    assert said[0] == said[1] != said[2] and all(len(words) == 7 for words in said)  # the prompt and five more
    idx = torch.tensor([[1, *SmallTokenizer.encode_ordinary("ab")]])
    assert said[3] == [str(token) for token in load_run(out)[0].generate(idx, 5, temperature=0)[0, 1:].tolist()]


@pytest.mark.parametrize("shell, status, error", [("> /dev/full", 2, "error: cannot write the output: No space left on device\n"), ("| true", 1, "")])
def test_output_that_nobody_takes_is_no_traceback(data, tmp_path, shell, status, error):  # noqa: F811
    run(data, tmp_path, max_tokens=256, warmup_tokens=0, milestones=())
    command = f"{sys.executable} {ROOT / 'diagnose.py'} {tmp_path} --route_tokens=0 {shell}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=ENV, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (status, error)


@pytest.mark.parametrize("words", [["nowhere"], ["nowhere", "--tokens", "0"], ["nowhere", "--device", "abacus"], ["nowhere", "--device", "cuda:99"],
                                   ["nowhere", "--seed", "99999999999999999999"], ["nowhere", "--seed", "-1"]])
def test_sample_says_what_is_wrong_in_one_line(words):
    with pytest.raises(UserError) as error:
        sample.main(words)
    assert "\n" not in str(error.value)
