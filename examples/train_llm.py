"""Train a Hugging Face causal language model under a plan: `weft run -n 2 examples/train_llm.py --plan dp2,zero1 --out run`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import weft

SMALL = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--model", help="a Hugging Face folder; a small Llama if not given")
    p.add_argument("--text", default=__file__)
    p.add_argument("--plan", default="auto")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--save-every", type=int, default=100)
    p.add_argument("--out", default="run")
    return p.parse_args()


def tokens(text: str, tokenizer: Any) -> torch.Tensor:
    """The text's tokens; its bytes where the model has no tokenizer."""
    return torch.tensor(tokenizer(Path(text).read_text()).input_ids if tokenizer else list(Path(text).read_bytes()))


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


def main() -> None:
    args = arguments()
    dist.init_process_group()  # NCCL on GPUs, gloo on CPUs
    torch.manual_seed(0)
    with torch.device("meta"):  # no rank holds the full model
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model) if args.model else SMALL)
    weights = args.model if args.model and any(Path(args.model).glob("*.safetensors")) else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model and any(Path(args.model).glob("tokenizer*")) else None
    text = tokens(args.text, tokenizer)
    rows = text[torch.randint(len(text) - args.seq, (args.steps, args.batch))[..., None] + torch.arange(args.seq)]

    options = weft.Options(clip=1.0, weights=weights, precision=torch.bfloat16 if args.bf16 else None, record=f"{args.out}/record", progress=False)
    step = weft.parallelize(model, loss, optimizer, rows[0], plan=args.plan, options=options)
    checkpoints = step.checkpoints(f"{args.out}/checkpoints")
    checkpoints.restore()
    first = dist.get_rank() == 0
    if first:
        size = sum(p.numel() for p in model.parameters()) / 1e6
        resumed = f", resumed at step {step.steps}" if step.steps else ""
        print(f"model {size:.1f}M parameters, plan {step.plan}, batch {args.batch} x {args.seq} tokens{resumed}", flush=True)
    began, done = time.perf_counter(), step.steps
    while step.steps < args.steps:
        value = step(rows[step.steps])
        if step.steps % args.save_every == 0 or step.steps == args.steps:
            checkpoints.save(wait=False)  # written while training goes on
        if first and (step.steps % 10 == 0 or step.steps == args.steps):
            rate = (step.steps - done) * args.batch * args.seq / (time.perf_counter() - began)
            print(f"step {step.steps} loss {value:.3f} tokens/s {rate:,.0f}", flush=True)
    checkpoints.finish()
    step.save_pretrained(f"{args.out}/model")
    if first:
        if tokenizer:
            tokenizer.save_pretrained(f"{args.out}/model")
        print(f"saved {args.out}/model", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
