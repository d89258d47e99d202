# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The ROS 2 side: translates messages to and from the core, which knows nothing of ROS."""
