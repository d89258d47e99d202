# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Import of Open3D; only this module imports it."""

import ctypes
import ctypes.util
import importlib
from functools import lru_cache
from types import ModuleType

from lepard_ros.errors import InputError


@lru_cache(maxsize=1)
def import_open3d() -> ModuleType:
    """Import and return Open3D.

    Raises InputError when Open3D, or the system library it is linked with, is missing.
    """
    _preload_libusb()
    try:
        return importlib.import_module("open3d")
    except ModuleNotFoundError as error:
        if error.name != "open3d":
            raise
        raise InputError("Open3D is missing: pip install open3d-cpu (open3d on other than x86-64 Linux).") from error
    except OSError as error:
        raise InputError(
            f"Open3D cannot load a system library ({error}): pip install libusb-package, or apt install libusb-1.0-0."
        ) from error


def _preload_libusb() -> None:
    """Load libusb from its wheel: Open3D's camera drivers are linked with it and a bare machine lacks it."""
    if ctypes.util.find_library("usb-1.0"):
        return
    try:
        libusb_package = importlib.import_module("libusb_package")
    except ModuleNotFoundError:
        return  # Open3D may have been built without the drivers; if not, import_open3d says what to install.
    library = libusb_package.get_library_path()
    if library is not None:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
