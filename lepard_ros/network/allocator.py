# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Keep freed memory in the process, where the C library lets us."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # from malloc.h
# Bytes: a larger block still comes from the system, and when more than this is free at the end it goes back.
# The tables of the paper's size have up to 40 MB; a node with a small network is not to hold what it will not need.
SMALL_NETWORK, LARGE_NETWORK = (32 * 2**20, 32 * 2**20), (64 * 2**20, 1024 * 2**20)


def keep_freed_memory(large: bool = False) -> bool:
    """Ask glibc to reuse freed blocks instead of giving each large one back to the system; whether it agreed.

    A tensor of some megabytes otherwise gets new pages from the system each time, and clearing those costs several
    times what the operation on it does. One arena, because the worker thread's own could not hold large blocks.
    large: for a network of the paper's size. The programs call this (`lepard`, `lepard_node`), importing never does.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    largest, free = LARGE_NETWORK if large else SMALL_NETWORK
    settings = (M_MMAP_THRESHOLD, largest), (M_TRIM_THRESHOLD, free), (M_ARENA_MAX, 1)
    agreed = [mallopt(name, value) for name, value in settings]
    return all(agreed)
