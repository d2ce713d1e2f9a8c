"""How a model is run, beside its architecture: one value for the functions of every family.

`ModelOptions` says how parameters are gathered, how sequences and experts are divided, what
backward computes again and which kernels compute; and it holds hooks: functions of the user's own
in the place of a decoder's attention, router, feed-forward layer, norm or whole block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.models.sequence import SAMPLE_AXES, Context
from functron.ops import AUTO, Kernels
from functron.spmd import CONTEXT_AXES, DATA_AXES, P
from functron.transforms import Gather

STREAM = P(DATA_AXES, CONTEXT_AXES)
"""The residual stream ``[batch, seq, embed]`` split by batch, and by the axes of long contexts."""
SEQUENCE_PARALLEL_STREAM = P(DATA_AXES, (*CONTEXT_AXES, "tp"))
"""The residual stream with its sequence split over the tensor-parallel ranks as well."""

WHOLE = Gather()
"""Parameters that no data axis splits: there is nothing to gather."""

RING = Context()
"""Keys and values go round, among tokens in zig-zag order."""

Remat = Literal["none", "full", "selective", "dots"]
"""The part that backward computes again: nothing; each block from its input; the attention core
softmax(q k^T) v alone (Korthikanti et al. 2022, section 5); all but matrix products and attention.
"""

HOOKS = ("attention", "router", "mlp", "norm", "block")
"""The fields of `ModelOptions` that hold functions."""


@dataclass(frozen=True, eq=False)
class Hook:
    """A function for `ModelOptions`, with parameters of its own or a form for generation.

    Attributes:
        apply: the function, as `ModelOptions` describes it.
        defs: ``(config) -> defs``, the parameters of one layer: of "mlp", "norm", "router" and
            "block" in place of those of what is replaced; of "attention" beside the projections,
            and `apply` and `cached` then take them as their first argument, dims of the logical
            axes "heads" and "kv_heads" split as the heads are. Logical axes that the rules do not
            name stay whole on every rank. None: the parameters are those of what is replaced.
        cached: of "attention": ``(q, cache, places, ...) -> out`` as `nn.masked.cached_attention`,
            of new queries and the keys kept so far, theirs included; keywords as for `apply`. None:
            generation reads the text again for every token.
    """

    apply: Callable
    defs: Callable[[Any], dict] | None = None
    cached: Callable | None = None

    def __post_init__(self):
        found = [
            Problem(field.name, repr(value), "a function")
            for field in fields(self)
            if not callable(value := getattr(self, field.name))
            and (value is not None or field.name == "apply")
        ]
        raise_problems("this is no hook", found, TypeError)


@dataclass(frozen=True, eq=False)
class ModelOptions:
    """How a model is run; ``ModelOptions()`` is one device's, and right on any mesh without fsdp.

    >>> options = ft.ModelOptions(stream=gpt.SEQUENCE_PARALLEL_STREAM, remat="selective")
    >>> gpt.loss(config, params, batch, options, key=key)

    **Hooks** are plain functions, or a `Hook` where they have parameters of their own: then pass
    the same options to `gpt.defs` and `gpt.uses`. They see this rank's part of everything, as
    functions of `functron.nn` do, and are differentiated, rematerialised, scanned, traced and
    compiled with the model; collectives are theirs to issue. Decoders (`gpt`, and the text of
    `llava`) have a place for them.

    * ``attention(q, k, v, ...) -> out``: from queries ``[batch, seq, heads, head_dim]``, keys and
      values ``[batch, seq, kv_heads, ...]`` of this rank's heads, rotated and normed already, to
      ``[batch, seq, heads, v's last dim]``; causal. Of the keywords ``window``, ``cap``,
      ``segments``, ``positions``, ``sinks``, ``context`` and ``kernels`` it is given those that it
      has (those of `nn.context_attention`; ``segments`` None without packed documents); a run that
      needs one that it has not is refused. Where axes of the mesh split sequences, ranks exchange
      heads for sequence before and after it (Ulysses), so that it sees whole samples in order: four
      all-to-alls, if the heads divide over these ranks; with a parameter ``context`` it is given
      this rank's tokens as they lie instead, and does that itself.
    * ``router(params, inputs) -> nn.moe.RouterOutput``: which experts tokens go to, and what that
      adds to the loss; see `nn.moe.Router`.
    * ``mlp(params, x, *, activation, stream, kernels) -> y``: as `nn.mlp`, of layers without
      experts; x and y have spec `stream`.
    * ``norm(params, x, *, eps, zero_centered, kernels) -> y``: as `nn.norm`, of the stream; norms
      of queries and keys are part of attention's projections and stay.
    * ``block(layer, params, x) -> x``, or ``(x, auxiliary)`` where there are experts: a whole
      block, in the place of `models.block.transformer_block`, whose ten lines are made of the same
      methods of `layer` (`models.block.Layer`): ``layer.norm``, ``layer.attention``,
      ``layer.feed_forward``, ``layer.drop``.

    Attributes:
        stream: `gpt.STREAM` or `gpt.SEQUENCE_PARALLEL_STREAM`.
        remat: what backward computes again; see `Remat`.
        gather: how parameters that data axes split are gathered where they are used: the specs of
            all of the model's, ``param_specs(defs(config), rules(config, mesh))``, and more; what
            each block needs by itself, and again in backward.
        context: how attention reaches across the ranks that split sequences.
        experts: the axes that experts are divided over, as the rules have it; see `gpt.rules`.
        kernels: which operations CUDA kernels of functron compute; see `functron.ops.use`.
        loss_chunk_tokens: make logits of so many of a rank's tokens at a time, and again in
            backward: they take memory for so many tokens alone; 0: of all, once.
        axes: the axes over which losses are summed; without one that splits samples, each rank
            along it has a loss of its own. The same are to be passed to `num_targets`,
            `value_and_grad` and, with those that split parameters, `sync_gradients`.
        watch: measure the residual stream after every layer: ``stream`` of `Details`.
        attention, router, mlp, norm, block: see above; None: the model's own.

    Raises:
        ValueError: the name of `remat` is none.
        TypeError: a hook is no function.
    """

    stream: P = STREAM
    remat: Remat = "none"
    gather: Gather = WHOLE
    context: Context = RING
    experts: tuple[str, ...] = ("ep",)
    kernels: Kernels = AUTO
    loss_chunk_tokens: int = 0
    axes: tuple[str, ...] = SAMPLE_AXES
    watch: bool = False
    attention: Callable | Hook | None = None
    router: Callable | Hook | None = None
    mlp: Callable | Hook | None = None
    norm: Callable | Hook | None = None
    block: Callable | Hook | None = None

    def __post_init__(self):
        if self.remat not in get_args(Remat):
            known = nearest(str(self.remat), get_args(Remat))
            refuse("ModelOptions", "remat", repr(self.remat), "a known name", known)
        found = []
        for name in HOOKS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, Hook) and not callable(value):
                found.append(Problem(name, repr(value), "a function, ft.Hook or None"))
            elif name != "attention" and isinstance(value, Hook) and value.cached is not None:
                fix = "leave it out: only attention keeps something between tokens"
                found.append(Problem(f"{name}.cached", "a function", "None", fix))
        raise_problems("ModelOptions", found, TypeError)

    def hook(self, name: str) -> Hook | None:
        """The hook of this name, as a `Hook`; None where there is none."""
        value = getattr(self, name)
        return value if value is None or isinstance(value, Hook) else Hook(value)

    def require_only(self, family: str, *names: str) -> None:
        """Refuse options that a family has no place for.

        Args:
            family: the module, for the message.
            names: the fields that it reads.

        Raises:
            ValueError: a field that is none of these is not at its default; all are listed.
        """
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in names and value != field.default:
                fix = f"leave {field.name} out: {family} has no place for it"
                found.append(Problem(f"options.{field.name}", _shown(value), "the default", fix))
        raise_problems(f"{family} cannot be run with these options", found)


DEFAULTS = ModelOptions()
"""Every option at its default."""


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)


def keywords_of(function: Callable, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the `offered` keywords that a function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered)
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {name: value for name, value in offered.items() if name in named}


def check_gathered(name: str, size: int, wanted: int) -> None:
    """Raise ValueError where a parameter's dim of `size` has not been gathered to `wanted`."""
    if size != wanted:
        raise ValueError(
            f"forward: got parameters with {size} of {name}={wanted} on this rank; wanted all of "
            "them where they are used; fix: pass ft.ModelOptions(gather=ft.Gather(specs)), with "
            "the specs by which they are split"
        )
