"""Device memory for the GPU tests and nothing more: numpy arrays there and back through the driver."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver


def ask(answer: tuple[Any, ...]) -> Any:
    status, *results = answer
    assert int(status) == 0, status
    return results[0] if len(results) == 1 else results


class Gpu:
    """The first card's primary context, made current; frees all memory at the end."""

    def __init__(self) -> None:
        ask(driver.cuInit(0))
        device = ask(driver.cuDeviceGet(0))
        ask(driver.cuCtxSetCurrent(ask(driver.cuDevicePrimaryCtxRetain(device))))
        kind = driver.CUdevice_attribute
        major = ask(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
        minor = ask(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
        self.architecture = major * 10 + minor
        self._taken: list[Any] = []

    def zeros(self, nbytes: int) -> int:
        address = ask(driver.cuMemAlloc(max(nbytes, 16)))
        ask(driver.cuMemsetD8(address, 0, max(nbytes, 16)))
        self._taken.append(address)
        return int(address)

    def put(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        address = self.zeros(array.nbytes)
        ask(driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
        return address

    def get(self, address: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        array = np.empty(shape, dtype)
        ask(driver.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
        return array

    def close(self) -> None:
        for address in self._taken:
            driver.cuMemFree(address)
