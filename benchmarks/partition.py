"""Bytes per step of partitioned blocks, against those of XLA's SPMD partitioner; no time.

Each block is written once, for torch and for JAX alike: loss and gradients of a piece of a
transformer. `functron.partition` and `jax.jit` get the same specs. functron's bytes are those of
the traced program; XLA's are read from the HLO that it compiles for eight devices of this CPU. Both
are counted as ring algorithms send: 2(n-1)/n of an all-reduce's value, (n-1)/n of a whole value
that is gathered, scattered or exchanged.

XLA's passes for CPUs make no reduce-scatter of an all-reduce that is sliced afterwards, as those
for GPUs do. The last column therefore counts every all-reduce of which only slices are read as a
reduce-scatter.

A block is measured alone, its input without a gradient and its mean square as the loss, and as what
one more of it adds to a step, as in a stack.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.nn import functional as F

import functron as ft
from functron import P
from functron.core.tables import bytes_text

BATCH, SEQ, EMBED, MLP, HEADS, KV_HEADS, HEAD, VOCAB, EXPERTS, ROOM = (
    16,
    32,
    64,
    256,
    8,
    4,
    8,
    512,
    8,
    8,
)

TORCH = SimpleNamespace(
    einsum=torch.einsum,
    silu=F.silu,
    softmax=lambda x: torch.softmax(x, -1),
    causal=lambda x: x.masked_fill(~torch.ones(SEQ, SEQ, dtype=torch.bool).tril(), -1e30),
    rms_norm=lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w,
    embed=lambda tokens, w: F.embedding(tokens, w),
    attend=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    # the mean over all tokens, as optax's: F.cross_entropy's own is over those not ignored
    loss=lambda x, targets: F.cross_entropy(
        x.flatten(0, 1), targets.flatten(), reduction="none"
    ).mean(),
)
JAX = SimpleNamespace(
    einsum=jnp.einsum,
    silu=jax.nn.silu,
    softmax=lambda x: jax.nn.softmax(x, -1),
    causal=lambda x: jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), x, -1e30),
    rms_norm=lambda x, w: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w,
    embed=lambda tokens, w: w[tokens],
    attend=lambda *heads: jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in heads), is_causal=True
    ).swapaxes(1, 2),
    loss=lambda x, targets: optax.softmax_cross_entropy_with_integer_labels(x, targets).mean(),
)

# --- the blocks: functions of a library, a constraint, weights and data


def mlp(lib, pin, w, x):
    return (lib.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def attention(lib, pin, w, x):
    """Queries have groups of heads; one that shares nothing has groups of one."""
    q = lib.einsum("btd,dgrk->btgrk", x, w["q"])
    k, v = (lib.einsum("btd,dgk->btgk", x, w[name]) for name in "kv")
    scores = lib.causal(lib.einsum("btgrk,bsgk->bgrts", q, k) * HEAD**-0.5)
    mixed = lib.einsum("bgrts,bsgk->btgrk", lib.softmax(scores), v)
    return lib.einsum("btgrk,grkd->btd", mixed, w["out"])


def long_attention(lib, pin, w, x):
    """Of a sequence that stays split."""
    q, k, v = (lib.einsum("btd,dhk->bhtk", x, w[name]) for name in "qkv")
    return lib.einsum("bhtk,hkd->btd", lib.attend(q, k, v), w["out"])


def experts(lib, pin, w, x, sent):
    """GShard's form: `sent` [batch, seq, expert, room] says which token goes where."""
    there = pin(lib.einsum("btec,btd->becd", sent, x), P(None, "ep"))
    hidden = lib.silu(lib.einsum("becd,edf->becf", there, w["up"]))
    back = pin(lib.einsum("becf,efd->becd", hidden, w["down"]), P("ep"))
    return lib.einsum("btec,becd->btd", sent, back)


def vocabulary(lib, pin, w, tokens, targets):
    x = lib.embed(tokens, w["embed"])
    return lib.loss(lib.einsum("btd,vd->btv", x, w["head"]), targets)


def transformer(stream: P | None) -> Callable:
    """Both halves of a block, with the residual stream as `stream` says."""

    def block(lib, pin, w, x):
        keep = (lambda x: x) if stream is None else lambda x: pin(x, stream)
        x = keep(x + keep(attention(lib, pin, w, lib.rms_norm(x, w["norm"]))))
        return keep(x + keep(mlp(lib, pin, w, lib.rms_norm(x, w["mlp_norm"]))))

    return block


MLP_SHAPES = {"gate": (EMBED, MLP), "up": (EMBED, MLP), "down": (MLP, EMBED)}
MLP_TP = {"gate": P(None, "tp"), "up": P(None, "tp"), "down": P("tp")}
ATTENTION_TP = {"q": P(None, "tp"), "k": P(None, "tp"), "v": P(None, "tp"), "out": P("tp")}


