"""Train a GPT on text with the library alone: no command line tool, no trainer class.

One process: one rank, or a mesh of dp, fsdp, cp, ulysses, tp and, of experts, ep simulated in it:

    python examples/pretrain_gpt.py
    python examples/pretrain_gpt.py --mesh dp=2,tp=4 --sequence-parallel
    python examples/pretrain_gpt.py --mesh fsdp=2,cp=2
    python examples/pretrain_gpt.py --mesh dp=2,ep=2 --model mixtral-tiny

One process per rank, with the same losses (on GPUs where there are enough of them):

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --mesh dp=2,tp=2
"""

import argparse
import os

import torch
import torch.distributed as dist

import functron as ft
from functron import gpt, optim
from functron.data import TextWindows


def parse_args():
    parser = argparse.ArgumentParser(description="Train a GPT on text.")
    parser.add_argument("--model", default="tiny", help=f"one of {', '.join(gpt.PRESETS)}")
    parser.add_argument("--data", help="a text file or a folder; default: Python's own text")
    parser.add_argument("--mesh", default="", help="ranks by axis, such as dp=2,tp=2")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seq", type=int, default=128, help="tokens per sample")
    parser.add_argument("--global-batch", type=int, default=8, help="samples per step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default="The ", help="text to continue after training")
    return parser.parse_args()


def connect(mesh):
    """The mesh and device to run on: this process's rank under torchrun, else a simulation."""
    if not dist.is_torchelastic_launched():
        return mesh, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    use_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if use_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_gpus else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if use_gpus else torch.device("cpu")
    return mesh.bind(device.type), device


def main():
    args = parse_args()
    config = gpt.PRESETS[args.model]
    mesh, device = connect(ft.Mesh.parse(args.mesh))
    if mesh["pp"] > 1:
        raise SystemExit("a pipeline wants ft.pipeline.gradients, as in functron train")
    is_first = not isinstance(mesh, ft.BoundMesh) or mesh.rank == 0

    defs = gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    schedule = optim.cosine_decay(args.learning_rate, args.steps, warmup_steps=args.steps // 10)
    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.adamw(schedule, b2=0.95, weight_decay=0.1, mask=optim.not_norm_or_bias),
    )
    stream = gpt.SEQUENCE_PARALLEL_STREAM if args.sequence_parallel else gpt.STREAM
    gather = ft.Gather(specs)  # what fsdp splits is whole only where a block uses it
    options = ft.ModelOptions(stream=stream, gather=gather)

    def loss(params, batch, key):
        return gpt.loss(config, params, batch, options, key=key)

    key = ft.random.key(args.seed, device=device)
    state = ft.init_state(key, defs, specs, optimizer, mesh)
    splits = gpt.batch_specs()  # samples over dp, fsdp and ep; their tokens over cp and ulysses
    gradients = ft.mean_gradients(loss, gpt.num_targets)
    step = ft.make_step(gradients, optimizer, mesh, specs, batch_specs=splits)
    text = TextWindows(args.data, args.seq, seed=args.seed)

    for index in range(args.steps):
        # a process reads the whole batch and keeps its share; batch(part=...) would read only that
        batch = ft.shard(text.batch(index, args.global_batch), splits, mesh)
        state, metrics = step(state, ft.tree.map(lambda leaf: leaf.to(device), batch))
        if is_first and (index % 10 == 0 or index == args.steps - 1):
            print(f"step {index:4d}  loss {metrics['loss'].item():.6f}", flush=True)

    params = ft.gather(state.params, specs, mesh)
    if is_first and args.prompt:
        prompt = torch.tensor([list(args.prompt.encode())], device=device)
        out = ft.generate(params, config, prompt, 100, temperature=0.8, key=key)
        print(bytes(token for token in out[0].tolist() if token < 256).decode(errors="replace"))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
