"""Every error weft raises. Each says what was needed, what was found and what to do.

An error is a headline followed by labelled lines; `program` is an excerpt with the offending node marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class WeftError(Exception):
    """Base of all weft errors: a headline, an excerpt of the program, then needed / found / try."""

    status = 1  # what the command ends with

    def __init__(
        self,
        message: str,
        *,
        needed: str | None = None,
        found: str | None = None,
        try_: str | Sequence[str] | None = None,
        program: str | None = None,
        where: str | None = None,
    ) -> None:
        self.message = message
        self.needed = needed
        self.found = found
        self.repairs = (try_,) if isinstance(try_, str) else tuple(try_ or ())
        self.program = program
        self.where = where
        super().__init__(self._text())

    def at(self, where: str | None) -> Self:
        """The same error, told where it happened unless it knows."""
        self.where = self.where or where
        self.args = (self._text(),)
        return self

    def _text(self) -> str:
        head = self.message if self.where is None else f"{self.message} ({self.where})"
        facts = [("needed", self.needed), ("found", self.found)] + [("try", r) for r in self.repairs]
        lines = [f"  {label:<7} {text}" for label, text in facts if text]
        body = [self.program.rstrip("\n"), ""] if self.program else []
        return "\n".join([head, *([""] if body or lines else []), *body, *lines])


def reason(error: Exception) -> str:
    """What went wrong, in one line: of a file in the words of the file system."""
    return (isinstance(error, OSError) and error.strerror) or str(error).split("\n", 1)[0] or type(error).__name__


class LayoutError(WeftError):
    """A layout that cannot be: an unknown axis, a dim that is not there, an atom sharded twice over one axis."""


class TypeMismatch(WeftError):
    """An op was given operands whose shapes, dtypes or layouts it cannot take."""


class NoSuchMethod(TypeMismatch, AttributeError):
    """A value of a program was used as a torch tensor is."""


class InvalidProgram(WeftError):
    """A program that breaks a rule of `core.spec`."""


class ParseError(WeftError):
    """Program text that does not parse."""


class InvalidTransform(WeftError):
    """A verb or rule was asked for where it does not hold."""


class AmbiguousPlace(WeftError):
    """`find` was asked for one node and several, or none, answer."""


class UnknownName(WeftError):
    """A name (op, example, schedule, model, cluster, plan) that weft does not know."""


class OpDefinitionError(WeftError):
    """An op entry that lacks a facet or contradicts itself."""


class NotDifferentiable(WeftError):
    """A gradient was asked through an op that has none."""


class CaptureError(WeftError):
    """A PyTorch model or step that cannot be captured."""


class PlanError(WeftError):
    """A plan that cannot be read, does not fit the model or the cluster, or is infeasible."""


class ClusterError(WeftError):
    """A cluster description that cannot be read or makes no sense."""


class RuntimeFault(WeftError):
    """A rank died, hung, or disagreed with the others."""


class KernelError(WeftError):
    """A kernel could not be generated, compiled or loaded."""


class StructureError(WeftError):
    """A dynamic graph that is not what the vertex function needs."""


class CheckpointError(WeftError):
    """A checkpoint that cannot be written, or does not belong here."""


class RuleError(WeftError):
    """A rewrite rule that is ill-formed or refuted."""
