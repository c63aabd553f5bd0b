"""Files of every schema version ever written are read for ever."""

import json
import sys
from pathlib import Path

import pytest

from molt.schemas.columns import to_rows
from molt.schemas.control import CONTROL_VERSIONS
from molt.schemas.streams import STREAMS, VERSIONS
from molt.store.commit import decode

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
from make_golden import GOLDEN, WRITER, add_missing, encode_golden, plain_rows

FILES = sorted(GOLDEN.glob("*.arrow"))


def test_every_current_version_has_its_file() -> None:
    expected = {f"{n}-{v}.arrow" for n, v in {**VERSIONS, **CONTROL_VERSIONS}.items()}
    assert expected <= {f.name for f in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_golden_file_reads_as_it_did(path: Path) -> None:
    name = path.stem.rpartition("-")[0]
    expected = json.loads(path.with_suffix(".json").read_text())
    found = plain_rows(path.read_bytes(), name)
    for was, now in zip(expected, found, strict=True):
        added = now.keys() - was.keys()
        assert all(now.pop(column) is None for column in added), "columns added since are null"
    assert found == expected and expected


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_golden_file_is_what_this_program_writes(path: Path) -> None:
    """At the current version the rows written today are those of the file."""
    name, _, version = path.stem.rpartition("-")
    if {**VERSIONS, **CONTROL_VERSIONS}[name] == version:
        assert plain_rows(encode_golden(name), name) == plain_rows(path.read_bytes(), name)


def test_the_golden_child_segment_names_its_parent() -> None:
    raw = (GOLDEN / "segments-1.0.arrow").read_bytes()
    from molt.schemas.check import Parent, check_segment

    root, child = to_rows(decode(raw, stream="segments", writer=WRITER, seq=0).table)
    check_segment(root)
    check_segment(child, Parent(digest=root["digest"], n_chain=3, n_own=3))


def test_golden_files_are_added_and_never_rewritten(tmp_path: Path) -> None:
    assert len(add_missing(tmp_path)) == len({**VERSIONS, **CONTROL_VERSIONS})
    old = tmp_path / "rewards-1.0.arrow"
    old.write_bytes(b"as it was")
    (tmp_path / "scores-1.0.arrow").unlink()
    (tmp_path / "scores-1.0.json").unlink()
    assert add_missing(tmp_path) == ["scores-1.0.arrow"]
    assert old.read_bytes() == b"as it was"
    assert set(STREAMS) <= set(VERSIONS)
