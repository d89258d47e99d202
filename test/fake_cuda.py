# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""CUDA without a GPU: tensors that hold CPU values, say that they are on cuda:0, and keep the device rules.

Inside `fake_cuda()` everything that asks for CUDA gets such tensors. Mixing them with tensors of the host, `.numpy()`
and the array protocol fail as they would on a GPU, so that a forgotten move shows on any machine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA, HOST = torch.device("cuda:0"), torch.device("cpu")
# May take indices or values of the host, as on a GPU.
MIXED = {Tensor.__getitem__, Tensor.__setitem__, Tensor.copy_, Tensor.data.__set__, Tensor.grad.__set__}  # type: ignore[attr-defined]
PROPERTIES = {Tensor.device.__get__: CUDA, Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}  # type: ignore[attr-defined]
REFUSED = {Tensor.numpy, Tensor.__array__}


class CudaTensor(Tensor):
    """A tensor that says it is on the GPU."""


def on_gpu(value: Any) -> bool:
    return isinstance(value, CudaTensor)


def asked_device(values: list[Any]) -> torch.device | None:
    """The device among the arguments of a call, if it names one."""
    for value in values:
        if isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda")):
            return torch.device(value)
    return None


def as_host(value: Any) -> Any:
    """Arguments that name the GPU, for the call that is made on the host."""
    named = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
    return HOST if named and torch.device(value).type == "cuda" else value


class FakeCuda(TorchFunctionMode):
    """Sees every call to torch, checks its devices, and wraps its results."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, type):  # torch.device itself
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        gpu = any(on_gpu(leaf) for leaf in leaves)
        if gpu and func in PROPERTIES and on_gpu(args[0]):
            return PROPERTIES[func]
        if gpu and func in REFUSED:
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        self.check(func, leaves, gpu)
        moves = func in (Tensor.to, Tensor.cpu, Tensor.cuda)
        named = [HOST] if func is Tensor.cpu else [CUDA] if func is Tensor.cuda else leaves
        device = asked_device(named) if moves or "device" in kwargs else None
        target = gpu if device is None else device.type == "cuda"
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], Tensor):  # to where another tensor is
            target = on_gpu(args[1])
        args = tuple(as_host(a) for a in args)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **{key: as_host(value) for key, value in kwargs.items()})
            return tree_map_only(Tensor, lambda t: self.placed(t, target, moves), result)

    def check(self, func: Callable[..., Any], leaves: list[Any], gpu: bool) -> None:
        """Refuse tensors of both devices in one call; numbers in a tensor are taken for numbers."""
        backward = torch._C._current_autograd_node() is not None  # the engine hands out plain tensors
        host = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not on_gpu(leaf) and leaf.dim() > 0]
        if gpu and host and func not in MIXED and func is not Tensor.to and not backward:
            raise RuntimeError(f"{func.__name__}: expected all tensors on one device, but found cuda:0 and cpu.")

    @staticmethod
    def placed(tensor: Tensor, gpu: bool, moved: bool) -> Tensor:
        if gpu == on_gpu(tensor):
            return tensor
        if gpu:
            return tensor.as_subclass(CudaTensor)
        return torch.Tensor.as_subclass(tensor.clone() if moved else tensor, Tensor)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """A machine with one GPU, for as long as it is entered."""
    with (
        mock.patch("torch.cuda.device_count", return_value=1),
        mock.patch.object(torch.nn.Module, "to", move_module),
        FakeCuda(),
    ):
        yield


def move_module(module: torch.nn.Module, device: str | torch.device) -> torch.nn.Module:
    """`module.to`, which writes into the old parameters where it finds that both are of one kind."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                moved = parameter.detach().to(device).requires_grad_(parameter.requires_grad)
                moved._is_param = True  # type: ignore[attr-defined]
                part._parameters[name] = moved  # type: ignore[assignment]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return module


def as_array(tensor: Tensor) -> np.ndarray:
    """The values, wherever they are."""
    return tensor.detach().cpu().numpy()
