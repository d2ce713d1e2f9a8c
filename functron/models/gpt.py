"""One decoder, driven by its config: GPT-2, GPT-3 and Llama 3 are presets of it.

`defs` says what the parameters are, `rules` how a mesh splits them, and `forward` and `loss` are
per-rank programs: pure functions of this rank's parameters and batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

import torch

from functron import nn, params, random
from functron.errors import Problem, nearest, raise_problems
from functron.params import Normal, ParamDef
from functron.spmd import DATA_AXES, BoundMesh, Mesh, P, Rules
from functron.spmd import collectives as lax
from functron.spmd.spec import entry_axes
from functron.transforms import remat as rematerialise
from functron.transforms import scan
from functron.typing import Float, Int, Key, Scalar, Tensor

STREAM = P(DATA_AXES)
"""The residual stream ``[batch, seq, embed]`` split by batch."""
SEQUENCE_PARALLEL_STREAM = P(DATA_AXES, "tp")
"""The residual stream with its sequence split over the tensor-parallel ranks as well."""

Batch = Mapping[str, Tensor]
"""``tokens`` and ``targets`` int64 [B, T], and ``rows`` int64 [B], indices in the global batch."""

Positions = Literal["rope", "learned", "none"]
Dtype = Literal["float32", "float64", "bfloat16"]
_CHOICES = MappingProxyType(
    {"norm": nn.NormKind, "activation": nn.Activation, "positions": Positions, "dtype": Dtype}
)


@dataclass(frozen=True)
class GPTConfig:
    """Architecture of a decoder.

    Attributes:
        vocab_size: token ids are 0 to ``vocab_size - 1``.
        num_layers: transformer blocks.
        embed_dim: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads; 0 means as many as query heads.
        head_dim: width of a head; 0 means ``embed_dim // num_heads``.
        mlp_dim: width of the feed-forward hidden layer.
        max_seq: longest sequence, in tokens.
        norm: ``"rms"`` or ``"layer"``, before each sublayer and at the end.
        norm_eps: epsilon of the norms.
        activation: of the feed-forward layer.
        gated: multiply the activation by a second projection (SwiGLU with silu).
        bias: biases on all linear layers.
        qk_norm: RMSNorm on queries and keys.
        positions: ``"rope"``, ``"learned"`` or ``"none"``.
        rope_theta: base of the rotary frequencies.
        rope_scaling: Llama 3.1's frequency scaling, or None.
        tied: one matrix for embedding and unembedding.
        dropout: rate on the embedding and on what each sublayer adds. Attention probabilities are
            not dropped.
        z_loss: weight of the squared log-normaliser in the loss.
        init_stddev: of all matrices; those that write to the stream are divided by
            sqrt(2 num_layers) (Radford et al. 2019).
        vocab_multiple: the vocabulary is padded to a multiple of it; every tensor-parallel size
            that divides it fits, and the padding takes no part in the loss.
        dtype: of parameters and activations: ``float32``, ``float64`` or ``bfloat16``.
    """

    vocab_size: int = 256
    num_layers: int = 4
    embed_dim: int = 256
    num_heads: int = 8
    num_kv_heads: int = 0
    head_dim: int = 0
    mlp_dim: int = 1024
    max_seq: int = 1024
    norm: nn.NormKind = "rms"
    norm_eps: float = 1e-5
    activation: nn.Activation = "silu"
    gated: bool = True
    bias: bool = False
    qk_norm: bool = False
    positions: Positions = "rope"
    rope_theta: float = 10000.0
    rope_scaling: nn.RopeScaling | None = None
    tied: bool = False
    dropout: float = 0.0
    z_loss: float = 0.0
    init_stddev: float = 0.02
    vocab_multiple: int = 384
    dtype: Dtype = "float32"

    def __post_init__(self):
        raise_problems("GPTConfig describes no model", self._problems())

    def _problems(self) -> list[Problem]:
        sizes = ("vocab_size", "num_layers", "embed_dim", "num_heads", "mlp_dim", "max_seq")
        found = [
            Problem(name, str(getattr(self, name)), "at least 1")
            for name in (*sizes, "vocab_multiple")
            if getattr(self, name) < 1
        ]
        if self.head_dim < 0 or self.num_kv_heads < 0:
            got = f"{self.head_dim} and {self.num_kv_heads}"
            found.append(Problem("head_dim and num_kv_heads", got, "at least 0 (0: derived)"))
        misfits = [] if found else self._misfits()
        for name, kind in _CHOICES.items():
            value = getattr(self, name)
            if value not in get_args(kind):
                fix = nearest(str(value), get_args(kind))
                found.append(Problem(name, repr(value), "a known name", fix))
        if not 0 <= self.dropout < 1:
            found.append(Problem("dropout", str(self.dropout), "at least 0 and below 1"))
        return found + misfits

    def _misfits(self) -> list[Problem]:
        """Sizes that are fine one by one and do not fit together."""
        found = []
        if not self.head_dim and self.embed_dim % self.num_heads:
            found.append(
                Problem(
                    "embed_dim",
                    str(self.embed_dim),
                    f"a multiple of num_heads={self.num_heads}",
                    "change one, or set head_dim",
                )
            )
        if self.num_heads % self.kv_heads:
            found.append(
                Problem("num_kv_heads", str(self.kv_heads), f"a divisor of {self.num_heads}")
            )
        if self.positions == "rope" and self.head_size % 2:
            found.append(Problem("head_dim", str(self.head_size), "an even number, for rope"))
        return found

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def attention(self) -> nn.AttentionConfig:
        """The shapes and options of the attention layers."""
        return nn.AttentionConfig(
            self.embed_dim,
            self.num_heads,
            self.kv_heads,
            self.head_size,
            bias=self.bias,
            out_bias=self.bias,
            qk_norm=self.qk_norm,
            norm_eps=self.norm_eps,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return getattr(torch, self.dtype)


def defs(config: GPTConfig) -> dict:
    """The parameters of the model: ``{"embed", "positions"?, "blocks", "norm", "unembed"?}``.

    The parameters of all blocks are stacked on a leading "layers" dim.
    """
    c, dtype = config, config.torch_dtype
    out_stddev = c.init_stddev / math.sqrt(2 * c.num_layers)
    block = {
        "attention_norm": nn.norm_defs(c.embed_dim, c.norm, axis="embed", dtype=dtype),
        "attention": nn.attention_defs(
            c.attention, stddev=c.init_stddev, out_stddev=out_stddev, dtype=dtype
        ),
        "mlp_norm": nn.norm_defs(c.embed_dim, c.norm, axis="embed", dtype=dtype),
        "mlp": nn.mlp_defs(
            c.embed_dim,
            c.mlp_dim,
            gated=c.gated,
            bias=c.bias,
            stddev=c.init_stddev,
            out_stddev=out_stddev,
            dtype=dtype,
        ),
    }
    normal = Normal(c.init_stddev)
    model = {
        "embed": ParamDef((c.padded_vocab, c.embed_dim), ("vocab", "embed"), normal, dtype),
        "blocks": params.stack(block, c.num_layers),
        "norm": nn.norm_defs(c.embed_dim, c.norm, axis="embed", dtype=dtype),
    }
    if c.positions == "learned":
        model["positions"] = ParamDef((c.max_seq, c.embed_dim), (None, "embed"), normal, dtype)
    if not c.tied:
        model["unembed"] = ParamDef(
            (c.embed_dim, c.padded_vocab), ("embed", "vocab"), normal, dtype
        )
    return model


def rules(config: GPTConfig, mesh: Mesh | BoundMesh) -> Rules:
    """Megatron's tensor parallelism for this model on this mesh.

    Heads, feed-forward features and vocabulary split over ``tp``. With fewer key/value heads than
    tensor-parallel ranks these heads are replicated and each rank uses those of its queries.

    Raises:
        ValueError: tp does not divide what it splits, or the mesh has an axis this model does not
            use; all offenders are listed.
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
    found += [
        Problem(
            "mesh",
            f"{axis}={mesh[axis]}",
            f"{axis}=1: this decoder does not split anything by {axis}",
            "put those ranks on dp or tp",
        )
        for axis in ("pp", "fsdp", "cp", "ep")
        if mesh[axis] > 1
    ]
    raise_problems("this model cannot run on this mesh", found)
    return Rules(
        {
            "vocab": "tp",
            "heads": "tp",
            "kv_heads": None if replicate_kv else "tp",
            "mlp": "tp",
        }
    )


