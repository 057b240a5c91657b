"""lib/paired.py: against tabulated quantiles, counted binomials and arithmetic by hand."""

import math

import numpy as np
import pytest

from lib.paired import paired_statistics, perplexity_change, sign_test, t_interval

T_975 = {  # the 0.975 quantile of Student's t by degrees of freedom, from printed tables
    1: 12.7062047362,
    2: 4.3026527297,
    3: 3.1824463053,
    4: 2.7764451052,
    5: 2.5705818356,
    6: 2.4469118511,
    7: 2.3646242516,
    9: 2.2621571628,
    20: 2.0859634473,
}


@pytest.mark.parametrize("df", T_975)
def test_t_interval_has_the_tabulated_quantile(df):
    values = np.random.default_rng(df).normal(-0.03, 0.02, df + 1)
    half = T_975[df] * math.sqrt(((values - values.mean()) ** 2).sum() / df) / math.sqrt(df + 1)
    assert t_interval(values) == pytest.approx([values.mean() - half, values.mean() + half], rel=1e-9)


def test_t_interval_of_one_and_of_two_degrees_of_freedom():
    """Their quantiles have closed forms: tan(pi (p - 1/2)), and sqrt(2) x / sqrt(1 - x^2) with x = 2p - 1."""
    one = math.tan(math.pi * 0.475)  # of [-1, 1] the standard error is 1
    assert t_interval([-1, 1]) == pytest.approx([-one, one], rel=1e-12)
    two = math.sqrt(2) * 0.95 / math.sqrt(1 - 0.95**2) / math.sqrt(3)  # of [-1, 0, 1] it is 1 / sqrt(3)
    assert t_interval([-1, 0, 1]) == pytest.approx([-two, two], rel=1e-12)


def test_sign_test_counts_the_outcomes():
    for wins in range(9):
        for losses in range(9):
            n = wins + losses
            as_far = sum(math.comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= abs(wins - losses))
            p, floor = sign_test(wins, losses)
            assert p == pytest.approx(as_far / 2**n, rel=1e-12)
            assert floor == pytest.approx(sign_test(n, 0)[0], rel=1e-12) and floor <= p * (1 + 1e-12)
    assert sign_test(5, 0) == pytest.approx((0.0625, 0.0625), rel=1e-12)
    assert sign_test(10, 0)[0] == pytest.approx(2 / 1024, rel=1e-12)


@pytest.mark.parametrize("n", range(2, 9))
def test_paired_statistics(n):
    rng = np.random.default_rng(n)
    for differences in (rng.normal(-0.03, 0.02, n), np.round(rng.normal(0, 0.02, n), 2)):  # the second has ties
        found = paired_statistics(list(differences))
        mean = differences.sum() / n
        assert (found["n"], found["mean"]) == (n, pytest.approx(mean))
        assert found["sd"] == pytest.approx(math.sqrt(((differences - mean) ** 2).sum() / (n - 1)))
        assert found["interval"] == t_interval(differences)
        wins, ties = int((differences < 0).sum()), int((differences == 0).sum())
        losses = n - wins - ties
        assert (found["wins"], found["ties"], found["losses"]) == (wins, ties, losses)
        assert (found["sign_p"], found["sign_floor"]) == sign_test(wins, losses)
        assert found["perplexity_change"] == pytest.approx(math.exp(mean) - 1)
        assert found["perplexity_interval"] == pytest.approx([math.exp(end) - 1 for end in found["interval"]])


def test_ties_are_left_out_of_the_sign_test():
    found = paired_statistics([-1.0, -2.0, 0.0, 0.0])
    assert (found["n"], found["ties"], found["sign_p"], found["sign_floor"]) == (4, 2, 0.5, 0.5)


def test_one_difference_and_equal_differences():
    one = paired_statistics([-0.03])
    assert (one["n"], one["sd"], one["interval"], one["perplexity_interval"], one["sign_p"]) == (1, None, None, None, 1)
    same = paired_statistics([0.0] * 4)
    assert (same["sd"], same["interval"], same["ties"], same["sign_p"]) == (0, [0, 0], 4, 1)


def test_perplexity_change():
    assert perplexity_change(-0.0301) == pytest.approx(-0.0297, abs=5e-5)  # the paper's, 120M
    assert math.isfinite(perplexity_change(1e6))
