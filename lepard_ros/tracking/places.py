# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Place recognition: one global descriptor per keyframe, pooled from the network's features, to search large maps.

The descriptor is the second moment of the cloud's features (second-order pooling) with signed square roots. It needs no
training and, like the features, does not depend on the cloud's position or rotation.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from lepard_ros.geometry.arrays import FloatArray

if TYPE_CHECKING:
    from lepard_ros.matcher import EncodedCloud


def describe(cloud: "EncodedCloud") -> FloatArray:
    """The global descriptor of a cloud, (D,) float32 of length one; empty for a cloud without features."""
    features = getattr(cloud, "fine_features", None)
    if features is None:
        features = getattr(cloud, "features", None)
    if features is None or not len(features):
        return np.zeros(0, np.float32)
    unit = torch.nn.functional.normalize(features.float(), dim=1)
    rows, columns = torch.triu_indices(unit.shape[1], unit.shape[1])
    moment = (unit.T @ unit / len(unit))[rows, columns]
    vector = torch.nn.functional.normalize(moment.sign() * moment.abs().sqrt(), dim=0)
    return vector.cpu().numpy()


def most_similar(own: FloatArray, others: Sequence[FloatArray], count: int) -> list[int]:
    """Indices of the descriptors most similar to one (D,), best first; empty if there are no descriptors."""
    if not len(own) or not others or any(len(other) != len(own) for other in others):
        return []
    likeness = np.stack(others) @ own
    return [int(index) for index in np.argsort(-likeness, kind="stable")[:count]]