def forward(
    config: GPTConfig,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    *,
    rows: Int[Tensor, " batch"] | None = None,
    key: Key | None = None,
    stream: P = STREAM,
    remat: bool = False,
) -> Float[Tensor, "batch seq columns"]:
    """The logits of every next token.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters.
        tokens: int64 ``[batch, seq]``, this rank's samples, whole sequences.
        rows: int64 ``[batch]``, the samples' indices in the global batch, for dropout; None where
            each data rank's tokens are its whole part of that batch, in order.
        key: the key of dropout's masks; None switches dropout off.
        stream: `STREAM` or `SEQUENCE_PARALLEL_STREAM`.
        remat: keep only each block's input and recompute the rest in backward.

    Returns:
        ``[batch, seq, padded_vocab / tp]``: this rank's columns, those from ``vocab_size`` on being
        padding. Collectives per block: see `nn.self_attention` and `nn.mlp`.

    Raises:
        ValueError: the sequence is longer than `max_seq`, or does not divide over the axes that
            split it.
    """
    _check_sequence(config, tokens.shape[1], stream)
    keys = None if key is None else random.split(key, config.num_layers + 1)
    if rows is None:
        rows = lax.global_index(tokens.shape[0], DATA_AXES, device=tokens.device)

    def drop(x: Tensor, drop_key: Tensor | None) -> Tensor:
        return nn.dropout(x, drop_key, rate=config.dropout, rows=rows, stream=stream)

    x = nn.embed_tokens(weights["embed"], tokens, stream=stream)
    if config.positions == "learned":
        x = nn.add_positions(x, weights["positions"], stream=stream)
    x = drop(x, None if keys is None else keys[-1])
    block = _block(config, tokens.shape[1], stream, drop)
    layers = (weights["blocks"], None if keys is None else keys[:-1])
    x, _ = scan(rematerialise(block) if remat else block, x, layers)
    x = nn.gather_sequence(nn.norm(weights["norm"], x, eps=config.norm_eps), stream)
    unembed = weights["embed"].mT if config.tied else weights["unembed"]
    return nn.column_parallel(x, unembed)


