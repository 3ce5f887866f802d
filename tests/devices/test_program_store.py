"""The store of compiled programs: what it returns and what it rejects."""

import threading

import pytest

from hetjax.devices.program_store import ProgramStore

KEY = "3f" * 32


@pytest.fixture
def store(tmp_path):
    return ProgramStore(tmp_path / "programs")


@pytest.fixture
def entry(store, tmp_path):
    store.write(KEY, b"machine code")
    return tmp_path / "programs" / KEY


def test_an_entry_is_read_by_every_store_on_the_directory(entry):
    assert ProgramStore(entry.parent).read(KEY) == b"machine code"
    assert ProgramStore(entry.parent).read("4f" * 32) is None


def test_only_the_user_can_access_directory_and_entries(entry):
    assert entry.parent.stat().st_mode & 0o777 == 0o700
    assert entry.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: entry.write_bytes(entry.read_bytes()[:-1]),
        lambda entry: entry.write_bytes(entry.read_bytes()[:20]),
        lambda entry: entry.write_bytes(b""),
        lambda entry: entry.write_bytes(entry.read_bytes()[:-1] + b"?"),
        lambda entry: entry.chmod(0o620),
        lambda entry: entry.symlink_to(entry.rename(entry.with_name("moved"))),
    ],
    ids=["truncated", "no content", "empty", "garbled", "writable by the group", "a link"],
)
def test_a_damaged_entry_reads_as_missing_and_can_be_rewritten(store, entry, spoil):
    spoil(entry)
    assert store.read(KEY) is None
    store.write(KEY, b"machine code")
    assert store.read(KEY) == b"machine code"


def test_a_renamed_entry_is_not_loaded(store, entry):
    entry.rename(entry.with_name("4f" * 32))
    assert store.read("4f" * 32) is None


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_writable_by_others_is_rejected(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="can be written by others"):
        ProgramStore(tmp_path)


def test_a_directory_of_another_user_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        ProgramStore(tmp_path)


def test_a_directory_swapped_after_the_check_is_not_read(store, entry):
    folder = entry.parent
    folder.rename(folder.with_name("away"))
    folder.mkdir()
    (folder / KEY).write_bytes(b"something else")
    assert store.read(KEY) == b"machine code"


def test_a_failed_write_is_ignored(store, entry):
    entry.unlink()
    entry.parent.rmdir()
    store.write(KEY, b"machine code")
    assert store.read(KEY) is None


def test_readers_see_whole_entries_while_many_write(store, entry):
    contents = {bytes([number]) * 100_000 for number in range(4)}
    writers = [
        threading.Thread(target=lambda content=content: [store.write(KEY, content) for _ in range(20)])
        for content in contents
    ]
    for writer in writers:
        writer.start()
    read = set()
    while any(writer.is_alive() for writer in writers):
        read.add(store.read(KEY))
    for writer in writers:
        writer.join()
    assert read <= contents | {b"machine code"}
    assert [path.name for path in entry.parent.iterdir()] == [KEY]
