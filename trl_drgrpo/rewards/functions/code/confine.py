"""First thing that runs in the sandbox: limits on the own process, and the uid it keeps. Standard library only.

Runs before any untrusted code, in the interpreter that will run it; hard limits cannot be raised again from there.
What was typed to standard error by then is the sandbox's own complaint; after "ready" nothing is.
"""

import os
import resource


def confine(limits):
    """Apply `limits`: a dict with `memory`, `file` (bytes), `cpu` (seconds), `threads` (or None), `uid` (or None)."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, limits["cpu"])
    _limit(resource.RLIMIT_FSIZE, limits["file"])
    _limit(resource.RLIMIT_NOFILE, 64)
    _limit(resource.RLIMIT_AS, limits["memory"])
    if limits["threads"] is not None:
        _limit(resource.RLIMIT_NPROC, limits["threads"])
    if limits["uid"] is not None:
        _become(limits["uid"])
    os.write(2, b"ready\n")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)


def _limit(which, value):
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _become(uid):
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:  # a container that maps only the usual ids
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
