# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
