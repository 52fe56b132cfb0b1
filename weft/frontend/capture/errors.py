"""The user's line in an error of capture, and what torch says when control flow would depend on data."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from weft.core.errors import CaptureError, WeftError

_TORCH = str(Path(torch.__file__).parent)
_NESTED = str(Path(torch.__file__).parent / "nested")
_HERE = str(Path(__file__).parent)
_UNREADABLE = ("data is not allocated yet", ".numpy() is not supported for tensor subclasses")


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the user's: neither torch's nor of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if not f.filename.startswith((_TORCH, _HERE, "<"))]
    return mine[-1] if mine else None


@contextmanager
def explained_backward():
    """Turn what an autograd function of the user's, or a hook, raises in a backward pass that is traced into a CaptureError that names it."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise
    except Exception as error:
        own = type(error).__module__.startswith("weft.")  # a refusal, or what the trace needs
        frames = [] if own else [f for f, _ in traceback.walk_tb(error.__traceback__)]
        mine = [f.f_code.co_qualname for f in frames if not f.f_code.co_filename.startswith((_TORCH, _HERE, "<"))]
        if not mine:
            raise
        raise CaptureError(
            f"{mine[0].rpartition('<locals>.')[2]}, which the backward pass calls, cannot be traced",
            needed="torch ops on gradients and on what the forward pass saved, without .grad of tensors and torch's graph",
            found=f"{type(error).__name__}: {error}",
            try_="torch.autograd.grad instead of .backward(), and ctx.save_for_backward for what is needed again",
            **_shown(error),
        ) from error


def _shown(error: BaseException) -> dict[str, Any]:
    frame = user_frame(error)
    if frame is None:
        return {}
    return {"where": f"{Path(frame.filename).name}, line {frame.lineno}", "program": f"  > {frame.line}"}


@contextmanager
def explained():
    """Turn what torch raises while tracing into a CaptureError that shows the user's line."""
    try:
        yield
    except WeftError:
        raise
    except DataDependentOutputException as error:
        raise CaptureError(
            "the model asks for a number that is only known when it runs",
            needed="control flow that depends on shapes and settings only",
            found=f"{error.func} turns a tensor into a Python number",
            try_=("torch.where(condition, a, b) instead of if", "keep the value a tensor, without .item()"),
            **_shown(error),
        ) from error
    except DynamicOutputShapeException as error:
        raise CaptureError(
            "the model makes a tensor whose shape depends on data",
            needed="shapes that follow from the shapes of the inputs",
            found=f"{error.func}",
            try_="a mask and torch.where instead of selecting elements; one_hot and sum instead of counting",
            **_shown(error),
        ) from error
    except Exception as error:
        if any(f.filename.startswith(_NESTED) for f in traceback.extract_tb(error.__traceback__)):
            raise CaptureError(
                "weft has no nested tensors",
                needed="tensors whose dims have one size each",
                found="one that holds samples of several sizes",
                try_="padded tensors and a mask, or packed documents with their offsets",
                **_shown(error),
            ) from error
        if not (isinstance(error, RuntimeError) and any(words in str(error) for words in _UNREADABLE)):
            raise
        raise CaptureError(
            "the model reads numbers from a tensor while it is traced",
            needed="sizes and settings that are Python numbers",
            found=str(error).split(". ")[0],
            try_=("give them as a list of numbers instead of a tensor", "compute with torch instead of numpy, or outside of the step"),
            **_shown(error),
        ) from error
