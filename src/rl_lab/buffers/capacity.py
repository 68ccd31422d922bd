"""Whether what a buffer needs is there."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from rl_lab.errors import DataError


def available_ram() -> int:
    """Bytes that this process may still take: the system's, or the container's where that is less."""
    available = 1 << 62
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        available = min(available, max(int(text) - int(used.read_text()), 0))
    return available


def available_disk(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def available_gpu(device: str) -> int:
    return torch.cuda.mem_get_info(torch.device(device))[0]


def require(needed: int, available: int, *, what: str, capacity: int, bytes_per_record: int, other: str) -> None:
    """Refuse what cannot fit, with the capacity that would."""
    if needed <= available:
        return
    fitting = int(available * 0.9) // max(bytes_per_record, 1)
    raise DataError(
        f"The replay needs {gigabytes(needed)} of {what} when full ({capacity:,} records of {bytes_per_record:,} "
        f"bytes), and {gigabytes(available)} are free. Lower data_sources.replay.capacity to {fitting} or less{other}."
    )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
