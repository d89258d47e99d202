"""The ROS 2 side: translates messages to and from the core, which knows nothing of ROS."""
