"""One part of `bench.gpu_features` in a process of its own: fp8 against bf16, documents against a full causal mask, offload against recompute.

python -m bench._gpu_features_part PART cuda|cpu ROUNDS FOLDER
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench._gpu_rank import timed_row
from bench._gpu_time import in_turn, kernels_of
from bench._gpu_train_model import when_told

FEWER = dict(one.split("=") for one in os.environ.get("WEFT_BENCH_LAYERS", "").split(",") if one)  # fp8=8,offload=8
WIDE = {"num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
SMALL = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 12}
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
BEGAN = time.time()
MEAN = 1024  # tokens of a document
Way = Callable[[], Any]
Started = tuple[dict[str, Way], dict[str, Any]]


class Llama:
    """transformers' Llama with random weights in fp32, and steps that train copies of it in bf16."""

    def __init__(self, sizes: dict[str, int], batch: int, seq: int, device: str, attention: str = "sdpa") -> None:
        import transformers

        self.device, self.cuda = device, device == "cuda"
        sizes, self.batch, self.seq = (sizes, batch, seq) if self.cuda else (TINY, 2, 32)
        self.vocab = 32000 if self.cuda else 64
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, vocab_size=self.vocab, max_position_embeddings=self.seq, attn_implementation=attention)
        self.model = transformers.LlamaForCausalLM(config)
        self.seconds: dict[str, float] = {}

    def tokens(self, seed: int) -> dict[str, Tensor]:
        x = torch.randint(0, self.vocab, (self.batch, self.seq), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": x, "labels": x.clone()}

    def loss(self, model: Any, b: dict[str, Tensor]) -> Tensor:
        logits = model(**{k: v for k, v in b.items() if k != "labels"}, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), b["labels"][:, 1:].flatten())

    def weft(self, name: str, batch: dict[str, Tensor], plan: str = "dp1", precision: Any = torch.bfloat16) -> Any:
        """weft's step after its first call, from an idle device."""
        from weft.api.parallelize import parallelize

        start, model = time.time(), copy.deepcopy(self.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step = parallelize(model, self.loss, optimizer, batch, plan=plan, device=self.device, precision=precision, check=False)
        self.seconds[name] = round(time.time() - start, 1)
        print(f"{name}: {self.seconds[name]} s, {time.time() - BEGAN:.0f} s since the start", flush=True)
        return step

    def torch(self, compiled: bool) -> Callable[[dict[str, Tensor]], Tensor]:
        model = copy.deepcopy(self.model).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.cuda)

        def loss_of(m: Any, batch: Any) -> Any:
            with torch.autocast(self.device, torch.bfloat16):
                return self.loss(m, batch)

        run = torch.compile(loss_of) if compiled else loss_of

        def step(batch: dict[str, Tensor]) -> Tensor:
            optimizer.zero_grad()
            loss = run(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def there(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v.to(self.device) for k, v in batch.items()}


def layers(part: str, sizes: dict[str, int]) -> dict[str, int]:
    return sizes | ({"num_hidden_layers": int(FEWER[part])} if part in FEWER else {})


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def language(llama: Llama, seed: int) -> dict[str, Tensor]:
    """Tokens of which one in two follows from the one before it; the others are drawn, few of them often."""
    gen = torch.Generator().manual_seed(seed)
    drawn = (llama.vocab ** torch.rand(llama.batch, llama.seq, generator=gen)).long() - 1
    follows, x = torch.rand(llama.batch, llama.seq, generator=gen) < 0.5, drawn.clone()
    for t in range(1, llama.seq):
        x[:, t] = torch.where(follows[:, t], (x[:, t - 1] * 31 + 7) % llama.vocab, drawn[:, t])
    return {"input_ids": x, "labels": x.clone()}


def fp8(device: str) -> Started:
    """Losses of a hundred steps, each on a batch of its own, by either."""
    llama = Llama(layers("fp8", WIDE), 4, 2048, device)
    batches = [llama.there(language(llama, i)) for i in range(100 if llama.cuda else 4)]
    ways, losses, how = {}, {}, {}
    for name, precision in (("bf16", torch.bfloat16), ("weft", "fp8")):
        step = llama.weft(name, llama.tokens(0), precision=precision)
        losses[name] = [float(step(b)) for b in batches]
        ways[name], how[name] = (lambda step=step: step(batches[0])), step.compiled.how
    eager = llama.torch(False)
    theirs = [float(eager(b)) for b in batches[:4]]
    off, bf16 = apart(losses["weft"], losses["bf16"]), apart(losses["bf16"][:4], theirs)
    said: dict[str, Any] = {
        "correct": f"{len(losses['weft'])} losses equal bf16's to {off:.1e}; bf16's first four eager's to {bf16:.1e}",
        "how": how,
    }
    if off > 0.01 or bf16 > 0.02:
        said["failed"] = "losses are more than 1% off bf16's, or those of bf16 more than 2% off eager torch's"
    return ways, {**said, "losses": {k: [round(x, 4) for x in v[::10]] for k, v in losses.items()}, "first_step_s": llama.seconds}


def documents(device: str) -> Started:
    """Documents of random lengths end to end, by position ids, as transformers reads them; beside it the same tokens as one document, and torch
    with the documents written out as a mask. A model of 125M parameters, with which others have measured documents."""
    llama = Llama(layers("documents", SMALL), 2, 8192, device)
    packed = []
    for i in range(2):
        tokens = llama.tokens(i)
        begins = torch.rand(llama.batch, llama.seq, generator=torch.Generator().manual_seed(i)) < 1 / (MEAN if llama.cuda else 8)
        begins[:, 0] = True
        first = torch.where(begins, torch.arange(llama.seq), 0).cummax(1).values
        packed.append({**tokens, "position_ids": torch.arange(llama.seq) - first})
    there = [llama.there(b) for b in packed]
    whole = [{k: v for k, v in b.items() if k != "position_ids"} for b in there]
    masked = {**there[0], "attention_mask": seen(there[0]["position_ids"])}
    eager, theirs = llama.torch(False), []
    step = llama.weft("weft", packed[0])
    theirs = [float(eager(b)) for b in there]
    mine = [float(step(b)) for b in there]
    off = apart(mine, theirs)
    assert off < 2e-3, (mine, theirs)
    full = llama.weft("full", llama.tokens(0))
    compiled, dense = llama.torch(llama.cuda), llama.torch(llama.cuda)
    written = apart([float(dense(masked))], theirs[:1])
    assert written < 2e-3, written
    ways = {"weft": lambda: step(there[0]), "weft, full mask": lambda: full(whole[0]), "compile, full mask": lambda: compiled(whole[0]),
            "compile, mask written out": lambda: dense(masked)}  # fmt: skip
    for way in ways.values():
        for _ in range(4):
            way()
    said = {
        "correct": f"losses of two steps equal eager's with a mask to {off:.1e}",
        "how": step.compiled.how,
        "first_step_s": llama.seconds,
    }
    return ways, {**said, "tokens": llama.batch * llama.seq}


def seen(position_ids: Tensor) -> Tensor:
    """[batch, 1, tokens, tokens]: which tokens a token attends to, of its own document up to itself."""
    ids = (position_ids == 0).cumsum(1)
    return ((ids[:, :, None] == ids[:, None]) & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril())[:, None]


def attention(device: str) -> Started:
    """The kernels by themselves: off a float64 softmax at small sizes, and in turn with torch's for a full causal mask at large ones."""
    from weft.runtime import library_kernels

    if device != "cuda":
        return {"weft": lambda: torch.zeros(())}, {}
    off = {
        f"d{d} r{r} {order}": _off(library_kernels, d, g, r, order)
        for d, g, r in ((64, 2, 1), (128, 1, 4))
        for order in ("packed", "mixed")
    }
    ways: dict[str, Way] = {}
    for d, g, r in ((64, 16, 1), (128, 4, 4)):
        q, k, v, do = (torch.randn(2, *s, 8192, d, device=device, dtype=torch.bfloat16) for s in ((g, r), (g,), (g,), (g, r)))
        ids = (torch.rand(2, 8192, device=device) < 1 / MEAN).cumsum(1)
        for name, args in (("documents", (ids[:, :, None], ids[:, None])), ("full", ())):
            ahead, back = (getattr(library_kernels, f"{'document_' if args else ''}attention{end}") for end in ("", "_backward"))
            how = {"scale": d**-0.5, "causal": True}
            out, lse = ahead(q, k, v, *args, **how)
            given = do, q, k, v, out, lse, *args
            ways |= {
                f"d{d} {name} forward": partial(ahead, *given[1:4], *args, **how),
                f"d{d} {name} backward": partial(back, *given, **how),
            }
    for way in ways.values():
        way()
    worst = max(x for errors in off.values() for x in errors)
    said = {"correct": f"results and gradients equal a float64 softmax's to {worst:.1e}", "off": off}
    return {"weft": ways["d64 documents forward"], **ways}, said if worst < 2e-2 else {**said, "failed": f"off by {worst:.1e}"}


def _off(library_kernels: Any, d: int, g: int, r: int, order: str) -> list[float]:
    s = 700
    q, k, v, do = (torch.randn(2, *n, s, d, device="cuda").bfloat16() for n in ((g, r), (g,), (g,), (g, r)))
    ids = (torch.rand(2, s, device="cuda") < 0.01).cumsum(1) if order == "packed" else torch.randint(0, 4, (2, s), device="cuda")
    args, how = (ids[:, :, None], ids[:, None]), {"scale": d**-0.5, "causal": True}
    out, lse = library_kernels.document_attention(q, k, v, *args, **how)
    grads = library_kernels.document_attention_backward(do, q, k, v, out, lse, *args, **how)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    seen = (ids[:, :, None] == ids[:, None])[:, None, None] & torch.ones(s, s, device="cuda", dtype=torch.bool).tril()
    scores = (torch.einsum("bgrsd,bgtd->bgrst", *wide[:2]) * d**-0.5).masked_fill(~seen, -torch.inf)
    want = torch.einsum("bgrst,bgtd->bgrsd", scores.softmax(-1), wide[2])
    pairs = zip((out, *grads), (want, *torch.autograd.grad(want, wide, do.double())), strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


def offload(device: str) -> Started:
    """The inputs of recomputed blocks kept by the host: the losses of recompute, and peak bytes of either."""
    llama = Llama(layers("offload", {**WIDE, "num_hidden_layers": 12}), 4, 2048, device)
    batch = llama.there(llama.tokens(0))
    ways, losses, how, peak = {}, {}, {}, {}
    for name, plan in (("recompute", "recompute"), ("weft", "recompute,offload")):
        try:
            if llama.cuda:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_reserved() if llama.cuda else 0
            step = llama.weft(name, llama.tokens(0), plan)
            losses[name] = [float(step(batch)) for _ in range(5)]
            ways[name], how[name] = (lambda step=step: step(batch)), step.compiled.how
            peak[name] = (torch.cuda.max_memory_reserved() - before) / 1e9 if llama.cuda else 0.0  # a recording's memory is reserved, not allocated
        except Exception as error:
            how[name] = f"{type(error).__name__}: {error}"[:600]
    off = {name: apart(losses[name], losses["recompute"]) for name in losses}
    assert max(off.values()) < 2e-3, losses
    return ways, {"correct": f"five losses equal recompute's to {off}", "how": how, "peak_gb": peak, "first_step_s": llama.seconds}


PARTS: dict[str, Callable[[str], Started]] = {"fp8": fp8, "documents": documents, "attention": attention, "offload": offload}


def main() -> None:
    part, device, rounds, folder = sys.argv[1:]
    torch.set_float32_matmul_precision("high")

    def time_it(ways: dict[str, Way]) -> dict[str, Any]:
        if device == "cpu":
            return {"case": part, "ways": [way().item() for way in ways.values()]}
        row = timed_row(part, in_turn(ways, int(rounds)))
        return {**row, "kernels_us": {k: [list(x) for x in kernels_of(ways[k])[:25]] for k in ways if not k.startswith("compile")}}

    when_told(part, Path(folder), lambda: PARTS[part](device), time_it)


if __name__ == "__main__":
    main()
