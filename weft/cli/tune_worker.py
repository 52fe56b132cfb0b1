"""What `weft tune` starts on every rank: search the schedules of one program and leave the result for the parent.

worker.py PROGRAM OUT LIMIT AGAIN        PROGRAM is a file of program text, OUT a file for JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft import interp
from weft.api.compiled import Compiled
from weft.core.program import Program
from weft.core.text import parse
from weft.tune.programs import tune_program


def main() -> None:
    text, out, limit, again = sys.argv[1:]
    dist.init_process_group("gloo")
    program = parse(Path(text).read_text())
    tried: list[str] = []

    def show(name: str, ms: float, of: int) -> None:
        tried.append(name)
        if dist.get_rank() == 0:
            print(json.dumps({"tried": name, "ms": ms, "of": of}), flush=True)

    best, result = tune_program(program, compile_=Compiled, inputs=random_inputs, limit=int(limit), again=again == "1", on_result=show)
    if dist.get_rank() == 0:
        report = {"times": result.times, "choice": result.choice, "gain": result.gain, "program": best.text, "history": best.history}
        Path(out).write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def random_inputs(program: Program) -> dict[str, Any]:
    """This rank's share of random inputs; scalars are 1, so steps and rates make sense."""
    torch.manual_seed(0)
    coords = program.mesh.coords(dist.get_rank())
    found = {}
    for name, node in program.input_names.items():
        if node.layout.present(coords):
            full = torch.rand(node.shape) if node.shape else torch.tensor(1.0)
            found[name] = interp.take_local(full.to(node.dtype), node.layout, coords).contiguous()
    return found


if __name__ == "__main__":
    main()
