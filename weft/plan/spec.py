"""What a plan decides, as one value, and the words for it: `dp2,tp2,zero1,sp`.

Words joined by commas parse into a Spec and print from it; rules' moves alone have no words, a plan file has them. `dp2,shards3` splits the batch
into three equal shards by torch.chunk's rule, two for the first rank and one for the last. `pp4,zero-bubble,micro8` splits the layers into four
stages and the batch into eight micro-batches; `micro8` without `pp` accumulates. `recompute` keeps of a repeated block only its inputs,
`recompute:activation` and the like recompute a part of it (`plan.layers`); `offload` keeps what the backward pass reads of repeated blocks in
the host's memory, with `recompute` the inputs of blocks alone. `ep2,async-ep` sends tokens to experts in chunks, overlapped with the experts' matmuls;
`ragged-ep` sends them to the ranks they picked alone. `cp2,ring` gathers keys in chunks, overlapped with the attention that reads them;
`cp2,a2a` is Ulysses' all-to-all; `tp2,async-tp` has matmuls and their collectives in chunks. `zero3:embed.*` is ZeRO of some parameters,
`pin:mlp.*.w1=tp:S(1)` the layout of some, `split:layers.4` a module that begins a stage, `stage:first+layer*3+layer/full*5` what a stage is
made of, and `?` leaves open whatever no word says.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Self

from weft.core.errors import PlanError
from weft.core.layout import Mesh
from weft.plan.pins import parse_pin
from weft.plan.rewritten import Move
from weft.plan.schedules import CHUNKED, PLAIN, SCHEDULES, Schedule

AXES = ("pp", "dp", "cp", "ep", "tp")
NUMBERS = ("dp", "cp", "ep", "tp", "pp", "zero", "shards", "micro", "virtual")
FLAGS = {"sp": "sp", "ring": "ring", "a2a": "a2a", "gather-once": "gather_once", "async-tp": "async_tp", "async-ep": "async_ep", "ragged-ep": "ragged_ep",
         "offload": "offload"}  # fmt: skip
DECIDED = (
    "dp",
    "cp",
    "ep",
    "tp",
    "pp",
    "zero",
    "micro",
    "virtual",
    "schedule",
    "recompute",
    "sp",
    "gather_once",
    "async_tp",
    "ragged_ep",
)  # by a search
RECOMPUTE = ("", "selective", "per-op", "full")  # what all layers of a stack may recompute
OFFLOAD = "offload"  # the host keeps what the backward pass reads of a layer or, of one that is recomputed, its inputs
OFFLOADED = (OFFLOAD, f"full-{OFFLOAD}")
MIXED = "mixed"  # layer by layer, as the memory of each stage allows; the plan says which
AGAIN = {"recompute" if way == "full" else f"recompute:{way}": way for way in ("activation", "ffn", "selective", "per-op", "full")}
RECOMPUTE_WORDS = {**AGAIN, "recompute:none": "", f"recompute:{MIXED}": MIXED}
WORDS = (*FLAGS, *RECOMPUTE_WORDS, *SCHEDULES)
LISTS = ("zero3:PATTERN", "stage:BLOCKS", "split:MODULE", "pin:PATTERN=tp:S(1)", "share:KIND*COPIES*SAMPLES*TIMES")
PIECE = re.compile(r"([\w.-]+)(?:/([\w-]+))?(?:\*(\d+))?")
SHARE = re.compile(r"(.+)\*(\d+)\*(\d+)\*(\d+)")
SIZES = {"layer": 1.0, "attention": 0.5, "ffn": 0.5}  # of pieces, in layers
Piece = tuple[str, str, int]  # a block, what of it is recomputed, how often it comes
Share = tuple[str, int, int, int]  # a kind of device, its copies of the model, samples of a micro-batch, micro-batches


@dataclass(frozen=True)
class Spec:
    """Degrees of parallelism, and what is sharded, recomputed, overlapped and pinned."""

    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    zero: int = 0
    sp: bool = False
    shards: int = 0  # that the batch is split into along dp; as many as there are replicas where it is 0
    pp: int = 1
    schedule: str = PLAIN
    micro: int = 0  # micro-batches; twice as many as there are stages where it is 0
    virtual: int = 0  # runs of layers on each rank of the pipeline
    recompute: str = ""  # what repeated blocks recompute, of AGAIN; `mixed` where `stages` say it block by block
    ring: bool = False  # keys gathered along cp in chunks, overlapped with the attention
    a2a: bool = False  # heads sharded along cp during the attention
    gather_once: bool = False  # under ZeRO-3, parameters gathered and gradients reduced once a step, not for every micro-batch
    async_tp: bool = False  # collectives of tp overlapped with the matmuls they belong to
    async_ep: bool = False  # tokens dispatched to experts in chunks, overlapped with the experts' matmuls
    ragged_ep: bool = False  # tokens go to the ranks of the experts they picked alone
    offload: bool = False  # what the backward pass reads of repeated blocks is kept in the host's memory
    groups: tuple[tuple[str, int], ...] = ()  # ZeRO of parameters by pattern, where it is not `zero`; the last that fits
    stages: tuple[tuple[Piece, ...], ...] = ()  # what each virtual stage is made of; balanced where it says nothing
    splits: tuple[str, ...] = ()  # modules that begin a stage, all but the first
    pins: tuple[str, ...] = ()  # layouts of parameters by pattern
    shares: tuple[Share, ...] = ()  # of the batch, by kind of device, where they are unequal
    moves: tuple[Move, ...] | None = None  # uses of proved rules that rewrite the step; None where it is not rewritten at all
    open: frozenset[str] = frozenset()  # decisions that are left to a search

    @staticmethod
    def parse(text: str) -> Spec:
        if not isinstance(text, str):
            raise PlanError("this is no plan", needed='words such as "dp2,zero1"', found=repr(text))
        values: dict[str, Any] = {}
        words = [w for w in re.split(r"[,\s]+", text.strip()) if w]
        for word in words:
            for name, value in _meant(word, text):
                values[name] = (*values.get(name, ()), value) if name in TUPLES else value
        if any(values[k] == 0 for k in NUMBERS if k in values and k != "zero"):
            raise PlanError(f"no plan {text!r}", needed="degrees of 1 or more, and zero0 to zero3", found=text)
        values["open"] = frozenset(DECIDED) - values.keys() if "?" in words else frozenset()
        return Spec(**values).checked(text, "schedule" in values)

    def checked(self, text: str = "", ordered: bool = False) -> Spec:
        """The same, refused where its parts do not go together; `ordered` where a schedule was asked for."""
        text = text or str(self)
        if not 0 <= self.zero <= 3 or any(getattr(self, a) < 1 for a in AXES):
            raise PlanError(f"no plan {text!r}", needed="degrees of 1 or more, and zero0 to zero3", found=text)
        if self.schedule not in SCHEDULES or self.recompute not in RECOMPUTE_WORDS.values():
            known = f"a schedule of {', '.join(SCHEDULES)}; recompute of {', '.join(filter(None, RECOMPUTE_WORDS.values()))}"
            raise PlanError(f"no plan {text!r}", needed=known, found=f"{self.schedule}, {self.recompute or 'none'}")
        if self.pp == 1 and ordered and "pp" not in self.open:
            raise PlanError(f"no plan {text!r}", needed=f"pp2 or more for {self.schedule}", found="one stage")
        if self.virtual > 1 and not self.pipeline.takes_chunks and "schedule" not in self.open:
            raise PlanError(f"no plan {text!r}", needed=f"{CHUNKED}, where a rank has several runs of layers", found=self.schedule)
        folds = self.pipeline.folded is not None
        if folds and self.virtual not in (0, 2):
            raise PlanError(f"no plan {text!r}", needed=f"two runs of layers on a rank for {self.schedule}", found=str(self.virtual), try_="virtual2")
        if not self.open and not self.pipeline.may_take(self.pp, self.micro_batches):
            close = self.pipeline.rounds * self.pp if folds else -(-self.micro_batches // self.pp) * self.pp
            needed = f"{close} micro-batches or more" if folds else f"micro-batches in rounds of {self.pp}"
            raise PlanError(f"no plan {text!r}", needed=needed, found=str(self.micro_batches), try_=f"micro{close}")
        for word, wanted_ep in (("async-ep", self.async_ep), ("ragged-ep", self.ragged_ep)):
            if wanted_ep and self.ep == 1:
                raise PlanError(f"no plan {text!r}", needed=f"ep2 or more for {word}", found=text)
        if self.async_ep and self.ragged_ep:
            raise PlanError(f"no plan {text!r}", needed="async-ep or ragged-ep: chunks of tokens are gathered, not sent", found=text, try_="ragged-ep")
        for name, decided in (("stage:", self.stages), ("split:", self.splits)):
            wanted = self.virtual_stages - (name == "split:")
            if decided and len(decided) != wanted:
                raise PlanError(f"no plan {text!r}", needed=f"{wanted} words with {name} for {self.pp} stages", found=str(len(decided)))
        for pin in self.pins:
            parse_pin(pin)
        return self

    @property
    def pipeline(self) -> Schedule:
        return SCHEDULES[self.schedule]

    @property
    def again(self) -> str:
        """What repeated blocks recompute or leave to the host, as `plan.layers` has it."""
        return left_to_host(self.recompute) if self.offload else self.recompute

    @property
    def mesh(self) -> Mesh:
        return Mesh(**{a: getattr(self, a) for a in AXES if getattr(self, a) > 1 or a == "dp"})

    @property
    def copies(self) -> dict[str, int]:
        """Axes whose ranks hold the same parameters, which ZeRO shards among all of them, the outermost first."""
        return {a: n for a, n in (("dp", self.dp), ("cp", self.cp)) if n > 1}

    @property
    def micro_batches(self) -> int:
        return self.micro or (2 * self.pp if self.pp > 1 else 1)

    @property
    def chunks(self) -> int:
        """Runs of layers on each rank of the pipeline."""
        return self.virtual or (2 if self.pipeline.takes_chunks else 1)

    @property
    def virtual_stages(self) -> int:
        return self.pp * self.chunks

    @property
    def layers(self) -> tuple[float, ...]:
        """Layers of each virtual stage, where it is said what stages are made of; attention or feed-forward alone is half of one."""
        return tuple(sum(SIZES.get(name, 0.0) * n for name, _, n in stage) for stage in self.stages)

    def recomputing(self, mode: str) -> Self:
        """The same with all layers run in one of the ways of `plan.layers`."""
        again = "" if mode in ("none", OFFLOAD) else mode.removesuffix(f"-{OFFLOAD}")
        return replace(self, recompute=again, offload=mode.endswith(OFFLOAD))

    def with_layers(self, counts: Sequence[int]) -> Self:
        """The same with so many layers in each virtual stage, of which all recompute the same."""
        mode = "none" if self.recompute == MIXED else self.again or "none"
        return replace(self, stages=tuple((("layer", mode, n),) for n in counts))

    def zero_of(self, parameter: str) -> int:
        """The ZeRO stage of a parameter, by the last pattern that fits its name."""
        return next((level for pattern, level in reversed(self.groups) if fnmatch.fnmatch(parameter, pattern)), self.zero)

    @property
    def most_zero(self) -> int:
        return max(self.zero, *(level for _, level in self.groups), 0)

    def allows(self, other: Spec) -> bool:
        """Whether another decides as this one wherever this one is not open."""
        return all(getattr(self, name) == getattr(other, name) for name in DECIDED if name not in self.open)

    def __str__(self) -> str:
        return ",".join(self._words()) or "dp1"

    def _words(self) -> Iterator[str]:
        decided = {name for name in DECIDED if name not in self.open} if self.open else set[str]()  # where some are open, all others are given
        yield from (f"{a}{getattr(self, a)}" for a in ("dp", "cp", "ep", "tp", "pp") if getattr(self, a) > 1 or a in decided)
        if (self.schedule != PLAIN and (self.pp > 1 or "pp" in self.open)) or "schedule" in decided:
            yield self.schedule
        yield from (f"{w}{getattr(self, w)}" for w in ("zero", "shards", "micro", "virtual") if getattr(self, w))
        yield from ("zero0" for _ in range("zero" in decided and not self.zero))
        yield from (word if getattr(self, name) else f"no-{word}" for word, name in FLAGS.items() if getattr(self, name) or name in decided)
        if self.recompute or "recompute" in decided:
            yield next((word for word, mode in RECOMPUTE_WORDS.items() if mode == self.recompute), f"recompute:{self.recompute}")
        yield from (f"zero{level}:{pattern}" for pattern, level in self.groups)
        yield from ("stage:" + "+".join(map(_piece_text, stage)) for stage in self.stages)
        yield from (f"split:{path}" for path in self.splits)
        yield from (f"pin:{pin.replace(',', '+')}" for pin in self.pins)
        yield from ("share:" + "*".join(map(str, share)) for share in self.shares)
        if self.open:
            yield "?"

    # -- plain data ------------------------------------------------------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        """What is not as by default, in JSON's own types."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        own |= {"moves": [m.data() for m in self.moves]} if self.moves is not None else {}
        return own | {k: _listed(own[k]) for k in TUPLES if k in own} | ({"open": sorted(self.open)} if self.open else {})

    @staticmethod
    def of_data(data: Mapping[str, Any]) -> Spec:
        """The Spec of data that has the form of `data`."""
        own = {k: _tupled(v) if k in TUPLES else v for k, v in data.items()}
        if "moves" in own:
            own["moves"] = tuple(map(Move.of, own["moves"]))
        return Spec(**own | {"open": frozenset(own.get("open", ()))})


