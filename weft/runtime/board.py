"""Pages all ranks can see: where each rank is, what ops are called, and the last word when a run fails.

Ranks of one group share a page each. Under `weft run` the pages of the entire world are the launcher's, so it can read
where every rank was even after the rank is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import time
import zlib
from collections.abc import Iterator, Sequence

from weft.core.errors import RuntimeFault
from weft.runtime.shm import Segment

PAGE = 4096
NOTE = struct.Struct("=IIIId")  # at byte 256 of a page: pid, op, barriers entered by then, whether it waits, since when
NAMES, NAME = 512, 128  # op names each rank can leave for its peers, and bytes of one
SIZE = PAGE + NAMES * NAME
BEAT = struct.Struct("=d")  # at byte 384: when this rank could last run any thread of its own; 0 where none is there to say so
POSTS = struct.Struct("=9I")  # at byte 512: calls announced so far, and the last eight of them
WORDS = (1024, 3072)  # where on the first page the last word stands, and how long it may be


class Board:
    """One page per rank; `mine` is the page this process writes to, none for a launcher."""

    def __init__(self, pages: Sequence[memoryview], mine: int | None = None) -> None:
        self.pages, self.mine = list(pages), mine
        self._names: dict[str, int] = {}
        if mine is not None:
            self.note("start", waiting=False)

    def op(self, name: str) -> int:
        """A number for `name`, which anyone with the board can turn back into the name."""
        assert self.mine is not None
        if name not in self._names:
            if len(self._names) == NAMES:
                self._names.clear()
            number, text = zlib.crc32(name.encode()) or 1, name.encode()[: NAME - 5]
            at = PAGE + len(self._names) * NAME
            self.pages[self.mine][at : at + NAME] = number.to_bytes(4, "little") + text.ljust(NAME - 4, b"\0")
            self._names[name] = number
        return self._names[name]

    def op_name(self, number: int) -> str:
        """What any rank called op `number`."""
        wanted = number.to_bytes(4, "little")
        for page in self.pages:
            for at in range(PAGE, SIZE, NAME):
                if page[at : at + 4] == wanted and page[at + 4]:
                    return bytes(page[at + 4 : at + NAME]).rstrip(b"\0").decode(errors="replace")
        return "an op without a name"

    def note(self, name: str, *, waiting: bool) -> None:
        """Say what this rank is doing now."""
        assert self.mine is not None
        page = self.pages[self.mine]
        NOTE.pack_into(page, 256, os.getpid(), self.op(name), self._meetings(self.mine)[0], waiting, time.monotonic())

    def noted(self, rank: int) -> tuple[int, str | None, bool, float]:
        """Process, op, whether it waits, and since when, as `rank` last said; a rank that said nothing has process 0."""
        pid, op, _, waiting, since = NOTE.unpack_from(self.pages[rank], 256)
        return pid, self.op_name(op) if op else None, bool(waiting), since

    def beat(self) -> None:
        """Say that threads of this rank can run."""
        assert self.mine is not None
        BEAT.pack_into(self.pages[self.mine], 384, time.monotonic())

    def silent(self, rank: int) -> float:
        """For how many seconds no thread of a rank could run, as far as it is known."""
        (at,) = BEAT.unpack_from(self.pages[rank], 384)
        return time.monotonic() - at if at else 0.0

    def last_op(self, rank: int) -> str | None:
        """The op for which `rank` last waited in memory, or what it noted since."""
        epoch, met = self._meetings(rank)
        pid, op, then, _, _ = NOTE.unpack_from(self.pages[rank], 256)
        later = epoch if not pid else (epoch - then) & 0xFFFFFFFF
        return self.op_name(met) if later else self.op_name(op) if op else None

    def _meetings(self, rank: int) -> tuple[int, int]:
        """How many barriers `rank` has entered, and the op of the last."""
        words = struct.unpack_from("=8I", self.pages[rank])  # epoch, sleepers, verdict (2), ops (4)
        return words[0], words[4 + words[0] % 4]

    def furthest(self) -> list[int]:
        """The ranks that have entered the most barriers."""
        epochs = [self._meetings(r)[0] for r in range(len(self.pages))]
        return [r for r, e in enumerate(epochs) if e == max(epochs)]

    def post(self, name: str) -> None:
        """Say which call comes next, without waiting; fail if another rank announced another one in its place."""
        assert self.mine is not None
        count, *last = POSTS.unpack_from(self.pages[self.mine], 512)
        last[(count + 1) % 8] = self.op(name)
        POSTS.pack_into(self.pages[self.mine], 512, count + 1, *last)
        for rank, page in enumerate(self.pages):
            theirs, *posts = POSTS.unpack_from(page, 512)
            if 0 <= theirs - (count + 1) < 8 and posts[(count + 1) % 8] != last[(count + 1) % 8]:
                raise self._other_order(rank, name, self.op_name(posts[(count + 1) % 8]), count + 1)

    def _other_order(self, rank: int, mine: str, theirs: str, number: int) -> RuntimeFault:
        return RuntimeFault(
            f"ranks disagree at call {number}: rank {self.mine} runs {mine}, rank {rank} runs {theirs}",
            needed="the same programs in the same order on every rank",
            found=f"rank {self.mine} is at {mine}, rank {rank} at {theirs}",
            try_="look for a branch that depends on the rank",
        )

    def post_final_message(self, text: str) -> None:
        """Leave the one message for the launcher; the first one stays."""
        at, room = WORDS
        if not self.pages[0][at]:
            words = text.encode()[: room - 1]
            self.pages[0][at : at + len(words)] = words

    def last_word(self) -> str:
        at, room = WORDS
        return bytes(self.pages[0][at : at + room]).rstrip(b"\0").decode(errors="replace")


# -- the world's board, made by a launcher -----------------------------------------------------------------------------

_world: Board | None = None


def open_for_launch(world: int) -> tuple[Board, Segment, str]:
    """A board for ranks that are yet to start, and what to put into WEFT_BOARD for them."""
    segment = Segment.create(world * SIZE)
    view = memoryview(segment.memory)
    pages = [view[r * SIZE : (r + 1) * SIZE] for r in range(world)]
    return Board(pages), segment, ":".join(map(str, segment.key))


def world_board() -> Board | None:
    """The launcher's board, if this rank was started by one."""
    global _world
    given = os.environ.get("WEFT_BOARD")
    if _world is None and given and "RANK" in os.environ:
        pid, fd, nbytes = map(int, given.split(":"))
        view = memoryview(Segment.open((pid, fd, nbytes)).memory)
        pages = [view[r * SIZE : (r + 1) * SIZE] for r in range(nbytes // SIZE)]
        _world = Board(pages, int(os.environ["RANK"]))
        _end_with(pid)
    return _world


@contextlib.contextmanager
def doing(name: str) -> Iterator[None]:
    """What this rank waits for, told to the launcher if there is one."""
    board = world_board()
    if board is None:
        yield
        return
    board.note(name, waiting=True)
    yield
    board.note(name, waiting=False)


def _end_with(launcher: int) -> None:
    """A rank does not outlive its launcher."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != launcher:
        with contextlib.suppress(ProcessLookupError):
            os.kill(launcher, 0)
