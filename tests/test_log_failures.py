"""Appends that fail half way: the log is unchanged, also after a power cut (P8, P11)."""

import errno
from functools import partial

import pytest
from support.faulty_files import REBOOTED, FaultyFiles, materialise
from support.roots import abandon, encoded, make_log, open_root, values

from embedlog.errors import StorageError

A, B, C = (encoded(name * 60) for name in (b"a", b"b", b"c"))


def fail_half_way(log, written):
    """Append three batches; the disk takes `written` bytes and fails for the rest."""
    files = log.context.files
    files.short_at(0, written)
    files.fail_at(1, errno.EIO, only=("write",))
    with pytest.raises(StorageError):
        log.append([B, B, B])
    files.heal()


def test_a_failed_append_does_not_come_back_with_a_power_cut(tmp_path):
    """Its bytes are truncated, and no later append brings them back (P8, P5)."""
    root = open_root(tmp_path / "root", files=partial(FaultyFiles, record=True))
    log = make_log(root)
    log.append([A])
    log.flush()
    fail_half_way(log, 2 * B.size)
    files = root.context.files
    files.note("refused")
    log.append([C])
    recording = files.recording()
    abandon(root)

    states_after = set()
    for number, image in enumerate(recording.states(limit=400, seed=0, per_cut=24)):
        if "refused" in image.notes:
            directory = tmp_path / str(number)
            directory.mkdir()
            materialise(image, directory)
            rebooted = open_root(directory, files=REBOOTED)
            states_after.add(tuple(values(rebooted.partition("t", 0))))
            abandon(rebooted)
    assert states_after == {(b"a" * 60,), (b"a" * 60, b"c" * 60)}
