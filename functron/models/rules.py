"""Which mesh axes split a decoder's parameters."""

from __future__ import annotations

import math

from functron.errors import Problem, public, raise_problems
from functron.models.config import GPTConfig
from functron.spmd.mesh import CONTEXT_AXES, FSDP_AXES, BoundMesh, Mesh
from functron.spmd.shards import as_entry
from functron.spmd.spec import Rules

_TOKENS = ("ep", *CONTEXT_AXES, "tp")


@public
def rules(
    config: GPTConfig,
    mesh: Mesh | BoundMesh,
    *,
    fsdp: tuple[str, ...] = ("fsdp",),
    experts: tuple[str, ...] = ("ep",),
) -> Rules:
    """Megatron's tensor parallelism, and fully sharded data parallelism, for this model and mesh.

    Heads, feed-forward features and vocabulary split over ``tp``. With fewer key/value heads than
    tensor-parallel ranks these heads are replicated and each rank uses those of its queries. What
    has an "embed" dim, all matrices among it, splits that dim over the axes `fsdp`; biases of heads
    and features, and scales of single heads, are whole there. Experts split over the axes
    `experts`, and the hidden features of each over ``tp`` where that is none of these.

    Args:
        config: the architecture.
        mesh: the ranks.
        fsdp: the data axes that parameters are split over, to be gathered where they are used
            (`functron.Gather`): ``("fsdp",)``, beside which dp replicates; ``("dp", "fsdp")``
            for ZeRO-3 over all data ranks; ``()`` where fsdp splits nothing but the batch.
        experts: the axes that experts are divided over, all of which split tokens: ``("ep",)``;
            ``("ep", "tp")`` under sequence parallelism, which is Megatron's folding with
            expert-tensor-parallel size 1; with ``"cp"`` and ``"ulysses"`` where these exist. Pass
            the same to `gpt.loss`.

    Raises:
        ValueError: tp, fsdp or experts does not divide what it splits, or the mesh has an axis this
            model does not use; all offenders are listed.
    """
    tp, moe = mesh["tp"], config.moe
    replicate_kv = config.kv_heads < tp and tp % config.kv_heads == 0
    wanted = {"num_heads": config.num_heads}
    if not replicate_kv:
        wanted["num_kv_heads"] = config.kv_heads
    if "dense" in config.stacks or moe is None:
        wanted["mlp_dim"] = config.mlp_dim
    if moe is not None:
        wanted["moe.shared_dim"] = moe.shared_dim
        wanted |= {} if "tp" in experts else {"moe.expert_dim": moe.expert_dim}
    found = [
        Problem(name, str(size), f"a multiple of tp={tp}", "choose a tp that divides it")
        for name, size in wanted.items()
        if size % tp
    ]
    if config.num_heads % (tp * mesh["ulysses"]) and not config.num_heads % tp:
        fix = "use fewer, and cp for the others"
        each = f"a multiple of tp={tp} x ulysses={mesh['ulysses']}"
        found.append(Problem("num_heads", str(config.num_heads), each, fix))
    if config.padded_vocab % tp:
        found.append(
            Problem(
                "vocab_multiple",
                str(config.vocab_multiple),
                f"a multiple of tp={tp}",
                f"set vocab_multiple={math.lcm(config.vocab_multiple, tp)}",
            )
        )
    found += _expert_problems(config, mesh, experts)
    found += _fsdp_problems(config, mesh, fsdp)
    raise_problems("this model cannot run on this mesh", found)
    split = tuple(axis for axis in fsdp if mesh[axis] > 1)
    embed = {"embed": split[0] if len(split) == 1 else split} if split else {}
    return Rules(
        {
            "vocab": "tp",
            "heads": "tp",
            "kv_heads": None if replicate_kv else "tp",
            "mlp": "tp",
            "expert": as_entry([axis for axis in experts if mesh[axis] > 1]),
            "expert_mlp": None if "tp" in experts else "tp",
            **embed,
        }
    )


def _expert_problems(
    config: GPTConfig, mesh: Mesh | BoundMesh, experts: tuple[str, ...]
) -> list[Problem]:
    if config.moe is None:
        wanted, fix = "ep=1: this decoder has no experts", "put those ranks on dp, fsdp or tp"
        return [Problem("mesh", f"ep={mesh['ep']}", wanted, fix)] if mesh["ep"] > 1 else []
    if set(experts) - set(_TOKENS) or len(set(experts)) < len(experts):
        fix = "for more ranks of data, use ep: it splits the batch as dp does"
        return [Problem("experts", repr(experts), f"some of {_TOKENS}, each once", fix)]
    found, count = [], config.moe.num_experts
    ranks = math.prod(mesh[axis] for axis in experts)
    if count % ranks:
        each = " x ".join(f"{axis}={mesh[axis]}" for axis in experts if mesh[axis] > 1)
        fix = f"divide them among {math.gcd(count, ranks)} ranks"
        found.append(Problem("moe.num_experts", str(count), f"a multiple of {each}", fix))
    if "ep" not in experts and mesh["ep"] > 1:
        wanted, fix = "ep among the axes of experts, or ep=1", "use dp for those ranks"
        found.append(Problem("experts", f"{experts} on ep={mesh['ep']}", wanted, fix))
    return found


def _fsdp_problems(
    config: GPTConfig, mesh: Mesh | BoundMesh, fsdp: tuple[str, ...]
) -> list[Problem]:
    unknown = [axis for axis in fsdp if axis not in FSDP_AXES]
    found = [
        Problem("fsdp", repr(axis), "data axes: 'dp', 'fsdp' or both", "leave it out")
        for axis in unknown
    ]
    ranks = math.prod(mesh[axis] for axis in fsdp)
    sizes = {"embed_dim": config.embed_dim}
    if config.moe is not None and config.moe.latent_dim:
        sizes["moe.latent_dim"] = config.moe.latent_dim
    for name, size in sizes.items():
        if not unknown and size % ranks:
            named = " * ".join(f"{axis}={mesh[axis]}" for axis in fsdp if mesh[axis] > 1)
            below, above = math.gcd(size, ranks), -(-size // ranks) * ranks
            fix = f"split over {below} ranks, or set {name}={above}"
            found.append(Problem(name, str(size), f"a multiple of {named}", fix))
    return found