def _block(config: GPTConfig, seq: int, stream: P, drop: Callable) -> Callable:
    """``(x, (parameters, key)) -> (x, None)``: one pre-norm transformer block, for `scan`."""

    def block(x: Tensor, layer: tuple) -> tuple[Tensor, None]:
        weights, key = layer
        keys = (None, None) if key is None else random.split(key).unbind(0)
        rope = None
        if config.positions == "rope":
            positions = torch.arange(seq, device=x.device)
            rope = nn.rope_table(
                positions, config.head_size, config.rope_theta, config.rope_scaling, x.dtype
            )
        y = nn.norm(weights["attention_norm"], x, eps=config.norm_eps)
        y = nn.self_attention(weights["attention"], y, config.attention, rope=rope, stream=stream)
        x = x + drop(y, keys[0])
        y = nn.norm(weights["mlp_norm"], x, eps=config.norm_eps)
        y = nn.mlp(weights["mlp"], y, activation=config.activation, stream=stream)
        return x + drop(y, keys[1]), None

    return block


def _check_sequence(config: GPTConfig, seq: int, stream: P) -> None:
    if seq > config.max_seq:
        raise ValueError(
            f"forward: got {seq} tokens per sample; wanted at most max_seq={config.max_seq}; "
            "shorten the samples or raise max_seq"
        )
    parts = lax.axis_size(entry_axes(stream[1])) if len(stream) > 1 else 1
    if seq % parts:
        raise ValueError(
            f"forward: got {seq} tokens per sample; wanted a multiple of {parts}, the ranks that "
            f"split the sequence under {stream}; change the sequence length"
        )


