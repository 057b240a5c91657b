"""Paired statistics: a variant's differences to its parent, in nats per token, one per seed."""

import math

import numpy as np

PARENT = "block"  # the variant that every other one is compared with


def perplexity_change(difference):
    """exp(difference of two NLLs) - 1, kept within a float."""
    return math.expm1(min(difference, 700.0))


def t_interval(values):
    """The 95 % interval [low, high] = mean -+ t(0.975, n - 1) sd / sqrt(n), sd over n - 1. None for one value."""
    from scipy import stats

    n = len(values)
    if n < 2:
        return None
    standard_error = np.std(values, ddof=1) / math.sqrt(n)  # stats.t.interval takes no scale of zero
    return [float(np.mean(values) + end * standard_error) for end in stats.t.interval(0.95, n - 1)]


def sign_test(wins, losses):
    """(p, floor) of the exact two-sided sign test: wins ~ Binomial(wins + losses, 1/2). p = 1 where there is no sign.

    The floor is the p of a clean sweep, 2^(1 - n): no outcome of these n pairs could give less.
    """
    from scipy import stats

    n = wins + losses
    p = float(stats.binomtest(wins, n).pvalue) if n else 1.0
    return p, min(1.0, 2.0 ** (1 - n))


def mean_and_sd(values):
    """n, mean, sd (over n - 1) and 95 % t interval of the mean. sd and interval are None for one value."""
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"n": len(values), "mean": float(np.mean(values)), "sd": sd, "interval": t_interval(values)}


def paired_statistics(differences):
    """Statistics of differences variant - parent. A win is a difference below zero, a tie one of exactly zero.

    Ties say nothing about the sign: the sign test leaves them out. The perplexity change exp(delta) - 1 is that of the
    mean difference, and its interval is the mean's, transformed.
    """
    summary = mean_and_sd(differences)
    wins, losses = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    p, floor = sign_test(wins, losses)
    return {
        **summary,
        "wins": wins,
        "losses": losses,
        "ties": len(differences) - wins - losses,
        "sign_p": p,
        "sign_floor": floor,
        "perplexity_change": perplexity_change(summary["mean"]),
        "perplexity_interval": summary["interval"] and [perplexity_change(end) for end in summary["interval"]],
    }
