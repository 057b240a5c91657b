"""lib/report.py: numbers as text. What a report says of its runs is tested in test_diagnose.py."""

import pytest

from lib.report import interval, short, signed, table


@pytest.mark.parametrize(
    "tokens, text",
    [(2000158720, "2B"), (262144, "262k"), (999_900_000, "1000M"), (512, "512"), (500_170_752, "500M")],
)
def test_short_token_counts(tokens, text):
    assert short(tokens) == text


def test_differences_keep_their_sign_and_their_size():
    assert [signed(x) for x in (-0.03012, 0.0, 4e-6, -5e-5)] == ["-0.0301", "+0.0000", "+4e-06", "-0.0001"]
    assert (interval([-0.03, 0.01]), interval(None)) == ("[-0.0300, +0.0100]", "none for n = 1")


def test_tables_are_aligned():
    rows = [["seed", "x"], ["1", "+0.5"]]
    assert table(rows, False) == ["seed     x", "   1  +0.5"]
    assert table(rows, True) == ["| seed |    x |", "| ---: | ---: |", "|    1 | +0.5 |"]
