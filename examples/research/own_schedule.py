"""A pipeline schedule of one's own: backward as soon as it can be, and few activations at once."""

import functron as ft
from functron import P, gpt
from functron.pipeline import Action, Partition, even_layout, place

mesh = ft.Mesh(pp=2, tp=2)
ranks, microbatches, most = 2, 4, 2

config = gpt.GPTConfig(vocab_size=64, num_layers=4, embed_dim=32, num_heads=4, mlp_dim=64,
                       max_seq=32, init_stddev=0.2, dtype="float64")  # fmt: skip
defs = gpt.defs(config)
specs = ft.param_specs(defs, gpt.rules(config, mesh))

columns, done = [[] for _ in range(ranks)], {kind: [0] * ranks for kind in "FB"}
while min(done["B"]) < microbatches:
    f, b = list(done["F"]), list(done["B"])  # before this tick
    for rank in range(ranks):
        last, live = rank == ranks - 1, f[rank] - b[rank]
        if (f[rank] if last else b[rank + 1]) > b[rank]:
            kind = "B"
        elif f[rank] < (microbatches if rank == 0 else f[rank - 1]) and live < most:
            kind = "F"
        else:
            continue
        columns[rank].append(Action(kind, done[kind][rank]))
        done[kind][rank] += 1
schedule = place("eager-backward", [[(rank, 0) for rank in range(ranks)]], microbatches, columns)
partition = Partition(even_layout(ranks, config.num_layers), schedule.pipes, gpt.uses(config))
stages = ft.pipeline.pipelined(
    lambda part, w, x, batch: gpt.stage_loss(config, part, w, x, batch), partition, schedule
)


def program(weights, batch):
    value, grads = stages.value_and_grad(weights, batch)
    return value / gpt.num_targets(batch), ft.sync_gradients(grads, specs)


tokens = ft.random.randint(ft.random.key(1), (8, 33), 0, 64)
batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
run = ft.shard_map(program, mesh, (specs, P("dp")), (P(), specs), stages="pp")
result = run(ft.init_params(ft.random.key(0), defs), batch)
schedule.validate(max_live=most)
print(schedule, f"\nloss {float(result[0]):.6f}, at most {most} microbatches kept on a rank")
