"""A seccomp filter of the system calls that no program in a sandbox needs."""

from __future__ import annotations

import errno
import mmap
import os
import socket
from functools import cache

from skyrl_train.errors import ConfigError

DENIED = (
    "socket connect bind listen accept accept4 "
    "io_uring_setup io_uring_enter io_uring_register "
    "ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd "
    "keyctl add_key request_key bpf perf_event_open userfaultfd fanotify_init "
    "unshare setns mount umount umount2 pivot_root chroot mount_setattr "
    "move_mount open_tree fsopen fsmount fsconfig fspick name_to_handle_at open_by_handle_at "
    "memfd_create memfd_secret vmsplice shmget shmat shmctl msgget semget mq_open "
    "init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff acct quotactl "
    "settimeofday clock_settime clock_adjtime adjtimex stime sethostname setdomainname syslog "
    "iopl ioperm modify_ldt lookup_dcookie vhangup nfsservctl uselib personality "
)
"""Names of the denied system calls: networks, other processes, kernel keys and programs, namespaces, and memory that
escapes the limits of a process."""
SHARED_MEMORY = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
"""Flags of `mmap` for anonymous shared memory. All of it stays in use while one page is mapped, so no limit of a
process counts it."""
NAMESPACES = 0x7E020080
"""The CLONE_NEW* flags of `clone`."""
TIOCSTI = 0x5412
"""The `ioctl` request that puts characters into a terminal's input."""


@cache
def build_filter() -> bytes:
    """Return the filter as a BPF program.

    A denied system call fails with EPERM. A system call of another architecture kills the process.

    Raises:
        ConfigError: pyseccomp or libseccomp is missing.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"environment.skyrl_gym.sandbox.kind='bubblewrap' needs pyseccomp, which cannot be loaded ({error}). "
            "Install it: pip install 'skyrl-train[sandbox]', and the system package libseccomp2."
        ) from error
    rules = pyseccomp.SyscallFilter(defaction=pyseccomp.ALLOW)
    refuse = pyseccomp.ERRNO(errno.EPERM)
    for name in DENIED.split():
        try:
            rules.add_rule(refuse, name)
        except (OSError, ValueError, RuntimeError):
            continue  # a call that this machine, or this version of libseccomp, does not have
    rules.add_rule(refuse, "socketpair", pyseccomp.Arg(0, pyseccomp.NE, socket.AF_UNIX))
    rules.add_rule(refuse, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, TIOCSTI))
    rules.add_rule(refuse, "mmap", pyseccomp.Arg(3, pyseccomp.MASKED_EQ, SHARED_MEMORY, SHARED_MEMORY))
    for bit in range(32):
        if NAMESPACES & (flag := 1 << bit):
            rules.add_rule(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    # The flags of clone3 are behind a pointer, which no filter can follow; without clone3, libc uses clone.
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    with os.fdopen(os.memfd_create("filter"), "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
