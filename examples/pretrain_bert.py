"""Train a BERT on masked bytes with the library alone, and let it fill in what it cannot see.

One process: one rank, or a mesh of dp, fsdp and tp simulated in it, with the same losses:

    python examples/pretrain_bert.py
    python examples/pretrain_bert.py --mesh dp=2,tp=4 --sequence-parallel

One process per rank:

    torchrun --nproc-per-node 4 examples/pretrain_bert.py --mesh dp=2,tp=2
"""

import argparse
from dataclasses import replace

import torch
import torch.distributed as dist

import functron as ft
from functron import P, bert, gpt, optim
from functron.apps import zoo
from functron.data import TextWindows

MASK = 256  # after the 256 bytes


def parse_args():
    parser = argparse.ArgumentParser(description="Train a BERT on text.")
    parser.add_argument("--model", default="bert-tiny", help=f"one of {', '.join(bert.PRESETS)}")
    parser.add_argument("--data", help="a text file or a folder; default: Python's own text")
    parser.add_argument("--mesh", default="", help="ranks by axis, such as dp=2,tp=2")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq", type=int, default=64, help="tokens per sample")
    parser.add_argument("--global-batch", type=int, default=32, help="samples per step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    config = replace(bert.PRESETS[args.model], vocab_size=MASK + 1, max_seq=args.seq)
    mesh = ft.Mesh.parse(args.mesh)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        mesh = mesh.bind("cpu")
    is_first = not isinstance(mesh, ft.BoundMesh) or mesh.rank == 0

    defs = bert.defs(config)
    specs = ft.param_specs(defs, bert.rules(config, mesh))
    schedule = optim.cosine_decay(args.learning_rate, args.steps, warmup_steps=args.steps // 10)
    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.adamw(schedule, weight_decay=0.01, mask=optim.not_norm_or_bias),
    )
    stream = gpt.SEQUENCE_PARALLEL_STREAM if args.sequence_parallel else gpt.STREAM
    gather = ft.Gather(specs)  # parameters that --mesh fsdp=N splits

    def loss(params, batch, key):
        return bert.loss(
            config, params, batch, ft.ModelOptions(stream=stream, gather=gather), key=key
        )

    state = ft.init_state(ft.random.key(args.seed), defs, specs, optimizer, mesh)
    step = ft.make_step(ft.mean_gradients(loss, bert.num_targets), optimizer, mesh, specs)
    text = TextWindows(args.data, args.seq, seed=args.seed)

    def masked(index):
        """The batch of a step, the same on every mesh: which bytes are hidden follows from it."""
        batch = text.batch(index, args.global_batch)
        return zoo.mask_tokens(batch, args.seed, index, mask_id=MASK, vocab_size=MASK + 1)

    for index in range(args.steps):
        state, metrics = step(state, ft.shard(masked(index), P(ft.DATA_AXES), mesh))
        if is_first and (index % 10 == 0 or index == args.steps - 1):
            print(f"step {index:4d}  loss {metrics['loss'].item():.6f}", flush=True)

    params = ft.gather(state.params, specs, mesh)
    if is_first:
        batch = masked(args.steps)
        hidden = batch["tokens"] == MASK
        with torch.no_grad():
            logits = bert.forward(config, params, batch["tokens"])[..., :MASK]
        right = logits.argmax(-1)[hidden] == batch["targets"][hidden]
        print(f"of {hidden.sum()} hidden bytes {100 * right.double().mean():.0f} % are found")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
