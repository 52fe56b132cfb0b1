"""What a plan decides, as one value, and the words for it: `dp2,tp2,zero1,sp`.

`dp2,pieces3` deals the batch in three equal pieces by torch.chunk's rule, two to the first rank and one to the last: the
last may then be slower. It is a layout like any other, so the step still equals one process.

`pp4,zero-bubble,micro8` cuts the layers into four stages and the batch into eight micro-batches. `1f1b` is the schedule where none
is named; `interleaved` gives a rank two runs of layers, or as many as `virtual4` says; `micro8` without `pp` accumulates.
`recompute` keeps of a repeated block only its inputs, and runs it again before its backward pass; `recompute:activation` and the like
run a part of it again (`plan.layers`). `cp2,ring` gathers keys in chunks
beside the attention that reads them; `cp2,a2a` brings heads to the ranks instead of keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from weft.core.errors import PlanError
from weft.core.layout import Mesh
from weft.plan.schedules import CHUNKED, PLAIN, SCHEDULES, Schedule
from weft.plan.setting import AGAIN

AXES = ("pp", "dp", "cp", "ep", "tp")
NUMBERS = ("dp", "cp", "ep", "tp", "pp", "zero", "pieces", "micro", "virtual")
WORDS = ("sp", *AGAIN, "ring", "a2a", *SCHEDULES)


@dataclass(frozen=True)
class Spec:
    """Degrees of parallelism, and what is stored in slices."""

    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    zero: int = 0
    sp: bool = False
    pieces: int = 0  # that the batch is dealt in along dp; as many as there are copies where it is 0
    pp: int = 1
    schedule: str = PLAIN
    micro: int = 0  # micro-batches; twice as many as there are stages where it is 0
    virtual: int = 0  # runs of layers on each rank of the pipeline
    recompute: str = ""  # what repeated blocks run again, of `setting.AGAIN`
    ring: bool = False  # keys gathered along cp in chunks, beside the attention
    a2a: bool = False  # heads cut along cp during the attention

    @staticmethod
    def parse(text: str) -> Spec:
        if not isinstance(text, str):
            raise PlanError("this is no plan", needed='words such as "dp2,zero1"', found=repr(text))
        values: dict[str, int | bool | str] = {}
        for word in filter(None, re.split(r"[,\s]+", text.strip())):
            m = re.fullmatch(rf"({'|'.join(NUMBERS)})=?(\d+)|({'|'.join(WORDS)})", word)
            if m is None:
                raise PlanError(
                    f"no plan {text!r}",
                    needed=f"numbers such as dp2 of {', '.join(NUMBERS)}, and words of {', '.join(WORDS)}, joined by commas",
                    found=word,
                )
            values |= _meant(word) if m[3] else {m[1]: int(m[2])}
        if int(values.get("zero", 0)) > 3 or any(v == 0 for k, v in values.items() if k != "zero"):
            raise PlanError(f"no plan {text!r}", needed="degrees of 1 or more, and zero0 to zero3", found=text)
        return Spec(**values)._checked(text, "schedule" in values)  # type: ignore[arg-type]

    def _checked(self, text: str, ordered: bool) -> Spec:
        if self.pp == 1 and ordered:
            raise PlanError(f"no plan {text!r}", needed=f"pp2 or more for {self.schedule}", found="one stage")
        if self.virtual > 1 and not self.pipeline.takes_chunks:
            raise PlanError(f"no plan {text!r}", needed=f"{CHUNKED}, where a rank has several runs of layers", found=self.schedule)
        if not self.pipeline.may_take(self.pp, self.micro_batches):
            near = -(-self.micro_batches // self.pp) * self.pp
            raise PlanError(
                f"no plan {text!r}", needed=f"micro-batches in rounds of {self.pp}", found=str(self.micro_batches), try_=f"micro{near}"
            )
        return self

    @property
    def pipeline(self) -> Schedule:
        return SCHEDULES[self.schedule]

    @property
    def mesh(self) -> Mesh:
        return Mesh(**{a: getattr(self, a) for a in AXES if getattr(self, a) > 1 or a == "dp"})

    @property
    def micro_batches(self) -> int:
        return self.micro or (2 * self.pp if self.pp > 1 else 1)

    @property
    def chunks(self) -> int:
        """Runs of layers on each rank of the pipeline."""
        return self.virtual or (2 if self.pipeline.takes_chunks else 1)

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    def __str__(self) -> str:
        words = [f"{f.name}{getattr(self, f.name)}" for f in fields(self) if f.name in AXES and getattr(self, f.name) > 1]
        words += [self.schedule] if self.pp > 1 and self.schedule != PLAIN else []
        numbers = [f"{w}{getattr(self, w)}" for w in ("zero", "pieces", "micro", "virtual") if getattr(self, w)]
        again = [word for word, way in AGAIN.items() if way == self.recompute]
        return ",".join(words + numbers + ["sp"] * self.sp + again + [w for w in ("ring", "a2a") if getattr(self, w)]) or "dp1"


def _meant(word: str) -> dict[str, bool | str]:
    """The field a word without a number is about."""
    if word in SCHEDULES:
        return {"schedule": word}
    return {"recompute": AGAIN[word]} if word in AGAIN else {word: True}
