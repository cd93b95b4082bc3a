"""The inside of a sandbox: what a new Python process does before it runs foreign code.

`sandbox.py` starts it, without site-packages and with a job in an open file. Where the job asks for
it, the process moves into namespaces of its own: another user without rights, no other process, no
network, and a file system with the system's files read-only, a small `/tmp` in memory, and nothing
else of the host. Then it sets its limits, says that it is ready, and does what the job says. What
is said before hostile code runs cannot be forged by it.

A process stays above it as its guardian: with the end of either, all that was started below ends.
Only Linux can do this; the constants are those of its interface.
"""

import builtins
import ctypes
import json
import os
import resource
import signal
import sys
import traceback
import types
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_NEWUSER = 0x10000000
_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Of mounts, host name, System V objects, processes and network."""
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_CAPABILITY_VERSION_3 = 0x20080522
_INNER_ID = 1000
_FIRST_FREE_ID = 2_000_000_000
"""User ids from here on belong to no account: each sandbox of root takes one of its own."""
_NOBODY = 65534
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_END_TRIES = 1000

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Does the job in the file whose descriptor is the first argument."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        job = json.loads(file.read())
    run = _run_script
    # Imported now: later the package is out of reach, and a script need not wait for these.
    if job["role"] == "solution":
        from rollout_worker.rewards.code.solution_process import serve_solution as run
    elif job["role"] == "tests":
        from rollout_worker.rewards.code.tests_process import run_tests as run
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    user = _FIRST_FREE_ID + os.getpid()
    try:
        if job["confined"]:
            _enter_namespaces()
        child = os.fork()
        if child:
            os.close(job["status"])
            _guard(child, job["confined"])
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if job["confined"]:
            _build_root(job["root"], job["readable"], job["disk_mb"])
            _give_rights_up(user)
        _set_limits(job["limits"])
    except OSError as error:
        _say(job["status"], f"{error.strerror} ({error.filename or 'system call'})")
        os._exit(1)
    _say(job["status"], "ready")
    sys.path[:] = [path for path in sys.path if path != job["package"]]
    sys.path.append(job["site"])
    sys.argv = ["solution.py"]
    builtins.exit = builtins.quit = sys.exit  # as `site` would do
    del os.environ["PYTHONPATH"]
    run(job)


def _say(fd: int, text: str) -> None:
    os.write(fd, text.encode())
    os.close(fd)


def _enter_namespaces() -> None:
    """Moves this process, and those that it will start, into namespaces of their own."""
    uid, gid = os.getuid(), os.getgid()
    if _libc.unshare(_NAMESPACES) == 0:  # as root
        return
    _check(_libc.unshare(_NAMESPACES | _NEWUSER), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INNER_ID} {uid} 1"),
        ("gid_map", f"{_INNER_ID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _guard(child: int, confined: bool) -> NoReturn:
    """Waits for the process that does the job, and ends what it has left.

    A confined one is the first of its namespace, and with it the kernel ends all others there.
    """
    status = 0
    while True:
        pid, ended = os.waitpid(-1, 0)
        if pid == child:
            status = os.waitstatus_to_exitcode(ended)
            break
    for _ in range(
        0 if confined else _END_TRIES
    ):  # orphans become children of this process, one generation a time
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    os._exit(status if status >= 0 else 128 - status)


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found


def _build_root(root: str, readable: list[str], disk_mb: int) -> None:
    """Puts a file system of its own below this process.

    Args:
        root: an empty folder, which becomes `/`.
        readable: folders of the host that are there too, read-only.
        disk_mb: of `/tmp`.
    """
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in readable:
        if os.path.islink(path) and os.path.dirname(path) == "/":  # such as /lib
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            os.makedirs(root + path, exist_ok=True)
            _mount(path, root + path, None, _BIND | _REC)
            _make_read_only(root + path)
    os.mkdir(root + "/dev")
    for path in _DEVICES:
        with open(root + path, "w"):
            pass
        _mount(path, root + path, None, _BIND)
    os.mkdir(root + "/tmp")
    _mount("tmpfs", root + "/tmp", "tmpfs", _NOSUID | _NODEV, f"size={disk_mb}m,mode=1777")
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir("/tmp")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    failed = _libc.mount(*texts, ctypes.c_ulong(flags), data.encode())
    _check(failed, f"mount {target}")


def _make_read_only(path: str) -> None:
    """With all that is mounted below it."""
    attributes = (ctypes.c_uint64 * 4)(_RDONLY | _NOSUID | _NODEV, 0, 0, 0)
    failed = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        path.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check(failed, f"mount_setattr {path}")


def _give_rights_up(user: int) -> None:
    """No capability, and none by any program that it starts; root becomes a user without files."""
    if os.getuid() == 0:
        os.setgroups([])
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:  # a container with few ids
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    # A change of the user has taken this away.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, most = resource.getrlimit(kind)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))


def _check(failed: int, what: str) -> None:
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _run_script(job: dict[str, Any]) -> None:
    """Runs a program as `python solution.py` would; what it raises ends it with 1."""
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    try:
        exec(compile(job["code"], "solution.py", "exec"), main_module.__dict__)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
