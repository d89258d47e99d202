#!/bin/sh
# Prints the Python to use, or says in one sentence what the machine lacks. In sh, since Python itself may be missing.
complain() { echo "lepard_ros: $1" >&2; exit 1; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

python=""
for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10}; do
  if supported "$candidate"; then python=$candidate; break; fi
done
found=$("${PYTHON:-python3}" --version 2>/dev/null || echo "no Python")
[ -n "$python" ] || complain "Python 3.10, 3.11 or 3.12 is needed and ${found} was found: install python3.12 and run make PYTHON=python3.12."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  complain "$python cannot create environments: apt install ${python##*/}-venv (or the same of your system)."
command -v "${CXX:-g++}" >/dev/null 2>&1 || command -v c++ >/dev/null 2>&1 ||
  complain "A C++ compiler is needed to build the messages: apt install g++ (or the same of your system)."
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
  complain "ROS 2 wheels exist for x86-64 Linux only: on this machine build with colcon in a ROS 2 workspace (README)."
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
[ "${free:-0}" -ge "${LEPARD_DISK_GB:-6}" ] ||
  complain "${LEPARD_DISK_GB:-6} GB of free disk space are needed and ${free:-0} GB are left here: free some and run make again."
echo "$python"
