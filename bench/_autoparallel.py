"""AutoParallel called as its example for Llama 3 calls it, where it is installed: what it chooses, and what its cost model says of other choices.

It traces on fake tensors of a CUDA mesh under a fake process group, so nothing is computed, but its torch must know CUDA: the kept answer was made
where a CUDA device that does nothing was registered. Attention is called by the kernel that an H100 takes; where there is none, torch chooses another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

ORIGIN = "github.com/meta-pytorch/autoparallel, called through weft bench autoparallel --solve"
Row = dict[str, Any]
FEATURES = {"forward": {"k": "in", "n": "out"}, "input_gradient": {"k": "out", "n": "in"}, "weight_gradient": {"k": "in", "n": "out"}}


def solved(layers: int, batch: int, seq: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Its own choice, and the cheapest where tokens are sharded over both axes (`tokens`) or matmuls along tp (`megatron`)."""
    import torch
    from autoparallel.api import AutoParallel  # type: ignore[import-not-found]
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.placement_types import Replicate, Shard

    mesh, model = _mesh(sizes), _llama(layers, seq)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with AutoParallel(model, lambda: torch.randint(0, 128256, (batch, seq), device="cuda"), mesh, policy, repeated_subgraphs=True) as made:
        made.add_parameter_memory_constraint(low=None, high=None)
        made.add_input_constraints([(Shard(0), Replicate())])
        made.add_output_constraints([(Shard(0), Shard(2))])
        cases = {name: _case(made, constrain) for name, constrain in (("free", _free), ("tokens", _tokens), ("megatron", _megatron))}
    return {"origin": ORIGIN, "layers": layers, "batch": batch, "seq": seq, "mesh": dict(sizes), "cases": cases}


def _mesh(sizes: Mapping[str, int]) -> Any:
    import math

    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes.values()))
    return torch.distributed.device_mesh.init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _llama(layers: int, seq: int) -> Any:
    import autoparallel._testing.models.llama3 as llama3  # type: ignore[import-not-found]
    import torch

    llama3.ScaledDotProductAttention.forward = lambda self, q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    with torch.device("meta"):
        args = llama3.TransformerModelArgs(
            dim=4096, n_layers=layers, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024, rope_theta=500000, vocab_size=128256,
            max_seq_len=seq,
        )  # fmt: skip
        model = llama3.Transformer(args)
    llama3.apply_ac(model, mode="selective", selective_ac_option="op")
    return model


def _case(made: Any, constrain: Callable[[Any, Sequence[Any]], list[str]]) -> dict[str, Any]:
    """One solution under some constraints, which are taken away again."""
    import torch

    solver = made.sharding_optimizer
    matmuls = made.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.einsum.default)
    names = constrain(solver, [n for n in matmuls if "nn_module_stack" in n.meta])
    solution = made.optimize_placement(verbose=False)
    solver.remove_constraints(names)
    return {"cost_us": solver._compute_solution_cost(solver._to_concrete_solution(solution)), **summary([_row(n, s) for n, s in solution.items()])}


def _free(solver: Any, forward: Sequence[Any]) -> list[str]:
    return []


def _tokens(solver: Any, forward: Sequence[Any]) -> list[str]:
    """As weft's dp8, cp8, zero3: every rank computes its tokens with gathered weights."""
    from torch.distributed.tensor.placement_types import Replicate, Shard

    names = []
    for n in forward[:-1]:
        names += solver.add_node_constraint(n, (Shard(0), Shard(1)), constraint_name=f"tokens_{n.name}")
        names += solver.add_node_constraint(n.all_input_nodes[1], (Replicate(), Replicate()), constraint_name=f"whole_{n.name}")
    return names


def _megatron(solver: Any, forward: Sequence[Any]) -> list[str]:
    """As its example constrains matmuls to tensor parallelism; seven a layer, the projection to the vocabulary after them."""
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    names = []
    for at, n in enumerate(forward[:-1]):
        out, weight = (Partial(), 0) if at % 7 in (3, 6) else (Shard(2), 1)
        names += solver.add_node_constraint(n, (Shard(0), out), constraint_name=f"tp_{n.name}")
        names += solver.add_node_constraint(n.all_input_nodes[1], (Replicate(), Shard(weight)), constraint_name=f"tpw_{n.name}")
    return names


# -- what is kept of a solution


def _row(node: Any, strategy: Any) -> Row:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return {
        "op": str(node.target), "equation": node.args[0] if "einsum" in str(node.target) else "", "module": next(reversed(stack.values()), ("",))[0],
        "backward": "fwd_nn_module_stack" in node.meta, "desc": str(node.meta.get("desc", "")), "ins": [_places(s) for s in strategy.input_specs or ()],
        "out": _places(strategy.output_specs),
    }  # fmt: skip


def _places(spec: Any) -> Any:
    if spec is None:
        return None
    return [_places(s) for s in spec] if isinstance(spec, (list, tuple)) else [str(p) for p in spec.placements]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Of every parameter the dims it is stored in shards along, of its matmuls and of attention what each axis shards."""
    matmuls: dict[str, dict[str, list[str | None]]] = {}
    for row in rows:
        if row["equation"]:
            role = "weight_gradient" if row["equation"].endswith("->kn") else "input_gradient" if row["backward"] else "forward"
            names = {"a": "batch", "b": "seq", **FEATURES[role]}
            matmuls.setdefault(_module(row), {})[role] = [names.get(x or "") for x in _sharded(row)]
    attention = next((r for r in rows if r["op"].startswith("aten._scaled_dot_product") and not r["backward"]), None)
    kept = {"attention": [dict(enumerate(("batch", "heads", "seq"))).get(_dim(p)) for p in attention["ins"][0]]} if attention else {}
    parameters = {_parameter(r): [_dim(p) for p in r["out"]] for r in rows if "ParamAOTInput" in r["desc"]}
    return {"parameters": parameters, "matmuls": matmuls, **kept}


def _sharded(row: Row) -> list[str | None]:
    """The label of an einsum that each axis of the mesh shards."""
    operands = row["equation"].partition("->")[0].split(",")
    found: list[str | None] = [None] * len(row["out"])
    for labels, places in zip(operands, row["ins"], strict=True):
        for axis, place in enumerate(places):
            dim = _dim(place)
            found[axis] = labels[dim] if dim is not None else found[axis]
    return found


def _dim(place: str) -> int | None:
    return int(place[2:-1]) if place.startswith("S(") else None


def _module(row: Row) -> str:
    return str(row["module"]).removeprefix("L['self'].").removeprefix("_export_root.").replace(".__dict__['_modules']['_checkpoint_wrapped_module']", "")


def _parameter(row: Row) -> str:
    """Its name in the module: of ParamAOTInput(target='layers.0.attention.wq.weight')."""
    return str(row["desc"]).split("target='")[1].partition("'")[0].removesuffix(".weight").replace("._checkpoint_wrapped_module", "")
