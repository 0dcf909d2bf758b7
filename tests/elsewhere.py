"""Takes away from Python on Linux what macOS or Windows lacks, in a process of its own.

Python and torch are those of Linux: they are loaded before names and modules are taken away.
"""

import asyncio  # noqa: F401
import concurrent.futures  # noqa: F401
import ctypes.util
import errno
import json  # noqa: F401
import multiprocessing.pool  # noqa: F401
import os
import platform
import selectors
import signal
import socket
import stat
import subprocess  # noqa: F401
import sys
import tempfile
import uuid  # noqa: F401

import cyclopts  # noqa: F401
import jinja2  # noqa: F401
import numba  # noqa: F401
import psutil  # noqa: F401
import rich.console
import rich.table  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.tensor  # noqa: F401
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401

MODULES = ["pyroute2"]
OF_WINDOWS = ["fcntl", "resource", "pwd", "grp", "termios", "_posixsubprocess"]
NAMES = {
    os: "sched_getaffinity sched_setaffinity pidfd_open memfd_create eventfd setns unshare splice "
    "pipe2 copy_file_range posix_fadvise posix_fallocate fdatasync getrandom O_TMPFILE O_DIRECT "
    "O_PATH",
    signal: "SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT sigtimedwait sigwaitinfo",
    socket: "AF_NETLINK AF_PACKET TCP_INFO TCP_USER_TIMEOUT TCP_CONGESTION TCP_KEEPIDLE TCP_CORK "
    "TCP_QUICKACK TCP_DEFER_ACCEPT TCP_LINGER2 TCP_SYNCNT TCP_WINDOW_CLAMP SO_BINDTODEVICE "
    "SO_DOMAIN SO_PROTOCOL SO_PEERCRED SO_PASSCRED SO_MARK SOCK_CLOEXEC SOCK_NONBLOCK "
    "MSG_NOSIGNAL MSG_CMSG_CLOEXEC",
}
# numbers of macOS: options of Linux, and their unit
OF_MACOS = {
    0x01: (socket.TCP_NODELAY, 1),
    0x02: (socket.TCP_MAXSEG, 1),
    0x10: (socket.TCP_KEEPIDLE, 1),
    0x80: (socket.TCP_USER_TIMEOUT, 1000),
    0x101: (socket.TCP_KEEPINTVL, 1),
    0x102: (socket.TCP_KEEPCNT, 1),
}
NAMES_OF_WINDOWS = {
    os: "fork setsid killpg geteuid getuid O_CLOEXEC register_at_fork",
    signal: "SIGKILL SIGHUP SIGSTOP SIGCONT pthread_sigmask",
    socket: "AF_UNIX MSG_DONTWAIT",
}


class Library(ctypes.CDLL):
    """C library of the process; Windows has none."""

    def __init__(self, name, *rest, **more):
        if name is None and sys.platform == "win32":
            raise TypeError("a DLL has a name")
        super().__init__(name, *rest, **more)

    def __getattr__(self, name):
        if name in ("prctl", "setns", "unshare", "adjtimex"):
            raise AttributeError(f"{sys.platform} has no {name}")
        function = super().__getattr__(name)

        def address(descriptor, buffer, length):
            return function(descriptor, buffer, length) or _as_bsd(buffer)

        def set_option(descriptor, level, option, *value):
            refused = level == socket.IPPROTO_TCP and option not in OF_MACOS
            return -1 if refused else function(descriptor, level, option, *value)

        def option(descriptor, level, option, *value):
            refused = (level, option) == (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return -1 if refused else function(descriptor, level, option, *value)

        own = {"getsockname": address, "getpeername": address}
        own |= {"setsockopt": set_option, "getsockopt": option}
        setattr(self, name, own.get(name, function))  # over the one that ctypes has set
        return getattr(self, name)


def _as_bsd(buffer):
    """Write an address as BSD does: a byte of its length before a byte of its family."""
    buffer[1], buffer[0] = buffer[0], b"\x10"
    return 0


def _take_linux() -> None:
    def opened(event, arguments):
        if event in ("open", "os.listdir", "os.scandir"):
            _require_elsewhere(arguments[0])
        if event == "subprocess.Popen":
            program = os.path.basename(os.fsdecode(arguments[0]))  # noqa: PTH119
            if program in ("ip", "tc", "nft", "nsenter", "unshare"):
                raise FileNotFoundError(errno.ENOENT, "not on macOS", program)

    def looking(function):
        def look(path, *rest, **more):
            _require_elsewhere(path)
            return function(path, *rest, **more)

        return look

    for name in ("stat", "lstat", "readlink", "access"):
        setattr(os, name, looking(getattr(os, name)))
    fstat, set_option = os.fstat, socket.socket.setsockopt

    def fstat_without_inode(descriptor):
        found = fstat(descriptor)
        zero = stat.S_ISSOCK(found.st_mode)
        return os.stat_result((found[0], 0, *found[2:])) if zero else found

    def setsockopt(self, level, option, value, *rest):
        if level == socket.IPPROTO_TCP:
            if option not in OF_MACOS:
                raise OSError(errno.ENOPROTOOPT, f"macOS has no TCP option {option}")
            option, unit = OF_MACOS[option]
            value *= unit
        set_option(self, level, option, value, *rest)

    os.fstat, socket.socket.setsockopt = fstat_without_inode, setsockopt
    socket.TCP_KEEPALIVE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT = 0x10, 0x101, 0x102
    selectors.DefaultSelector = selectors.PollSelector
    del selectors.EpollSelector
    platform.system = lambda: "Darwin"
    sys.addaudithook(opened)


def _require_elsewhere(path) -> None:
    if isinstance(path, str | bytes | os.PathLike):
        text = os.fsdecode(path)
        if text in ("/proc", "/sys") or text.startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(errno.ENOENT, "not on macOS", text)


class Refuses:
    """Finder that has no modules of other systems."""

    def find_spec(name, *_):  # noqa: N805
        if name.partition(".")[0] in MODULES:
            raise ModuleNotFoundError(f"{name} is not on {sys.platform}")


def take_away(system: str) -> None:
    """Leave this process what a system has, "darwin" or "win32"."""
    if system == "darwin":
        _take_linux()
    taken = [*NAMES.items()]
    if system == "win32":
        MODULES.extend(OF_WINDOWS)
        taken += NAMES_OF_WINDOWS.items()
    for module, some in taken:
        for name in set(some.split()) & vars(module).keys():
            delattr(module, name)
    ctypes.CDLL, tempfile._O_TMPFILE_WORKS = Library, False
    sys.meta_path.insert(0, Refuses)
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.platform = system
    assert not any(name.startswith("thinwire") for name in sys.modules)
