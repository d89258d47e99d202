# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The error type for messages to the user."""


class InputError(ValueError):
    """Invalid input; the message says what is wrong and what to do.

    The command line prints it without a traceback and exits with code 2; the node logs and counts it.
    """
