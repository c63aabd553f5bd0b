"""Makes the virtual environment; plain Python, run before anything is installed.

`python3 molt/bootstrap.py .venv` creates it, installs the project with its extras `cpu` and `dev`,
and removes torchvision and friends unless they are CPU builds: the package index serves CUDA
builds, whose operators are missing beside a CPU torch, and then `import transformers` dies. It
prints what it does from the first second on and does nothing when pyproject.toml has not changed.
"""

import hashlib
import subprocess
import sys
import time
import venv
from pathlib import Path

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
"""PyTorch's public index, asked only when pip's own configuration does not find the CPU build."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
QUIET_S_MAX = 5.0
STARTED = time.monotonic()


def main(folder: str) -> int:
    """Create or update the environment in `folder`; returns the exit status."""
    root = Path(__file__).resolve().parent.parent
    if sys.version_info[:2] != (3, 11):
        say(f"needs Python 3.11, this is {sys.version.split()[0]}: make PYTHON=python3.11 ...")
        return 1
    path = Path(folder).resolve()
    stamp = path / "molt-installed"
    want = hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == want:
        return 0
    say(f"making {path}")
    venv.create(path, with_pip=True)
    pip = [str(path / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    log = path / "install.log"
    install = [*pip, "install", "--progress-bar", "off"]
    torch = [*install, "torch==2.13.0+cpu"]
    say("installing torch (CPU build)")
    if run(torch, log) and run([*torch, "--extra-index-url", CPU_WHEELS], log):
        return failed(log)
    say("installing molt-log, vLLM, NeMo AutoModel, Ray")
    if run([*install, "-e", f"{root}[cpu,dev]"], log):
        return failed(log)
    remove_cuda_builds(path, pip, log)
    stamp.write_text(want)
    say("environment ready")
    return 0


def remove_cuda_builds(path: Path, pip: list[str], log: Path) -> None:
    listing = subprocess.run([*pip, "list", "--format=freeze"], capture_output=True, text=True)
    for line in listing.stdout.splitlines():
        name, _, version = line.partition("==")
        if name in UNWANTED and not version.endswith("+cpu"):
            say(f"removing {line}: a CUDA build breaks `import transformers` beside a CPU torch")
            run([*pip, "uninstall", "-y", name], log)


def run(command: list[str], log: Path) -> int:
    """Run a command with its output in `log`; print the last line of it while it is silent."""
    with open(log, "ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    while True:
        try:
            return process.wait(QUIET_S_MAX)
        except subprocess.TimeoutExpired:
            say("  " + last_line(log))


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1].strip()[:90] if lines else "..."


def failed(log: Path) -> int:
    print("\n".join(log.read_text(errors="replace").splitlines()[-15:]))
    say(f"the installation failed; all of its output is in {log}")
    return 1


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ".venv"))