def attention_shapes(groups: int) -> dict[str, tuple[int, ...]]:
    kv = (EMBED, groups, HEAD)
    return {"q": (EMBED, groups, HEADS // groups, HEAD), "k": kv, "v": kv,
            "out": (groups, HEADS // groups, HEAD, EMBED)}  # fmt: skip


LONG = {"q": (EMBED, HEADS, HEAD), "k": (EMBED, KV_HEADS, HEAD), "v": (EMBED, KV_HEADS, HEAD),
        "out": (HEADS, HEAD, EMBED)}  # fmt: skip
BLOCK = {**MLP_SHAPES, **attention_shapes(KV_HEADS), "norm": (EMBED,), "mlp_norm": (EMBED,)}
BLOCK_TP = {**MLP_TP, **ATTENTION_TP, "norm": P(), "mlp_norm": P()}
# over fsdp what tp leaves: the other dim of products, and the groups' neighbours
BOTH = {"gate": P("fsdp", "tp"), "up": P("fsdp", "tp"), "down": P("tp", "fsdp"),
        "q": P("fsdp", "tp"), "k": P("fsdp", "tp"), "v": P("fsdp", "tp"),
        "out": P("tp", None, None, "fsdp"), "norm": P("fsdp"), "mlp_norm": P("fsdp")}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A block on a mesh: shapes and specs of its weights, of its data, and how keys travel."""

    block: Callable
    sizes: dict[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    specs: Mapping[str, P]
    data: tuple[P, ...] = (P("dp"),)
    data_shapes: tuple[tuple[int, ...], ...] = ((BATCH, SEQ, EMBED),)
    integers: bool = field(default=False)
    attention: Mapping[str, Any] = field(default_factory=dict)


DP_TP = {"dp": 2, "tp": 4}
CASES = {
    "MLP, tp": Case(mlp, DP_TP, MLP_SHAPES, MLP_TP),
    "attention, tp": Case(attention, DP_TP, attention_shapes(HEADS), ATTENTION_TP),
    "grouped attention, tp": Case(attention, DP_TP, attention_shapes(KV_HEADS), ATTENTION_TP),
    **{
        f"attention, sequence, {kind}": Case(
            long_attention, {"cp": 8}, LONG, dict.fromkeys(LONG, P()), (P(None, "cp"),),
            attention={"cp": kind},
        )
        for kind in ("gather", "ring")
    },
    "experts, ep": Case(
        experts, {"ep": 8}, {"up": (EXPERTS, EMBED, MLP), "down": (EXPERTS, MLP, EMBED)},
        {"up": P("ep"), "down": P("ep")}, (P("ep"), P("ep")),
        ((BATCH, SEQ, EMBED), (BATCH, SEQ, EXPERTS, ROOM)),
    ),
    "embedding and loss, tp": Case(
        vocabulary, DP_TP, {"embed": (VOCAB, EMBED), "head": (VOCAB, EMBED)},
        {"embed": P("tp"), "head": P("tp")}, (P("dp"), P("dp")), ((BATCH, SEQ),) * 2, True,
    ),
    "block, tp": Case(transformer(None), DP_TP, BLOCK, BLOCK_TP),
    "block, tp and sequence": Case(
        transformer(P("dp", "tp")), DP_TP, BLOCK, BLOCK_TP, (P("dp", "tp"),)
    ),
    "block, fsdp": Case(
        transformer(P("fsdp")), {"fsdp": 8}, BLOCK,
        {name: P(None, None, None, "fsdp") if name == "out" else P("fsdp") for name in BLOCK},
        (P("fsdp"),),
    ),
    "block, dp, fsdp and tp": Case(
        transformer(P(("dp", "fsdp"))), {"dp": 2, "fsdp": 2, "tp": 2}, BLOCK, BOTH,
        (P(("dp", "fsdp")),),
    ),
}  # fmt: skip


def total(lib, case: Case, pin: Callable, layers: Any, data: Any):
    """The loss of blocks one after the other: what the last returns, or its mean square."""
    x, *more = data
    for w in layers:
        x = case.block(lib, pin, w, x, *more)
    return x if x.ndim == 0 else (x * x).mean()


# --- both counts


def functron_sends(case: Case, depth: int) -> Counter[str]:
    """Bytes that a rank sends, by collective."""
    w = {name: torch.empty(shape, device="meta") for name, shape in case.shapes.items()}
    layers, specs = [w] * depth, [dict(case.specs)] * depth
    dtype = torch.int64 if case.integers else torch.float32
    data = [torch.empty(shape, dtype=dtype, device="meta") for shape in case.data_shapes]

    def step(layers, *data):
        return ft.value_and_grad(lambda w: total(TORCH, case, ft.constrain, w, data))(layers)

    mesh = ft.Mesh(**case.sizes)
    layout = (specs, *case.data), (P(), specs)
    options: Any = {"pick": "cheapest", "attention": case.attention}
    mapped = ft.partition(step, mesh, *layout, **options)
    sent: Counter[str] = Counter()
    for row in ft.trace(mapped)(layers, *data).cost().collectives:
        sent[row.op] += row.sent_bytes
    return sent


def compiled(case: Case, depth: int) -> str:
    """XLA's program of one device."""
    devices = np.array(jax.devices()).reshape(*case.sizes.values())
    mesh = jax.sharding.Mesh(devices, tuple(case.sizes))

    def placed(spec: P) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    def pin(x, spec):
        return jax.lax.with_sharding_constraint(x, placed(spec))

    def step(layers, *data):
        return jax.value_and_grad(lambda w: total(JAX, case, pin, w, data))(layers)

    specs = {name: placed(spec) for name, spec in case.specs.items()}
    w = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=specs[name])
         for name, shape in case.shapes.items()}  # fmt: skip
    dtype = jnp.int32 if case.integers else jnp.float32
    rows = zip(case.data_shapes, case.data, strict=True)
    data = [jax.ShapeDtypeStruct(shape, dtype, sharding=placed(spec)) for shape, spec in rows]
    jitted = jax.jit(step, out_shardings=(placed(P()), [specs] * depth))
    text = jitted.lower([w] * depth, *data).compile().as_text()
    assert text is not None
    return text


COLLECTIVE = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>\(.*?\)|\S+) (?P<op>all-reduce|all-gather|"
    r"reduce-scatter|all-to-all|collective-permute)(?:-start)?\((?P<rest>.*)$"
)
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
          "s64": 8, "u64": 8, "f64": 8}  # fmt: skip


