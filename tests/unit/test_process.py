"""What processes share."""

import subprocess
import sys
from pathlib import Path

ASK = "from molt.process import rendezvous; print(rendezvous(), rendezvous())"


def test_a_rendezvous_is_a_file_of_its_own_that_goes_with_its_process() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first != second and first.startswith("file:///")
    assert not Path(first.removeprefix("file://")).exists()
