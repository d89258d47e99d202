# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The one error that is meant to be read by a person."""


class InputError(ValueError):
    """Bad input from outside: one sentence that says what is wrong and what to do.

    The command line prints it without a traceback and ends with code 2; the node logs and counts it.
    """