def left_to_host(mode: str) -> str:
    """The same way of running a layer, with what it keeps kept by the host."""
    return OFFLOAD if mode in ("", "none") else f"{mode}-{OFFLOAD}"


TUPLES = ("groups", "stages", "splits", "pins", "shares")


def _meant(word: str, text: str) -> Iterator[tuple[str, Any]]:
    """The fields a word is about, and what it says of each."""
    kind, _, rest = word.partition(":")
    if found := re.fullmatch(rf"({'|'.join(NUMBERS)})=?(\d+)", word):
        yield found[1], int(found[2])
    elif word in SCHEDULES:
        yield "schedule", word
    elif word in RECOMPUTE_WORDS:
        yield "recompute", RECOMPUTE_WORDS[word]
    elif word.removeprefix("no-") in FLAGS:
        yield FLAGS[word.removeprefix("no-")], not word.startswith("no-")
    elif kind in ("zero0", "zero1", "zero2", "zero3") and rest:
        yield "groups", (rest, int(kind[-1]))
    elif kind == "stage" and all(PIECE.fullmatch(p) for p in rest.split("+")):
        yield "stages", tuple(_piece(p) for p in rest.split("+"))
    elif kind == "split" and rest:
        yield "splits", rest
    elif kind == "pin" and rest:
        yield "pins", str(parse_pin(rest.replace("+", ",")))
    elif kind == "share" and (found := SHARE.fullmatch(rest)):
        yield "shares", (found[1], *map(int, found.groups()[1:]))
    elif word != "?":
        raise PlanError(
            f"no plan {text!r}",
            needed=f"degrees such as dp2 ({', '.join(NUMBERS)}), words such as sp ({', '.join(WORDS)}), or {', '.join(LISTS)}, joined by commas",
            found=word,
            try_=_instead(word),
        )


