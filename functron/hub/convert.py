"""From Hugging Face folders to run folders and back: what ``functron convert`` does."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from functron import checkpoint, config, lora, run_folder
from functron.errors import Problem, nearest, raise_problems
from functron.hub.config import CONFIG, read_config
from functron.hub.kinds import Config, dtype_of, kind_of
from functron.hub.reader import load
from functron.hub.writer import MAX_SHARD_BYTES, copy_companions, save
from functron.models.bert import BertConfig
from functron.models.config import Dtype, GPTConfig
from functron.models.family import family_of
from functron.models.mamba import MambaConfig
from functron.models.t5 import T5Config
from functron.params import num_params
from functron.read_out import stored_params

SCHEMES = ("hf", "run")


@dataclass(frozen=True)
class Conversion:
    """What `convert` has done.

    Attributes:
        config: the model's architecture.
        target: the folder that was made.
        files: the names in it that came from the source unchanged.
    """

    config: Config
    target: Path
    files: tuple[str, ...]

    def __str__(self) -> str:
        count = num_params(kind_of(self.config).defs(self.config))
        kept = f"; with {', '.join(self.files)}" if self.files else ""
        return f"{count:,} parameters ({dtype_of(self.config)}) in {self.target}{kept}"


def convert(
    source: str,
    target: str,
    *,
    dtype: str | None = None,
    averaged: bool = False,
    max_seq: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Conversion:
    """Make a run folder of a Hugging Face folder (``hf:PATH run:PATH``), or the other way.

    A run folder made this way has step 0 of a training run in it: the parameters, without state of
    an optimizer. The newest checkpoint of a run is what is exported. One process does it: into a
    run in as much memory as the parameters take, from one in as much as one tensor takes.

    Args:
        source: ``hf:PATH`` or ``run:PATH``.
        target: the other of them; the folder must not exist.
        dtype: of the parameters in the target; None: as they are.
        averaged: export the run's averages of its parameters (from a run only).
        max_seq: the longest sequence, where the model could take longer ones (to a run only).
        max_shard_bytes: the most data in one file (from a run only).

    Raises:
        ValueError: paths without ``hf:`` or ``run:``, or both of one kind, and what `load` and
            `save` raise.
    """
    (kind, path), (other, out) = _parse(source, "from"), _parse(target, "to")
    if kind == other:
        fix = "functron convert hf:MODEL run:RUN, or functron convert run:RUN hf:MODEL"
        problem = Problem("from and to", f"{kind}: and {other}:", "one hf: and one run:", fix)
        raise_problems("nothing to convert", [problem])
    if kind == "hf":
        if averaged:
            got = "true from a Hugging Face folder"
            problem = Problem("averaged", got, "a run, which keeps averages", "leave it out")
            raise_problems("cannot convert", [problem])
        return _import(path, out, dtype=dtype, max_seq=max_seq)
    if max_seq is not None:
        problem = Problem("max_seq", str(max_seq), "nothing: it is the run's", "leave it out")
        raise_problems("cannot convert", [problem])
    return _export(path, out, dtype=dtype, averaged=averaged, max_shard_bytes=max_shard_bytes)


def _parse(text: str, name: str) -> tuple[str, Path]:
    kind, colon, path = text.partition(":")
    if not colon or kind not in SCHEMES or not path:
        fix = nearest(kind, SCHEMES) if colon else f"hf:{text} or run:{text}"
        problem = Problem(name, repr(text), "hf:PATH or run:PATH", fix)
        raise_problems("cannot tell what to convert", [problem])
    return kind, Path(path)


def _import(path: Path, out: Path, *, dtype: str | None, max_seq: int | None) -> Conversion:
    run_folder.refuse_existing(out, "cannot convert")
    kind: Dtype | None = None
    if dtype is not None:
        known: dict[str, Dtype] = {name: name for name in get_args(Dtype)}
        if dtype not in known:
            problem = Problem("dtype", repr(dtype), "a dtype to train in", nearest(dtype, known))
            raise_problems("cannot convert", [problem])
        kind = known[dtype]
    model = read_config(path, dtype=kind, max_seq=max_seq)
    if not isinstance(model, GPTConfig | MambaConfig | BertConfig | T5Config):
        got, fix = f"a {kind_of(model).name}", "use it in Python: hub.load_model(path), hub.save"
        wanted = "a decoder, Mamba-2, a hybrid, BERT or T5: functron train has no others"
        problem = Problem(f"hf:{path}", got, wanted, fix)
        raise_problems("cannot convert", [problem])
        raise AssertionError("unreachable")
    params = load(path, model)
    seq = min(config.TrainConfig.seq, getattr(model, "max_seq", config.TrainConfig.seq))
    table: dict[str, Any] = {family_of(model).name: model, "seq": seq}
    run = config.TrainConfig(**table)
    kept: list[str] = []

    def fill(folder: Path) -> None:
        (folder / run_folder.CONFIG).write_text(config.dump(run), encoding="utf-8")
        (folder / run_folder.HUB).mkdir()
        shutil.copyfile(path / CONFIG, folder / run_folder.HUB / CONFIG)
        kept.extend([CONFIG, *copy_companions(path, folder / run_folder.HUB)])
        checkpoint.save(folder / run_folder.CHECKPOINTS / "0", {"params": params}, {"step": 0})

    run_folder.make(out, fill)
    return Conversion(model, out, tuple(kept))


def _export(
    path: Path, out: Path, *, dtype: str | None, averaged: bool, max_shard_bytes: int
) -> Conversion:
    run_folder.refuse_existing(out, "cannot convert")
    settings = config.load(path / run_folder.CONFIG)
    model = settings.architecture
    stored = checkpoint.Checkpoint(checkpoint.latest(path / run_folder.CHECKPOINTS))
    defs = lora.defs_in(settings.family.defs(model), settings.lora, stored)
    # leaves that are read where they are used: a row of one at a time
    params = lora.merge(stored_params(stored, defs, averaged=averaged))
    kept = path / run_folder.HUB if (path / run_folder.HUB / CONFIG).is_file() else None
    save(out, model, params, like=kept, dtype=dtype, max_shard_bytes=max_shard_bytes)
    if kept is None:  # a run that began with random weights may have a tokenizer all the same
        return Conversion(model, out, tuple(copy_companions(path / run_folder.HUB, out)))
    names = tuple(sorted(entry.name for entry in kept.iterdir()))
    return Conversion(model, out, names)
