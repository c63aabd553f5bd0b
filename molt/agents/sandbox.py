"""Runs Python that a model wrote: a process that can compute, and write into one empty folder.

Beside the data path: a tool of agents. What holds the code back is the kernel, set up by the child
itself before it reads the code: seccomp (no sockets, no child processes, no signals to others),
Landlock (files: Python's own, read only, and the working folder), no capabilities, and limits of
time, memory, file size and output. Where the kernel cannot do it, nothing is run.

The file is also the child's program, so it imports the standard library alone.
"""

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import shutil
import signal
import struct
import sys
import sysconfig
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

READY = b"\x06"
"""The child's first byte: the walls stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may use."""

    seconds: float = 5.0
    """Of wall time; as many of CPU time, over all threads."""
    memory_bytes: int = 1 << 30
    """Of address space."""
    file_bytes: int = 8 << 20
    """Of each file it writes."""
    output_bytes: int = 16 << 10
    """Of stdout and stderr together; more ends the run."""
    files: int = 64
    """Open at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a run ended."""

    output: str
    """stdout and stderr as they came; a traceback, if there was one, is its end."""
    ended: str
    """"ok", "error" (an exception or exit status), "time", "output" or "killed"."""


async def run_python(code: str, limits: Limits | None = None) -> Ran:
    """Run `code` as a script of its own; nothing of it is left when this returns or is cancelled.

    Raises ConfigError where the kernel cannot wall it in (no seccomp or no Landlock).

    Example: `(await run_python("print(6 * 7)")).output` is "42\\n".
    """
    limits = limits or Limits()
    folder = tempfile.mkdtemp(prefix="molt-sandbox-")
    try:
        Path(folder, "main.py").write_text(code, encoding="utf-8", errors="surrogatepass")
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-B", __file__, json.dumps(asdict(limits))),
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return await _watch(child, limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await asyncio.shield(child.wait())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _watch(child: asyncio.subprocess.Process, limits: Limits) -> Ran:
    out, ended = bytearray(), ""
    assert child.stdout is not None
    try:
        async with asyncio.timeout(limits.seconds):
            while len(out) <= limits.output_bytes + len(READY):
                part = await child.stdout.read(1 << 16)
                if not part:
                    break
                out += part
            else:
                ended = "output"
            if not ended:
                await child.wait()
    except TimeoutError:
        ended = "time"
    if not out.startswith(READY) and ended != "time":
        from molt.schemas.errors import ConfigError

        why = out.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"this machine cannot wall in untrusted Python: {why}")
    status = child.returncode
    if not ended and status is not None and status < 0:
        ended = "time" if status == -signal.SIGXCPU else "killed"
    output = out[len(READY) :][: limits.output_bytes].decode(errors="replace")
    return Ran(output=output, ended=ended or ("error" if status else "ok"))


# -- the child ---------------------------------------------------------------------------------

_DENIED = {  # architecture -> (AUDIT_ARCH, clone, clone3, denied system calls)
    # socket fork vfork kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal
    # ptrace process_vm_readv process_vm_writev io_uring_setup prlimit64
    "x86_64": (
        0xC000003E,
        *(56, 435),
        (41, 57, 58, 62, 200, 234, 129, 297, 424, 101, 310, 311, 425, 302),
    ),
    "aarch64": (
        0xC00000B7,
        *(220, 435),
        (198, 129, 130, 131, 138, 240, 424, 117, 270, 271, 425, 261),
    ),
}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ = 0b1101  # execute, read files, list folders
_ALL = 0x7FFF


def _child(limits: Limits) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    for name, most in (
        (resource.RLIMIT_CPU, int(limits.seconds) + 1),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (most, most))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file too large is an OSError
    _check(libc.prctl(1, signal.SIGKILL, 0, 0, 0), "parent death signal")
    _check(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    header = struct.pack("Ii", 0x20080522, 0)
    _check(libc.capset(header, bytes(24)), "capset")
    _landlock(libc)
    _seccomp(libc)
    os.write(1, READY)
    try:
        code = compile(Path("main.py").read_bytes(), "main.py", "exec")
        exec(code, {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(error.with_traceback(trace))
        return 1
    return 0


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _landlock(libc: ctypes.CDLL) -> None:
    """Python's own folders can be read, the working folder can be used, nothing else opened."""
    abi = _check(libc.syscall(_LANDLOCK_CREATE, None, 0, 1), "Landlock")
    handled = (1 << {1: 13, 2: 14}.get(abi, 15)) - 1
    attributes = struct.pack("Q", handled)
    rules = _check(libc.syscall(_LANDLOCK_CREATE, attributes, 8, 0), "Landlock")
    readable = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    readable |= {"/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"}
    devices = ("/dev/null", "/dev/zero", "/dev/urandom")
    allowed = {path: _READ for path in readable} | {path: 0b110 for path in devices}
    for path, access in {**allowed, ".": _ALL}.items():
        try:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        access = access if os.path.isdir(path) else access & 0b111
        rule = struct.pack("=Qi", access & handled, folder)
        _check(libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0), f"Landlock, {path}")
        os.close(folder)
    _check(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "Landlock")
    os.close(rules)


def _seccomp(libc: ctypes.CDLL) -> None:
    """System calls by number; a denied one fails with EPERM."""
    arch, clone, clone3, denied = _DENIED[platform.machine()]
    allow, kill = 0x7FFF0000, 0x80000000
    load, equal, at_least, has_bits, ret = 0x20, 0x15, 0x35, 0x45, 0x06
    n = len(denied)  # jumps are relative: rows after this one that are skipped
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, arch),
        (ret, 0, 0, kill),
        (load, 0, 0, 0),
        (at_least, n + 5, 0, 0x40000000),  # the x32 numbers would be a way around
        *((equal, n - k + 4, 0, number) for k, number in enumerate(denied)),
        (equal, 5, 0, clone3),
        (equal, 0, 2, clone),
        (load, 0, 0, 16),
        (has_bits, 0, 1, 0x10000),  # CLONE_THREAD
        (ret, 0, 0, allow),
        (ret, 0, 0, 0x50000 | errno.EPERM),
        (ret, 0, 0, 0x50000 | errno.ENOSYS),  # the C library then tries clone
    ]
    rows = b"".join(struct.pack("HBBI", *row) for row in program)
    buffer = ctypes.create_string_buffer(rows)
    filter = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    _check(libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0), "seccomp")


if __name__ == "__main__":
    sys.exit(_child(Limits(**json.loads(sys.argv[1]))))
