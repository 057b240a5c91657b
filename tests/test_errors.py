"""lib/errors.py: what a script says to its user, and its exit status."""

import time

import pytest

from lib.errors import Parser, RankError, UserError, log, one_line, or_exit, warn


@pytest.fixture
def rank(monkeypatch):
    """A function that makes this process rank `name` of torchrun's, or none of them."""

    def be(name):
        monkeypatch.delenv("RANK", raising=False) if name is None else monkeypatch.setenv("RANK", name)

    return be


@pytest.mark.parametrize("name, said", [(None, True), ("0", True), ("1", False)])
def test_a_line_comes_once_from_several_ranks(name, said, rank, capsys):
    rank(name)
    warn("mind X")
    log("at X")
    assert capsys.readouterr() == (("at X\n", "warning: mind X\n") if said else ("", ""))


@pytest.mark.parametrize(
    "name, kind, said",
    [(None, UserError, True), ("0", UserError, True), ("1", UserError, False), ("1", RankError, True)],
)
def test_a_users_error_is_one_line_and_status_2(name, kind, said, rank, capsys, monkeypatch):
    """Of several ranks rank 0 speaks, and any rank for what it met alone. Silent ranks give the others time."""

    def fail():
        raise kind("file X: mend it")

    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    rank(name)
    with pytest.raises(SystemExit) as exit:
        or_exit(fail)
    assert exit.value.code == 2 and len(slept) == (not said)
    assert capsys.readouterr() == ("", "error: file X: mend it\n" if said else "")


def test_what_is_no_users_error_passes(capsys):
    assert or_exit(int, "3") == 3
    with pytest.raises(ValueError):  # our own faults keep their traceback
        or_exit(int, "three")


def test_ctrl_c_is_one_line_and_status_130(capsys):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit:
        or_exit(interrupt)
    assert exit.value.code == 130 and len(capsys.readouterr().err.splitlines()) == 1


def test_a_mistaken_argument_is_a_users_error():
    parser = Parser(prog="bench.py")
    parser.add_argument("--rounds", type=int)
    with pytest.raises(UserError, match="^command line: argument --rounds: invalid int .*; see bench.py --help$"):
        parser.parse_args(["--rounds=many"])


def test_an_exception_of_several_lines_becomes_one():
    assert one_line(ValueError("size mismatch\n\tfor w: " + "9" * 400)) == "size mismatch for w: " + "9" * 279
