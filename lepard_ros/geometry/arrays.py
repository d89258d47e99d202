# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Type aliases for arrays and random generators."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.integer]
BoolArray = NDArray[np.bool_]
Generator = np.random.Generator
