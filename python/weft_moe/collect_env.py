"""Prints what the report of a fault should say: `python -m weft_moe.collect_env`."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil

import torch

from . import library
from .support import supports


def collect() -> dict[str, str]:
    """Name -> value, in the order of printing."""
    rows = {
        "weft": torch.ops.weft.version(),
        "weft compiled by": torch.ops.weft.compiler(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores usable",
        "shared memory": _shared_memory(),
        "CUDA driver": _cuda_driver(),
        "CUDA devices": _cuda_devices(),
    }
    for device in ("cpu", "cuda"):
        for precision in library.PRECISIONS:
            reason = supports(hidden=1024, intermediate=1024, precision=precision, device=device)
            rows[f"{device} {precision}"] = f"no: {reason}" if reason else "yes"
    return rows


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(
                line.split(":")[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _shared_memory() -> str:
    """Groups of processes on the CPU need it; containers often give 64 MiB."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return f"none: {error}"
    return f"/dev/shm, {usage.free >> 20} of {usage.total >> 20} MiB free"


def _cuda_driver() -> str:
    """The newest CUDA that the driver can run, asked of the driver itself."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "none"
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return "present, version unknown"
    return f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _cuda_devices() -> str:
    if not torch.cuda.is_available():
        return "none"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    capability = "{}.{}".format(*torch.cuda.get_device_capability(0))
    return (
        f"{', '.join(names)}, compute capability {capability}, torch for CUDA {torch.version.cuda}"
    )


def main() -> None:
    rows = collect()
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
