# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Keep freed memory in the process, if the C library supports it."""

import ctypes
import sys
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # from malloc.h
# Bytes: larger blocks still come from the system, and free memory beyond this is returned to it. The tables of a
# paper-size network take up to 40 MB; a node with a small network must not hold memory that it does not need.
SMALL_NETWORK, LARGE_NETWORK = (32 * 2**20, 32 * 2**20), (64 * 2**20, 1024 * 2**20)
RELEASE_SECONDS = 10.0  # between two calls of `release_freed_memory` by a program that runs for hours


def keep_freed_memory(large: bool = False) -> bool:
    """Make glibc reuse freed blocks instead of returning large ones to the system; returns whether that worked.

    Otherwise a tensor of some megabytes gets new pages each time, and clearing them costs several times as much as the
    operation itself. One arena, because a worker thread's own arena cannot hold large blocks. large: for a network of
    the paper's size. Programs call this (`lepard`, `lepard_node`); importing the library never does.
    """
    mallopt = _from_glibc("mallopt")
    if mallopt is None:
        return False
    largest, free = LARGE_NETWORK if large else SMALL_NETWORK
    settings = (M_MMAP_THRESHOLD, largest), (M_TRIM_THRESHOLD, free), (M_ARENA_MAX, 1)
    agreed = [mallopt(name, value) for name, value in settings]
    return all(agreed)


def release_freed_memory() -> None:
    """Return freed blocks to the system, also those between blocks in use, if the C library supports it.

    Tables of ever other sizes fragment the memory, so that a process seems to grow for hours. It takes up to 13 ms,
    and the next tables need new pages.
    """
    trim = _from_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _from_glibc(name: str) -> Any:
    """A function of glibc, or None with another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
