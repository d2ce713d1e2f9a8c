"""Which mesh axes split a decoder's parameters."""

from __future__ import annotations

import math

from functron.errors import Problem, raise_problems
from functron.models.config import GPTConfig
from functron.spmd.mesh import FSDP_AXES, BoundMesh, Mesh
from functron.spmd.spec import Rules


def rules(config: GPTConfig, mesh: Mesh | BoundMesh, *, fsdp: tuple[str, ...] = ("fsdp",)) -> Rules:
    """Megatron's tensor parallelism, and fully sharded data parallelism, for this model and mesh.

    Heads, feed-forward features and vocabulary split over ``tp``. With fewer key/value heads than
    tensor-parallel ranks these heads are replicated and each rank uses those of its queries. What
    has an "embed" dim, all matrices among it, splits that dim over the axes `fsdp`; biases of heads
    and features, and scales of single heads, are whole there.

    Args:
        config: the architecture.
        mesh: the ranks.
        fsdp: the data axes that parameters are split over, to be gathered where they are used
            (`transforms.Gather`): ``("fsdp",)``, beside which dp replicates; ``("dp", "fsdp")``
            for ZeRO-3 over all data ranks; ``()`` where fsdp splits nothing but the batch.

    Raises:
        ValueError: tp or fsdp does not divide what it splits, or the mesh has an axis this model
            does not use; all offenders are listed.
    """
    tp = mesh["tp"]
    replicate_kv = config.kv_heads < tp and tp % config.kv_heads == 0
    wanted = {"num_heads": config.num_heads, "mlp_dim": config.mlp_dim}
    if not replicate_kv:
        wanted["num_kv_heads"] = config.kv_heads
    found = [
        Problem(name, str(size), f"a multiple of tp={tp}", "choose a tp that divides it")
        for name, size in wanted.items()
        if size % tp
    ]
    if config.padded_vocab % tp:
        found.append(
            Problem(
                "vocab_multiple",
                str(config.vocab_multiple),
                f"a multiple of tp={tp}",
                f"set vocab_multiple={math.lcm(config.vocab_multiple, tp)}",
            )
        )
    if mesh["ep"] > 1:
        wanted = "ep=1: this decoder has no experts"
        found.append(
            Problem("mesh", f"ep={mesh['ep']}", wanted, "put those ranks on dp, fsdp or tp")
        )
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
            **embed,
        }
    )


def _fsdp_problems(
    config: GPTConfig, mesh: Mesh | BoundMesh, fsdp: tuple[str, ...]
) -> list[Problem]:
    unknown = [axis for axis in fsdp if axis not in FSDP_AXES]
    found = [
        Problem("fsdp", repr(axis), "data axes: 'dp', 'fsdp' or both", "leave it out")
        for axis in unknown
    ]
    ranks = math.prod(mesh[axis] for axis in fsdp)
    size = config.embed_dim
    if not unknown and size % ranks:
        named = " * ".join(f"{axis}={mesh[axis]}" for axis in fsdp if mesh[axis] > 1)
        below, above = math.gcd(size, ranks), -(-size // ranks) * ranks
        fix = f"split over {below} ranks, or set embed_dim={above}"
        found.append(Problem("embed_dim", str(size), f"a multiple of {named}", fix))
    return found
