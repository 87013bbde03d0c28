"""Memory of the host, as the operating system tells it: on Linux, macOS and Windows, without further packages."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["HostMemory", "host_memory"]


class HostMemory(NamedTuple):
    """Bytes; 0 where they cannot be read."""

    total_bytes: int = 0
    free_bytes: int = 0


def host_memory() -> HostMemory:
    """All memory that the host has, and what programs could still get of it."""
    try:
        if sys.platform == "win32":
            return _from_windows()
        if sys.platform == "darwin":
            shown = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True, timeout=10).stdout
            return HostMemory(_pages("SC_PHYS_PAGES"), _free_in_vm_stat(shown))
        return _in_meminfo(Path("/proc/meminfo").read_text())
    except (OSError, subprocess.SubprocessError, AttributeError, LookupError):
        return HostMemory(_pages("SC_PHYS_PAGES"), _pages("SC_AVPHYS_PAGES"))


def _pages(name: str) -> int:
    try:
        return max(0, os.sysconf(name)) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf, other systems not every name
        return 0


def _in_meminfo(text: str) -> HostMemory:
    """Linux's ``/proc/meminfo``.

    >>> _in_meminfo("MemTotal:  2048 kB\\nMemFree:  10 kB\\nMemAvailable:  1024 kB\\n")
    HostMemory(total_bytes=2097152, free_bytes=1048576)
    """
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    return HostMemory(int(fields["MemTotal"]) * 1024, int(fields["MemAvailable"]) * 1024)


def _free_in_vm_stat(text: str) -> int:
    """What macOS's ``vm_stat`` counts as unused, or as a cache of files that it gives up when asked.

    >>> head = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\\n"
    >>> _free_in_vm_stat(head + "Pages free: 3.\\nPages active: 9.\\nPages inactive: 2.\\nPages speculative: 1.\\n")
    98304
    """
    fields = dict(re.findall(r"^(Pages [\w ]+):\s+(\d+)\.", text, re.MULTILINE))
    page = re.search(r"page size of (\d+) bytes", text)
    if page is None:
        raise LookupError("page size")
    return int(page[1]) * sum(int(fields[f"Pages {kind}"]) for kind in ("free", "inactive", "speculative"))


class _MemoryStatus(ctypes.Structure):
    """What Windows calls MEMORYSTATUSEX."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("percent_used", ctypes.c_uint32),
        ("total_bytes", ctypes.c_uint64),
        ("free_bytes", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    )


def _from_windows() -> HostMemory:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    windows: Any = getattr(ctypes, "windll")  # noqa: B009 - unknown to type checkers elsewhere
    if not windows.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx failed")
    return HostMemory(status.total_bytes, status.free_bytes)