def loss(
    config: GPTConfig,
    weights: dict,
    batch: Batch,
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: bool = False,
) -> Scalar:
    """The sum of all tokens' losses over the batch of all ranks; replicated over the mesh.

    Divide it by `num_targets` for the mean. Sums, unlike means, add up over ranks and microbatches
    also when these hold different numbers of tokens.

    Args:
        batch: this rank's samples; targets of `nn.IGNORE_INDEX` do not count.

    Returns:
        A scalar in float32 at least. Collectives: those of `forward` and `nn.cross_entropy`, and
        one all-reduce of a scalar.
    """
    logits = forward(
        config, weights, batch["tokens"], rows=batch["rows"], key=key, stream=stream, remat=remat
    )
    losses = nn.cross_entropy(
        logits, batch["targets"], vocab_size=config.vocab_size, z_loss=config.z_loss
    )
    return lax.psum(losses.sum(), DATA_AXES)


def num_targets(batch: Batch) -> Int[Tensor, ""]:
    """How many targets count, over the batch of all ranks: an int64 scalar; one all-reduce."""
    return lax.psum((batch["targets"] != nn.IGNORE_INDEX).sum(), DATA_AXES)


def flops_per_token(config: GPTConfig, seq: int) -> int:
    """Model FLOPs of forward and backward per token: 6 N + 12 L H D T.

    N counts the parameters that multiply activations (embedding look-ups do not); the second term
    is attention over `seq` tokens, uncorrected for causality (Chowdhery et al. 2022, appendix B).
    """
    total = params.num_params(defs(config))
    lookups = 0 if config.tied else config.padded_vocab * config.embed_dim
    if config.positions == "learned":
        lookups += config.max_seq * config.embed_dim
    attention = 12 * config.num_layers * config.num_heads * config.head_size * seq
    return 6 * (total - lookups) + attention


def _gpt2(num_layers: int, embed_dim: int, num_heads: int, **changes) -> GPTConfig:
    settings = {
        "vocab_size": 50257,
        "mlp_dim": 4 * embed_dim,
        "max_seq": 1024,
        "norm": "layer",
        "activation": "gelu_tanh",
        "gated": False,
        "bias": True,
        "positions": "learned",
        "tied": True,
        **changes,
    }
    return GPTConfig(num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads, **settings)


def _llama3(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **changes) -> GPTConfig:
    settings = {
        "vocab_size": 128256,
        "num_kv_heads": 8,
        "max_seq": 8192,
        "rope_theta": 500000.0,
        **changes,
    }
    return GPTConfig(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        mlp_dim=mlp_dim,
        **settings,
    )


@dataclass(frozen=True)
class _Presets(Mapping[str, GPTConfig]):
    """Named configs; an unknown name is an error that suggests the nearest."""

    configs: Mapping[str, GPTConfig] = field(default_factory=dict)

    def __getitem__(self, name: str) -> GPTConfig:
        if name not in self.configs:
            raise ValueError(f"model: got {name!r}; {nearest(name, self.configs)}")
        return self.configs[name]

    def __iter__(self):
        return iter(self.configs)

    def __len__(self) -> int:
        return len(self.configs)


_LONG = {"rope_scaling": nn.RopeScaling(), "max_seq": 131072}

PRESETS: Mapping[str, GPTConfig] = _Presets(
    {
        "tiny": GPTConfig(),
        "gpt2-tiny": _gpt2(2, 64, 4, vocab_size=256, max_seq=256),
        "gpt2": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1024, 16),
        "gpt2-large": _gpt2(36, 1280, 20),
        "gpt2-xl": _gpt2(48, 1600, 25),
        "gpt3-175b": _gpt2(96, 12288, 96, max_seq=2048),
        "llama3-tiny": _llama3(2, 64, 8, 192, num_kv_heads=4, vocab_size=256, max_seq=256),
        "llama3-1b": _llama3(16, 2048, 32, 8192, tied=True, max_seq=131072,
                             rope_scaling=nn.RopeScaling(factor=32.0)),
        "llama3-8b": _llama3(32, 4096, 32, 14336),
        "llama3-70b": _llama3(80, 8192, 64, 28672),
        "llama3-405b": _llama3(126, 16384, 128, 53248, **_LONG),
    }
)  # fmt: skip
"""Named architectures: "tiny" trains on a laptop; the others have their papers' sizes."""
