# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Caches results for a surface while it exists: many clouds are verified against the same keyframe."""

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from lepard_ros.registration.types import Surface

Result = TypeVar("Result")
MOST_KEPT = 32  # results of one function


def kept_for_surface(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function of a surface and hashable values that caches its last results.

    Unlike `functools.lru_cache` it does not keep a surface alive: every cloud creates new ones, and the last 32 of
    them, with k-d tree and depth map, took 70 MB of a node. Thread-safe.
    """
    kept: OrderedDict[tuple[int, Hashable], tuple[weakref.ref[Surface], Result]] = OrderedDict()
    lock = threading.Lock()

    @functools.wraps(function)
    def remembered(surface: Surface, *values: Any) -> Result:
        name = id(surface), values
        with lock:
            known = kept.get(name)
            if known is not None and known[0]() is surface:  # the id may have been reused for another surface
                kept.move_to_end(name)
                return known[1]
        result = function(surface, *values)
        if result is surface:  # it would keep itself alive
            return result
        with lock:
            for gone in [other for other, (owner, _) in kept.items() if owner() is None]:
                del kept[gone]
            kept[name] = weakref.ref(surface), result
            if len(kept) > MOST_KEPT:
                kept.popitem(last=False)
        return result

    return remembered
