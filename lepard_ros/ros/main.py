# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard node`: the process of the node, from its arguments to its exit code."""

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from lepard_ros.errors import InputError
from lepard_ros.network.allocator import keep_freed_memory
from lepard_ros.network.threads import use_one_blas_thread, wait_without_spinning
from lepard_ros.ros.stop_signal import StopSignal

if TYPE_CHECKING:
    from rclpy.executors import Executor

    from lepard_ros.ros.node import LepardNode

HELP = """Run the ROS 2 node.

Parameters, remappings and log levels follow --ros-args, as for every ROS 2 node:
  lepard node --preset realsense --ros-args -r points:=/camera/depth/color/points -p odom_frame:=odom
docs/parameters.md lists the parameters."""
SPIN_SECONDS = 0.1
# Python threads share the interpreter lock; with the default interval of 5 ms the background worker delays tracking.
SWITCH_SECONDS = 0.0005


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard node`."""
    parser.add_argument("--preset", help="name of a file in config/ (such as rigid, realsense), or a YAML file")


def run(args: argparse.Namespace) -> int:
    """Run the node until SIGINT or SIGTERM."""
    from lepard_ros.ros.parameters import preset_file

    ros_arguments = list(args.ros_arguments)
    if args.preset:
        preset = ["--params-file", str(preset_file(args.preset))]
        # First, so that parameters on the command line override the preset.
        ros_arguments = ["--ros-args", *preset, *ros_arguments[1:]]
    run_node(ros_arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ros2 run lepard_ros lepard_node`: all arguments belong to ROS."""
    keep_freed_memory()
    wait_without_spinning()
    try:
        run_node(list(sys.argv[1:] if argv is None else argv))
    except InputError as error:
        print(f"lepard_node: {error}", file=sys.stderr)
        return 2


def run_node(ros_arguments: list[str]) -> NoReturn:
    """Create the node, start it unless `autostart` is false, spin it until a signal, exit with code 0."""
    stop = StopSignal()  # before slow imports: `ros2 launch` may be stopped while the node still starts
    sys.setswitchinterval(SWITCH_SECONDS)
    use_one_blas_thread()  # before numpy is imported
    try:
        _live(stop, ros_arguments)
    except SystemExit:  # a signal during the start; leaving this clause drops the frames that still hold the node
        pass
    except Exception:
        if not stop.asked:  # otherwise an import, which the signal interrupted, failed with an error of its own
            raise
    finally:
        # Dropping the last reference to the node destroys the DDS participant, and some references are cycles.
        # Otherwise the participant stays in the graph for 20 s and keeps its shared memory.
        gc.collect()
        if "rclpy" in sys.modules:
            sys.modules["rclpy"].try_shutdown()
    # Everything is closed. Tearing down torch and Open3D takes a second and aborts if the worker is still busy, so
    # exit immediately.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _live(stop: StopSignal, ros_arguments: list[str]) -> None:
    """Create the node, spin it, shut it down."""
    import rclpy
    from rclpy.executors import SingleThreadedExecutor
    from rclpy.signals import SignalHandlerOptions

    from lepard_ros.ros.node import LepardNode

    rclpy.init(args=ros_arguments, signal_handler_options=SignalHandlerOptions.NO)
    node = LepardNode()
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    _start(node)
    stop.spinning = True
    _spin(executor, node, stop)
    node.trigger_shutdown()
    executor.remove_node(node)
    node.destroy_node()
    executor.shutdown()


def _start(node: "LepardNode") -> None:
    """Configure and activate unless a lifecycle manager does; raises InputError if configuring fails."""
    from rclpy.lifecycle import TransitionCallbackReturn

    if not node.settings.autostart:
        return
    if node.trigger_configure() != TransitionCallbackReturn.SUCCESS:
        raise InputError(node.health.configure_problem or "The node could not be configured; see its log.")
    if node.trigger_activate() != TransitionCallbackReturn.SUCCESS:
        raise InputError("The node could not be activated; see its log.")


def _spin(executor: "Executor", node: "LepardNode", stop: StopSignal) -> None:
    """Run callbacks until stopped. Errors in callbacks are logged; the node continues."""
    import rclpy
    from rclpy.executors import ExternalShutdownException

    while not stop.asked and rclpy.ok():
        try:
            executor.spin_once(timeout_sec=SPIN_SECONDS)
        except ExternalShutdownException:
            return
        except Exception as error:  # one failed request must not end the node
            node.get_logger().error(f"A request failed: {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