FAMILIAR = {"ddp": "dp2", "fsdp": "dp2,zero3", "fsdp1": "dp2,zero3", "fsdp2": "dp2,zero3", "hsdp": "dp2,zero3", "checkpoint": "recompute"}


def _instead(word: str) -> list[str]:
    """What somebody who wrote this word may have meant: another system's name for it, or the nearest word."""
    if word in FAMILIAR:
        return [FAMILIAR[word]]
    if glued := re.fullmatch(rf"((?:{'|'.join(NUMBERS)})\d+){{2,}}", word):
        return [",".join(re.findall(r"[a-z]+\d+", glued[0]))]
    digits = re.search(r"\d*$", word)
    number = digits[0] if digits else ""
    close = get_close_matches(word.removesuffix(number), [*NUMBERS, *WORDS], n=2)
    return [n + (number or "2") if n in NUMBERS else n for n in close]


def _piece(text: str) -> Piece:
    found = PIECE.fullmatch(text)
    assert found is not None
    return found[1], found[2] or "none", int(found[3] or 1)


def _piece_text(piece: Piece) -> str:
    name, mode, n = piece
    return name + (f"/{mode}" if mode != "none" else "") + (f"*{n}" if n != 1 else "")


def _listed(value: Any) -> Any:
    return [_listed(v) for v in value] if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(_tupled(v) for v in value) if isinstance(value, list) else value
