"""The spool: numbered, bounded, and still there after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from collective.messages import AttemptOver, LogChunk, Metrics, RankState, Spooled, decode
from worker.spool import SEGMENT_BYTES, Spool

pytestmark = pytest.mark.timeout(30)


def chunk(text: str, offset: int = 0, attempt: str = "a-1") -> LogChunk:
    return LogChunk(
        attempt=attempt, rank=0, stream="stdout", offset=offset, text=text, size=len(text)
    )


def read(spool: Spool, after: int, count: int) -> list[Spooled]:
    reader = spool.entries(after, threading.Event())
    found = [decode(next(reader)[1]) for _ in range(count)]
    return [entry for entry in found if isinstance(entry, Spooled)]


def test_entries_come_in_order_and_wait_for_new_ones(tmp_path: Path) -> None:
    """A reader gets entries by number and is woken by the next one."""
    spool = Spool(tmp_path, 1 << 20)
    assert [spool.add(log=chunk(f"{i}\n")) for i in range(3)] == [1, 2, 3]
    stop = threading.Event()
    found: list[int] = []
    woken = threading.Event()

    def follow() -> None:
        for number, _ in spool.entries(1, stop):
            found.append(number)
            if number == 4:
                woken.set()

    reader = threading.Thread(target=follow)
    reader.start()
    spool.add(attempt_over=AttemptOver(attempt="a-1"))
    assert woken.wait(5)
    stop.set()
    spool.wake()
    reader.join(5)
    assert found == [2, 3, 4]
    spool.close()


def test_acknowledged_entries_free_their_room(tmp_path: Path) -> None:
    """Acknowledged segments are deleted; numbers go on, also over a restart."""
    spool = Spool(tmp_path, 1 << 30)
    text = "x" * 60_000
    while len(list(tmp_path.iterdir())) < 3:
        spool.add(log=chunk(text))
    last = spool.last
    spool.acknowledge(last - 1)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= SEGMENT_BYTES
    assert [entry.number for entry in read(spool, last - 1, 1)] == [last]
    spool.acknowledge(last)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0
    assert spool.attempts() == []
    spool.close()
    again = Spool(tmp_path, 1 << 30)
    assert again.add(log=chunk("next")) == last + 1
    assert again.attempts() == ["a-1"]
    again.close()


def test_numbers_are_never_used_twice(tmp_path: Path) -> None:
    """A spool whose folder was emptied goes on behind what the control plane has stored."""
    spool = Spool(tmp_path, 1 << 20)
    spool.acknowledge(41)
    assert spool.add(log=chunk("x")) == 42
    assert [entry.number for entry in read(spool, 41, 1)] == [42]
    spool.close()


def test_half_a_line_is_removed(tmp_path: Path) -> None:
    """A write that a kill cut in two is not an entry."""
    spool = Spool(tmp_path, 1 << 20)
    spool.add(log=chunk("whole"))
    spool.close()
    (path,) = tmp_path.iterdir()
    with path.open("ab") as file:
        file.write(b'2\t{"type":"spoo')
    again = Spool(tmp_path, 1 << 20)
    assert again.last == 1
    assert again.add(log=chunk("second")) == 2
    assert [entry.log.text for entry in read(again, 0, 2) if entry.log] == ["whole", "second"]
    again.close()


def test_a_full_spool_keeps_what_matters(tmp_path: Path) -> None:
    """Logs go first, then metrics; states and the end of an attempt always fit."""
    spool = Spool(tmp_path, 100_000)
    offset = 0
    while spool.add(log=chunk("l" * 1000, offset)) is not None:
        offset += 1000
    while spool.add(metrics=Metrics(attempt="a-1", rank=0, step=1, values={"n": "m" * 500})):
        pass
    assert spool.dropped == 1
    assert spool.add(rank=RankState(attempt="a-1", rank=0, state="exited", exit_code=3))
    last = spool.last
    spool.acknowledge(last)
    assert spool.add(log=chunk("late", offset + 1000)) == last + 1
    (entry,) = read(spool, last, 1)
    assert entry.log is not None and entry.log.cut == 1000
    spool.close()


def test_a_cut_at_the_end_of_a_stream_is_marked(tmp_path: Path) -> None:
    """Output that was left out at the very end is told by an empty chunk."""
    spool = Spool(tmp_path, 1000)
    assert spool.add(log=chunk("l" * 2000)) is None
    spool.close_stream("a-1", 0, "stdout", 2000)
    (entry,) = read(spool, 0, 1)
    assert entry.log is not None
    assert (entry.log.cut, entry.log.offset, entry.log.size) == (2000, 2000, 0)
    spool.close()


def test_entries_survive_sigkill(tmp_path: Path) -> None:
    """What was added before a SIGKILL is there afterwards, whole and in order."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from collective.messages import LogChunk\n"
        "from worker.spool import Spool\n"
        "spool = Spool(Path(sys.argv[1]), 1 << 30)\n"
        "for i in range(10**9):\n"
        "    spool.add(log=LogChunk(attempt='a-1', rank=0, stream='stdout', offset=i,\n"
        "                           text='x' * 500, size=500))\n"
        "    print(i + 1, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE)
    with writer:
        assert writer.stdout is not None
        for _ in range(2000):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        told = writer.stdout.read().splitlines()
    spool = Spool(tmp_path, 1 << 30)
    assert spool.last >= int(told[-1] if told else 2000)
    entries = read(spool, 0, spool.last)
    assert [entry.number for entry in entries] == list(range(1, spool.last + 1))
    spool.close()


def test_a_full_disk_loses_output_not_exit_codes(tmp_path: Path) -> None:
    """When the disk takes nothing more, output is cut with its mark; later entries are whole."""
    program = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from collective.messages import LogChunk, RankState\n"
        "from worker.spool import Spool\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "spool = Spool(Path(sys.argv[1]), 1 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))\n"
        "for i in range(10):\n"
        "    spool.add(log=LogChunk(attempt='a-1', rank=0, stream='stdout', offset=i * 500,\n"
        "                           text='x' * 500, size=500))\n"
        "spool.add(rank=RankState(attempt='a-1', rank=0, state='exited', exit_code=3))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "spool.close_stream('a-1', 0, 'stdout', 5000)\n"
        "spool.close()\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True)
    spool = Spool(tmp_path, 1 << 30)
    entries = read(spool, 0, spool.last)
    assert [entry.number for entry in entries] == list(range(1, spool.last + 1))
    logs = [entry.log for entry in entries if entry.log]
    assert sum(log.size + log.cut for log in logs) == 5000 and logs[-1].cut > 0
    assert [entry.rank.exit_code for entry in entries if entry.rank] == [3]
    assert os.path.getsize(next(iter(tmp_path.iterdir()))) > 0
    spool.close()
