"""Matches on a surface that bends: neighbours must move together."""

from dataclasses import dataclass

import numpy as np

from lepard_ros.registration.graph import BoolArray
from lepard_ros.registration.types import Matches


@dataclass(frozen=True)
class FilterSettings:
    """x"""


def filter_matches(matches: Matches, settings: FilterSettings | None = None) -> BoolArray:
    """x"""
    return np.ones(len(matches.confidence), dtype=bool)
