"""Beside damage: disk use, mounts, and the repair that can be proven."""

import os
from pathlib import Path

import factories as make
import pytest

from molt import cli
from molt.store import Log
from molt.store.advice import disk_use, mount_of
from molt.store.doctor import doctor

MOUNTINFO = """\
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 27 0:40 / /mnt/my\\040share rw shared:9 - nfs4 server:/x rw,vers=4.2
31 30 0:41 / /mnt/my\\040share/fast rw - xfs /dev/nvme0 rw
32 27 0:42 / /scratch rw - tmpfs tmpfs rw
33 27 0:43 / /var/box rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "word"),
    [
        ("/home/me/log", "ext4", None),
        ("/mnt/my share/log", "nfs4", "become visible late"),
        ("/mnt/my share", "nfs4", "become visible late"),
        ("/mnt/my share/fast/log", "xfs", None),
        ("/scratch/a/b", "tmpfs", "survives a reboot"),
        ("/scratchpad/a", "ext4", None),
        ("/var/box/log", "overlay", "Mount a volume"),
    ],
)
def test_the_mount_that_holds_the_log_is_named(tmp_path, path, kind, word) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    found = mount_of(Path(path), str(tmp_path / "mountinfo"))
    assert found["type"] == kind
    assert found["advice"] is None if word is None else word in found["advice"]


def test_disk_use_by_stream_and_age_adds_up(tiny: Log) -> None:
    now = 1_000_000_000.0
    files = [p for p in tiny.path.rglob("*") if p.is_file()]
    for path in files:
        os.utime(path, (now - 100, now - 100))
    old = make.data_commits(tiny.path, "segments")[0]
    os.utime(old, (now - 86_400 * 10,) * 2)
    use = disk_use(tiny.path, now)
    assert use["segments"]["month"] == old.stat().st_size
    assert sum(sum(v.values()) for v in use.values()) == sum(p.stat().st_size for p in files)
    assert {"control", "checkpoints", "rollouts", "end", "format.json"} <= set(use)


def test_repair_removes_leftovers_of_closed_writers_alone(
    tiny: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny.writer(linger_s=60) as w:
        w.append("rewards", make.reward(revision=7))
        w.flush()
        busy = tiny.path / "data" / w.name / "000000" / ".0000000001.rewards.arrow.9.aa"
        busy.write_bytes(b"being written")
        done = make.data_commits(tiny.path)[0]
        left = done.with_name(f".{done.name}.7.abcd")
        left.write_bytes(b"half")
        found = doctor(tiny.path, repair=True)
        assert found["ok"] and found["repaired"] == [str(left.relative_to(tiny.path))]
        assert found["leftovers"] == [str(busy.relative_to(tiny.path))]
        assert busy.exists() and not left.exists()
    assert cli.main(["doctor", str(tiny.path), "--repair"]) == 0
    out = capsys.readouterr().out
    assert f"repaired: {busy.relative_to(tiny.path)}" in out and "| segments" in out
    assert not busy.exists()


def test_repair_is_left_out_where_damage_hides_who_is_closed(tiny: Log) -> None:
    """The report is given all the same, and the leftover stays."""
    commit = make.data_commits(tiny.path)[0]
    left = commit.with_name(f".{commit.name}.7.abcd")
    left.write_bytes(b"half")
    twin = commit.with_name(commit.name.replace(".prompts.", ".scores."))
    record = tiny.path / f"train/{3:010d}.arrow"
    whole = record.read_bytes()
    for damage in (
        lambda: make.flip(record, 200),
        record.unlink,
        record.mkdir,
        lambda: twin.write_bytes(commit.read_bytes()),
    ):
        damage()
        found = doctor(tiny.path, repair=True)
        assert found["problems"] and found["repaired"] == [] and left.exists()
        if record.is_dir():
            record.rmdir()
            record.write_bytes(whole)
    twin.unlink()
    assert doctor(tiny.path, repair=True)["repaired"] == [str(left.relative_to(tiny.path))]
