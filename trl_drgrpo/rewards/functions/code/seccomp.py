"""The system calls that untrusted code may not make, as a filter program that bubblewrap loads.

Why next to namespaces: a process that cannot fork makes its own memory limit the limit of the whole sandbox, and one
that cannot open a socket reaches none of the kinds that a network namespace does not separate (vsock, netlink).
Refused with `EPERM`: new processes (threads are allowed), sockets other than pairs, memory outside `RLIMIT_AS`
(System V, memfd), tracing, new namespaces and mounts, and kernel interfaces that no unit test needs.

The program is classic BPF: instructions of 8 bytes over `struct seccomp_data` (seccomp(2)).
"""

import errno
import platform
import struct

from trl_drgrpo.common.errors import InputError

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_GREATER_EQUAL = 0x35
_JUMP_SET = 0x45
_RETURN = 0x06
_AT_NUMBER = 0
_AT_ARCH = 4
_AT_FIRST_ARGUMENT = 16  # offsets in struct seccomp_data, little-endian
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000  # x86-64 system calls by their other numbers
_CLONE3 = 435

# Name in `struct seccomp_data`, and number of the call that makes processes and threads.
_ARCHES = {"x86_64": (0xC000003E, 56), "aarch64": (0xC00000B7, 220)}
# What for: names, with numbers for x86_64 and aarch64; "-" where the architecture lacks the call.
_DENIED = {
    "new processes": "fork 57 -, vfork 58 -",
    "other processes": "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272",
    "sockets": "socket 41 198",
    "namespaces and mounts": "unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41",
    "other roots and files": "chroot 161 51, name_to_handle_at 303 264, open_by_handle_at 304 265",
    "memory outside RLIMIT_AS": "shmget 29 194, shmat 30 196, memfd_create 319 279",
    "kernel objects outside it": "msgget 68 186, semget 64 190, mq_open 240 180",
    "places of memory": "mbind 237 235, migrate_pages 256 238, move_pages 279 239, modify_ldt 154 -",
    "keys": "add_key 248 217, request_key 249 218, keyctl 250 219",
    "the kernel itself": "bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, syslog 103 116",
    "its compatibility with others": "personality 135 92",
}
# Numbers from 424 on are the same everywhere: pidfd_send_signal, io_uring (3), open_tree, move_mount, the fs* calls,
# pidfd_open, pidfd_getfd, process_madvise, mount_setattr, memfd_secret.
_DENIED_EVERYWHERE = (*range(424, 435), 438, 440, 442, 447)


def machine() -> str:
    """The architecture to filter for. Refuses one for which this module has no numbers."""
    name = platform.machine()
    if name not in _ARCHES:
        got = "an architecture for which there is no system call filter"
        raise InputError("sandbox", got, "x86_64 or aarch64", "Run code_reward on such a machine.")
    return name


def filter_program(machine: str) -> bytes:
    """Return the filter for `"x86_64"` or `"aarch64"`: `struct sock_filter` entries, as bubblewrap's `--seccomp`
    reads them."""
    arch, clone = _ARCHES[machine]
    column = 1 + list(_ARCHES).index(machine)
    program = [
        _instruction(_LOAD, _AT_ARCH),
        _instruction(_JUMP_EQUAL, arch, 1, 0),
        _instruction(_RETURN, _KILL),  # another architecture's call would be counted by other numbers
        _instruction(_LOAD, _AT_NUMBER),
    ]
    if machine == "x86_64":
        program += _refuse(_JUMP_GREATER_EQUAL, _X32, errno.EPERM)
    # clone3 has its flags in memory, which a filter cannot read. Told that there is none, glibc falls back to clone.
    program += _refuse(_JUMP_EQUAL, _CLONE3, errno.ENOSYS)
    for calls in _DENIED.values():
        for call in calls.split(", "):
            number = call.split()[column]
            if number != "-":
                program += _refuse(_JUMP_EQUAL, int(number), errno.EPERM)
    for number in _DENIED_EVERYWHERE:
        program += _refuse(_JUMP_EQUAL, number, errno.EPERM)
    # Last, because it loads another word than the number: clone makes threads, and nothing else. Jumps count the
    # instructions that they skip.
    program += [
        _instruction(_JUMP_EQUAL, clone, 0, 3),
        _instruction(_LOAD, _AT_FIRST_ARGUMENT),
        _instruction(_JUMP_SET, _CLONE_THREAD, 1, 0),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _refuse(jump: int, number: int, error: int) -> list[bytes]:
    return [_instruction(jump, number, 0, 1), _instruction(_RETURN, _ERRNO | error)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