def sizes_of(shape: str) -> list[int]:
    """Bytes of each array in HLO's notation, ``f32[8,64]{1,0}`` or a tuple of such."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return [WIDTHS[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in found]


def group_size(rest: str) -> int:
    """Ranks of a group, in each of HLO's three notations."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[(.*?)\].*? \{('.*?)\}", rest):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(axes[name]) for name in re.findall(r"'(\w+)'", found[2]))
    raise ValueError(f"a collective without groups that this script knows: {rest}")


def readers(hlo: str, name: str) -> Iterator[str]:
    """The lines that read a value."""
    for line in hlo.splitlines():
        if re.search(rf"[(,] ?%?{re.escape(name)}[,)]", line):
            yield line


def element(hlo: str, name: str, number: int) -> str:
    """The name of an element of a tuple."""
    found = re.search(
        rf"%?(\S+) = \S+ get-tuple-element\(%?{re.escape(name)}\), index={number}\b", hlo
    )
    return found[1] if found else name


def sliced_only(hlo: str, name: str) -> bool:
    """Whether nothing but slices of a value is read: XLA fuses them by that name."""
    lines = list(readers(hlo, name))
    return bool(lines) and all("dynamic-slice" in line.partition(", metadata")[0] for line in lines)


def xla_sends(hlo: str, *, scatter: bool) -> Counter[str]:
    """Bytes that a device sends, by collective.

    Args:
        hlo: the compiled program.
        scatter: count an all-reduce of which only slices are read as a reduce-scatter.
    """
    sent: Counter[str] = Counter()
    for found in filter(None, map(COLLECTIVE.match, hlo.splitlines())):
        sizes, op, rest = sizes_of(found["shape"]), found["op"], found["rest"]
        if op == "collective-permute":
            sent[op] += sum(sizes)
            continue
        n = group_size(rest)
        if op == "all-reduce":
            for number, size in enumerate(sizes):
                name = element(hlo, found["name"], number) if len(sizes) > 1 else found["name"]
                halved = scatter and sliced_only(hlo, name)
                sent["reduce-scatter" if halved else op] += (2 - halved) * size * (n - 1) // n
        elif op == "reduce-scatter":
            sent[op] += sum(sizes) * (n - 1)
        else:
            sent[op] += sum(sizes) * (n - 1) // n
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--collectives", action="store_true", help="list both sides' collectives")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    print("| block | mesh | blocks | functron | XLA | XLA, slices as reduce-scatter |")
    print("|---|---|---|---|---|---|")
    for name in arguments.only:
        case, before = CASES[name], [0, 0, 0]
        mesh = ",".join(f"{axis}={size}" for axis, size in case.sizes.items())
        for depth in (1,) if case.integers else (1, 2):
            hlo = compiled(case, depth)
            found = (
                functron_sends(case, depth),
                xla_sends(hlo, scatter=False),
                xla_sends(hlo, scatter=True),
            )
            counts = [sum(count.values()) for count in found]
            added = [count - less for count, less in zip(counts, before, strict=True)]
            what = "one more" if depth == 2 else "one"
            print("|", " | ".join([name, mesh, what, *map(bytes_text, added)]), "|", flush=True)
            for count in found if arguments.collectives else ():
                print(f"  {dict(count)}")
            before = counts


if __name__ == "__main__":
    main()
