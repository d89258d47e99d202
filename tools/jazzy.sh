#!/bin/sh
# ROS 2 Jazzy as Ubuntu 24.04 has it (Python 3.12, numpy 1.26), from wheels, in an environment of its own: builds the
# messages and runs the tests named, or those that touch ROS. Needs python3.12, g++ and 8 GB of disc.
#   tools/jazzy.sh [arguments of pytest]
set -e
here=$(cd "$(dirname "$0")/.." && pwd)
venv=${JAZZY_VENV:-$here/.build/jazzy}
# A sourced workspace, or the Kilted wheels of .venv, would mix with this one.
unset AMENT_PREFIX_PATH CMAKE_PREFIX_PATH PYTHONPATH LD_LIBRARY_PATH ROS_DISTRO _ROS_WHEELS_BOOTSTRAP_COMPLETE
ros=$(for name in diagnostic-msgs geometry-msgs lifecycle-msgs nav-msgs sensor-msgs std-msgs visualization-msgs std-srvs \
  rosidl-default-generators rosidl-core-generators ament-cmake ament-package ament-cmake-include-directories \
  ament-cmake-ros ament-cmake-gmock ament-cmake-gtest ament-cmake-pytest python-cmake-module; do echo "ros-jazzy-$name"; done)
if [ ! -f "$venv/.ready" ]; then
  ${PYTHON:-python3.12} -m venv "$venv"
  # shellcheck disable=SC2086
  "$venv/bin/pip" install --quiet "numpy==1.26.*" "ros-jazzy-rclpy[fastrtps]" $ros "setuptools>=68,<80" wheel cmake ninja \
    catkin_pkg torch scipy safetensors tqdm Pillow open3d-cpu libusb-package small_gicp PyYAML rosbags evo matplotlib \
    pytest hypothesis transforms3d
  touch "$venv/.ready"
fi
export PATH="$venv/bin:$PATH"
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git -C "$here" archive HEAD | tar x -C "$copy"
pip install --quiet --no-deps --no-build-isolation --force-reinstall "$copy"
python -c "import sys, numpy, rclpy; print('Python', sys.version.split()[0], 'numpy', numpy.__version__, rclpy.__file__)"
cd "$copy" && rm -rf lepard_ros  # so that the tests import what was installed
if [ $# = 0 ]; then
  set -- test/test_compat.py test/test_pointcloud2.py test/test_parameters.py test/test_warp_message.py test/test_bags.py \
    test/test_replay.py test/test_node_rigid.py test/test_node_frames.py test/test_node_deformable.py \
    test/test_faults_input.py test/test_faults_sequence.py
fi
python -m pytest -q -p no:cacheprovider "$@"
