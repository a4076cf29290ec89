"""Takes the network away from this process and its children: a network namespace of its own, with loopback up."""
from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP = 0x8914, 0x1
# TEST-NET-1: nobody's address, but one that needs a route.
ELSEWHERE = ("192.0.2.1", 9)


def leave_network() -> None:
    """For a process with one thread, and for good. Needs root, or a kernel that gives everybody user namespaces.

    Raises:
        OSError: the kernel refuses, or there is still a way out.
    """
    user, group = os.geteuid(), os.getegid()
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_NEW_NETWORK if user == 0 else _NEW_NETWORK | _NEW_USER):
        raise OSError(ctypes.get_errno(), "no network namespace of our own (unshare)")
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    if not is_alone():
        raise OSError(errno.EEXIST, "there is still a route to elsewhere")


def is_alone() -> bool:
    """Whether this process has no route to other machines. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(ELSEWHERE)
        except OSError as error:
            return error.errno == errno.ENETUNREACH
    return False
