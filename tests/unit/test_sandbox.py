"""Code that a model wrote, and everything it must not be able to do."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from molt.agents import sandbox
from molt.agents.sandbox import Limits, Ran, run_python
from molt.schemas.errors import ConfigError


def run(code: str, **limits: float) -> Ran:
    return asyncio.run(run_python(code, Limits(**{"seconds": 20.0, **limits})))  # type: ignore


def test_it_computes() -> None:
    ran = run("import math, fractions\nprint(math.comb(40, 20))\nprint(fractions.Fraction(3, 6))")
    assert ran == Ran(output="137846528820\n1/2\n", ended="ok")


def test_an_exception_shows_its_own_lines_only() -> None:
    ran = run("def f():\n    return 1 / 0\nf()")
    assert ran.ended == "error" and ran.output.endswith("ZeroDivisionError: division by zero\n")
    assert ran.output.count("File ") == 2 and 'File "main.py", line 2, in f' in ran.output
    assert run("import sys; sys.exit(3)").ended == "error"
    assert "SyntaxError" in run("print(").output


def test_it_can_use_files_of_its_own_and_threads() -> None:
    ran = run(
        "import os, threading, tempfile\n"
        "os.mkdir('d'); open('d/x', 'w').write('hello')\n"
        "open('d/x', 'a').write('!'); os.rename('d/x', 'y')\n"
        "t = threading.Thread(target=lambda: print(open('y').read())); t.start(); t.join()\n"
        "print(tempfile.mkdtemp().startswith(os.getcwd()))"
    )
    assert ran == Ran(output="hello!\nTrue\n", ended="ok")


@pytest.mark.parametrize(
    ("code", "limits", "ended"),
    [
        ("while True: pass", {"seconds": 0.5}, "time"),
        ("import time; time.sleep(60)", {"seconds": 0.5}, "time"),
        ("import os\nos.close(1); os.close(2)\nwhile True: pass", {"seconds": 0.5}, "time"),
        ("while True: print('x' * 1000)", {"output_bytes": 5000}, "output"),
        ("import os; os._exit(0)", {}, "ok"),
        ("import ctypes; ctypes.string_at(0)", {}, "killed"),
    ],
)
def test_how_runs_end(code: str, limits: dict[str, float], ended: str) -> None:
    ran = run(code, **limits)
    assert ran.ended == ended and len(ran.output) <= 16 << 10
    if ended == "output":
        assert len(ran.output) == 5000


def test_memory_and_files_are_limited() -> None:
    ran = run("x = bytearray(1 << 30)", memory_bytes=256 << 20)
    assert ran.ended == "error" and "MemoryError" in ran.output
    ran = run("open('big', 'wb').write(bytes(2 << 20))", file_bytes=1 << 20)
    assert ran.ended == "error" and "File too large" in ran.output
    ran = run("x = [open('main.py') for _ in range(100)]", files=20)
    assert ran.ended == "error" and "Too many open files" in ran.output


def test_there_is_no_network() -> None:
    """A listening socket stands on this machine's loopback, and cannot be reached."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass  # from here it can
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)"
        ran = run(code)
    assert ran.ended == "error" and "Operation not permitted" in ran.output
    for family in ("AF_INET6", "AF_UNIX", "AF_NETLINK"):
        assert (
            "Operation not permitted"
            in run(f"import socket; socket.socket(socket.{family})").output
        )


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import multiprocessing as m; m.Process(target=print).start()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import resource, os; resource.prlimit(os.getppid(), resource.RLIMIT_AS, (1, 1))",
    ],
)
def test_no_other_process_is_made_or_touched(code: str) -> None:
    ran = run(code)
    assert ran.ended == "error" and "Operation not permitted" in ran.output


def test_a_fork_bomb_is_a_dud() -> None:
    ran = run(
        "import os\ntry:\n    while True: os.fork()\nexcept OSError as e:\n    print(e.errno)"
    )
    assert ran == Ran(output="1\n", ended="ok")


def test_other_files_can_neither_be_read_nor_changed(tmp_path: Path) -> None:
    secret = tmp_path / "labels.json"
    secret.write_text("42")
    for code in (
        f"print(open({str(secret)!r}).read())",
        f"open({str(secret)!r}, 'w')",
        f"import os; os.truncate({str(secret)!r}, 0)",
        f"import os; os.remove({str(secret)!r})",
        f"import os; os.rename({str(secret)!r}, 'mine')",
        f"import os; os.link({str(secret)!r}, 'mine'); print(open('mine').read())",
        f"import os; os.symlink({str(secret)!r}, 'mine'); print(open('mine').read())",
        f"import os; print(os.listdir({str(tmp_path)!r}))",
        "print(open(f'/proc/{__import__(\"os\").getppid()}/environ').read())",
        "print(open('/etc/passwd').read())",
        f"open({sys.prefix!r} + '/x', 'w')",
    ):
        ran = run(code)
        assert ran.ended == "error" and "42" not in ran.output.splitlines(), code
        assert "Permission denied" in ran.output or "cross-device" in ran.output, ran.output
    assert secret.read_text() == "42" and os.listdir(tmp_path) == ["labels.json"]


def test_another_program_in_its_place_is_held_back_too(tmp_path: Path) -> None:
    """exec keeps the walls, also for root."""
    script = "import os; os.execv('/bin/sh', ['sh', '-c', 'echo here; cat /etc/passwd; id | cat'])"
    ran = run(script)
    assert ran.output.startswith("here") and "root:" not in ran.output and "uid=" not in ran.output


def test_nothing_is_left_after_it_also_when_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pids: list[int] = []
    real = asyncio.create_subprocess_exec

    async def noted(*args, **kwargs):
        child = await real(*args, **kwargs)
        pids.append(child.pid)
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)

    async def cancelled() -> None:
        task = asyncio.create_task(run_python("open('x', 'w'); print(1)\nwhile True: pass"))
        while not list(tmp_path.glob("*/x")):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert os.listdir(tmp_path) == [] and len(pids) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_without_walls_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel without Landlock: an error that says so, and the code was not started."""
    source = Path(sandbox.__file__).read_text()
    broken = tmp_path / "sandbox.py"
    broken.write_text(source.replace("_LANDLOCK_CREATE, None, 0, 1", "9999, None, 0, 1"))
    monkeypatch.setattr(sandbox, "__file__", str(broken))
    with pytest.raises(
        ConfigError, match="cannot wall in untrusted Python: .*Landlock: Function not"
    ):
        run("print('should not run')")


def test_the_child_needs_the_standard_library_alone() -> None:
    code = f"import runpy, sys; runpy.run_path({sandbox.__file__!r}); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
