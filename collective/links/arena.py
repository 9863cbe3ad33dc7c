"""Memory that ranks of one node read in place: each process's own, and what it borrows of others.

A process has at most one arena: a nameless file as long as the machine's memory, of which only
pages in use exist.  So every tensor in it is an offset, a peer maps it once whatever is made or
freed later, and the pages of a tensor go back to the system with it, also while peers map them.
The file is sealed: nobody can shrink it under those who read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque

import numpy as np

from collective.errors import ProtocolError
from collective.reduction import Array

_PAGE = mmap.PAGESIZE
#: bytes of the name by which an arena is known to those who map it
NAME = 16


class Arena:
    """This process's memory for shared tensors.

    Attributes:
        name: random bytes that tell it from all others.
        descriptor: the file's, to be handed to peers.
    """

    def __init__(self) -> None:
        """Reserve addresses; memory is taken page by page where tensors are written.

        Raises:
            MemoryError: the system refuses the addresses.
        """
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.name = os.urandom(NAME)
        self.descriptor = os.memfd_create("unisono-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.descriptor, size)
        except OSError as error:
            os.close(self.descriptor)
            raise MemoryError(
                f"cannot reserve {size} bytes of addresses for shared tensors ({error}): "
                "raise the limit of virtual memory (ulimit -v), or use torch.empty"
            ) from error
        self._bytes: Array = np.frombuffer(self._map, dtype=np.uint8)
        self._start = _address(self._bytes)
        self._size = size
        self._process = os.getpid()
        self._lock = threading.Lock()
        #: free runs [start, stop), in order
        self._free = [(0, size)]
        #: runs whose tensors are gone; a finalizer may come while the lock is held
        self._given_back: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> Array:
        """Zeroed bytes, at least so many; they are free again when the array is gone.

        Raises:
            MemoryError: no run is so long.
        """
        need = -(-nbytes // _PAGE) * _PAGE
        with self._lock:
            self._gather()
            for index, (start, stop) in enumerate(self._free):
                if stop - start >= need:
                    self._free[index] = (start + need, stop)
                    break
            else:
                raise MemoryError(
                    f"no room for {nbytes} bytes among the shared tensors of this process, which "
                    f"have the machine's {self._size} bytes: free some, or use torch.empty"
                )
        array = self._bytes[start : start + need]
        weakref.finalize(array, self._give_back, start, start + need).atexit = False
        return array

    def find(self, array: Array) -> int | None:
        """Where in the arena a contiguous array starts; None for one that lies elsewhere."""
        offset = _address(array) - self._start
        return offset if 0 <= offset < self._size and array.nbytes else None

    def _give_back(self, start: int, stop: int) -> None:
        if os.getpid() == self._process:  # a forked child's copy is the parent's memory
            self._map.madvise(mmap.MADV_REMOVE, start, stop - start)
            self._given_back.append((start, stop))

    def _gather(self) -> None:
        """Join what was given back with its neighbours."""
        while self._given_back:
            self._free.append(self._given_back.popleft())
        runs: list[tuple[int, int]] = []
        for start, stop in sorted(self._free):
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            elif stop > start:
                runs.append((start, stop))
        self._free = runs


class Borrowed:
    """A peer's arena, mapped to be read."""

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("a peer's memory for tensors is not sealed against shrinking")
        self.view = memoryview(mmap.mmap(descriptor, self.size, prot=mmap.PROT_READ))


_borrowed: weakref.WeakValueDictionary[bytes, Borrowed] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_own: Arena | None = None


def borrow(name: bytes, descriptor: int) -> Borrowed:
    """The arena of that name, mapped once per process; takes the descriptor over."""
    try:
        with _lock:
            memory = _borrowed.get(name)
            if memory is None:
                memory = _borrowed[name] = Borrowed(descriptor)
            return memory
    finally:
        os.close(descriptor)


def own() -> Arena | None:
    """This process's arena, if it has one."""
    return _own


def make_own() -> Arena:
    """This process's arena; made at its first use."""
    global _own
    with _lock:
        if _own is None:
            _own = Arena()
        return _own


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _after_fork() -> None:
    """A child's tensors are its own: what it has inherited is the parent's to lend."""
    global _own, _lock
    _lock = threading.Lock()
    if _own is not None:
        os.close(_own.descriptor)
    _own = None


os.register_at_fork(after_in_child=_after_fork)
