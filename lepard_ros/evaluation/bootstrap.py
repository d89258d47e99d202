# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Bootstrap confidence intervals, so that noise is not mistaken for a gain."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000


class Interval(NamedTuple):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: ArrayLike, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The mean of `values` (N,) and its 95 % percentile interval, resampling pairs with replacement.

    >>> mean_interval([1.0, 1.0, 1.0])
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    data = np.asarray(values, dtype=float)
    if data.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    low, high = np.percentile(_resampled_means(data, seed, resamples), [2.5, 97.5])
    return Interval(float(data.mean()), float(low), float(high))


def paired_difference(
    first: ArrayLike,
    second: ArrayLike,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """The mean of first - second over the same pairs with its 95 % interval: a win when the interval excludes 0.

    >>> paired_difference([1.0, 1.0], [0.0, 0.0])
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    one, other = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if one.shape != other.shape:
        raise ValueError(f"paired_difference needs two equally long lists, got {one.shape} and {other.shape}")
    return mean_interval(one - other, seed, resamples)


def _resampled_means(data: NDArray[np.floating], seed: int, resamples: int) -> NDArray[np.floating]:
    """The means (resamples,) of as many draws with replacement."""
    draws = np.random.default_rng(seed).integers(0, data.size, size=(resamples, data.size))
    return data[draws].mean(axis=1)
