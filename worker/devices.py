"""What a node offers: NVIDIA GPUs by NVML, CPU slots, or, in tests, what a file says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from collective.messages import Device, from_plain
from worker.errors import LocalProblem

__all__ = ["CpuSlots", "DeviceProvider", "FakeDevices", "NvidiaGpus", "discover", "list_devices"]

#: JSON list of devices, or the path of a file with one; only tests set it
FAKE_VARIABLE = "UNISONO_FAKE_DEVICES"


class DeviceProvider(Protocol):
    """One kind of device; `Device.index` is set by `list_devices`."""

    def devices(self) -> list[Device]:
        """The devices as they are now, free or busy."""


class CpuSlots:
    """`count` places for ranks that use no GPU."""

    def __init__(self, count: int) -> None:
        self._count = count

    def devices(self) -> list[Device]:
        return [Device(index=slot, kind="cpu", name="CPU slot") for slot in range(self._count)]


class NvidiaGpus:
    """All GPUs that the driver shows; one on which a process that is not ours sits is busy.

    Args:
        nvml: the module `pynvml`, initialised.
        ours: tells whether a process id belongs to a rank of this agent.
    """

    def __init__(self, nvml: Any, ours: Callable[[int], bool]) -> None:
        self._nvml = nvml
        self._ours = ours

    def devices(self) -> list[Device]:
        nvml = self._nvml
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                Device(
                    index=index,
                    kind="cuda",
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                    memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                    busy=self._busy(handle),
                )
            )
        return found

    def _busy(self, handle: Any) -> str | None:
        nvml = self._nvml
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError_NotSupported:
            return None
        foreign = [process for process in processes if not self._ours(process.pid)]
        if not foreign:
            return None
        process = max(foreign, key=lambda entry: entry.usedGpuMemory or 0)
        used = f", {process.usedGpuMemory / 2**30:.1f} GiB" if process.usedGpuMemory else ""
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        return f"{_process_name(process.pid)} (pid {process.pid}){used}{more}"


class FakeDevices:
    """Devices that a variable or a file lists, read anew each time."""

    def __init__(self, source: str) -> None:
        self._source = source

    def devices(self) -> list[Device]:
        source = self._source
        text = source if source.lstrip().startswith("[") else Path(source).read_text()
        return [from_plain(Device, entry) for entry in json.loads(text)]


def discover(
    cpu_slots: int, ours: Callable[[int], bool], *, gpus: bool = True
) -> list[DeviceProvider]:
    """The providers of this machine; without `gpus` its GPUs are left alone.

    Raises:
        LocalProblem: there is nothing to offer.
    """
    providers: list[DeviceProvider] = []
    if gpus and FAKE_VARIABLE in os.environ:
        providers.append(FakeDevices(os.environ[FAKE_VARIABLE]))
    elif gpus and (nvml := _nvml()) is not None:
        providers.append(NvidiaGpus(nvml, ours))
    if cpu_slots:
        providers.append(CpuSlots(cpu_slots))
    if not any(provider.devices() for provider in providers):
        raise LocalProblem(
            "this machine offers nothing: no NVIDIA GPU was found (NVML); "
            "give --cpu-slots N to offer N places for ranks on its CPU"
        )
    return providers


def list_devices(providers: list[DeviceProvider]) -> list[Device]:
    """All devices of the node, numbered through."""
    found: list[Device] = []
    for provider in providers:
        for device in provider.devices():
            found.append(
                Device(
                    index=len(found),
                    kind=device.kind,
                    name=device.name,
                    uuid=device.uuid,
                    memory_bytes=device.memory_bytes,
                    busy=device.busy,
                )
            )
    return found


def visible_devices(devices: list[Device], wanted: list[int]) -> str:
    """The value of ``CUDA_VISIBLE_DEVICES`` for a job's devices; empty for CPU slots.

    UUIDs, because CUDA may number GPUs in another order than the driver does.
    """
    by_index = {device.index: device for device in devices}
    chosen = [by_index[index] for index in wanted if index in by_index]
    return ",".join(device.uuid or str(device.index) for device in chosen if device.kind == "cuda")


def _nvml() -> Any | None:
    """NVML ready for use, or None on a machine without the library or a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process"
