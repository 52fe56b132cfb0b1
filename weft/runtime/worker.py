"""What `weft run` starts on each rank: the user's script, with failures told to the launcher in one message."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

from weft.core.errors import RuntimeFault, WeftError
from weft.runtime import faults
from weft.runtime.board import Board, world_board

LIBRARY = str(Path(faults.__file__).parents[1]) + os.sep


def main() -> None:
    board = world_board()
    sys.excepthook = lambda kind, error, at: _report(error, at, board)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    try:
        kept = runpy.run_path(sys.argv[0], run_name="__main__")  # noqa: F841  what it made lives to the end
    except RuntimeFault as fault:
        cause = fault.__cause__
        if board is not None and not (isinstance(cause, RuntimeError) and faults.is_lost_connection(cause)):  # the launcher knows which rank it was
            board.post_final_message(str(fault))
        leave(faults.LOST_A_PEER)
    except RuntimeError as error:
        if board is None or not faults.is_lost_connection(error):
            raise
        leave(faults.LOST_A_PEER)
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
    except SystemExit as done:
        finish(_status(done.code))
    finish()


def _report(error: BaseException, at: TracebackType | None, board: Board | None) -> None:
    """Print what ended the script, from the script's own frame on. Of weft's errors the user's lines are enough, and one of all ranks that
    raise the same prints it; WEFT_TRACEBACK=full prints everything."""
    full = os.environ.get("WEFT_TRACEBACK") == "full"
    while at is not None and not full and at.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        at = at.tb_next
    if full or not isinstance(error, WeftError):
        traceback.print_exception(type(error), error, at)
        return
    if board is not None and _printed_by_another(board, str(error)):
        return
    frames = [f for f in traceback.extract_tb(at) if not f.filename.startswith(LIBRARY)]
    print("".join(["Traceback (most recent call last):\n", *traceback.format_list(frames)]), end="", file=sys.stderr)
    print(f"{type(error).__name__}: {error}", file=sys.stderr)


def _printed_by_another(board: Board, text: str) -> bool:
    """Whether another rank has printed this; if none has printed anything, this one does."""
    before = board.last_word()
    board.post_final_message(text)
    return bool(before) and text.startswith(before)


def _status(code: object) -> int:
    """As Python ends a script: words go to stderr."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def finish(status: int = 0) -> None:
    """End a script that came to its end without taking down the interpreter or what the script made: gloo's threads may still hold a
    tensor. One that lets go of it while Python ends aborts the process; one that DDP's reducer waits for as it dies waits for it."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    leave(status)


def leave(status: int) -> None:
    """End now: a process group that has lost a rank can wait for it for minutes while it is taken down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
