"""Run a command inside a network namespace, it and its children for no longer than the process that
asked for it lives.

Started by file name and made of the standard library alone, so that it costs milliseconds:
`python enter.py NAMESPACE_FD PARENT_PID COMMAND ...`; a NAMESPACE_FD of -1 stays in the namespace
of the caller.
"""

import ctypes
import os
import select
import signal
import sys

__all__ = ["die_with_parent", "enter_network"]

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends; end at once where that has
    happened already.

    Args:
        parent_pid: The process that must still be the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def take_group_along() -> None:
    """Make the end of this process, by whatever way, that of the group of processes it leads.

    A process of its own waits for it: no child, since the command may wait for all that it has.
    """
    if not hasattr(os, "pidfd_open"):  # Linux alone has it
        return
    leader = os.getpid()
    ended = os.pidfd_open(leader)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os.close(ended)
        return
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, ended)
        os.closerange(ended + 1, 1 << 20)  # pipes and namespaces of the rank's
        select.select([ended], [], [])
        os.killpg(leader, signal.SIGKILL)
    os._exit(0)


def enter_network(namespace_fd: int) -> None:
    """Move the calling thread into the network namespace behind an open file descriptor.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace_fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))


def main(arguments: list[str]) -> None:
    """Enter, then become the command; the wish to die with the parent survives the change of
    program.
    """
    namespace_fd, parent_pid = int(arguments[0]), int(arguments[1])
    die_with_parent(parent_pid)
    take_group_along()
    if namespace_fd >= 0:
        enter_network(namespace_fd)
        os.close(namespace_fd)
    os.execvp(arguments[2], arguments[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
