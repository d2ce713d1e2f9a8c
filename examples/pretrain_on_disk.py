"""From text to a model that writes: a tokenizer, tokens on disk, training, validation, sampling.

Trains a byte-pair tokenizer on the text, makes Megatron's .bin and .idx of it, trains a small model
on these with a part held out, and samples with and without a cache of keys and values:

    python examples/pretrain_on_disk.py --out work
    python examples/pretrain_on_disk.py --out work --text my_code --steps 1000 --mesh dp=2,tp=2

The same by hand: `functron preprocess`, `functron train`, `functron sample`.
"""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer

from functron import checkpoint, gpt, params
from functron.cli import main as cli
from functron.data import open_tokens
from functron.models import generation
from functron.training import config as run_config
from functron.training import run_folder

END = "<|endoftext|>"


def parse_args():
    parser = argparse.ArgumentParser(description="Train a model on text, from the beginning.")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for everything")
    parser.add_argument("--text", type=Path, help="a folder of .py files; default: all packages")
    parser.add_argument("--megabytes", type=float, default=20, help="how much text is used")
    parser.add_argument("--vocab-size", type=int, default=4096)
    return parser.parse_known_args()  # the others are options of functron train


def texts(folder: Path, most_bytes: float):
    """The texts of files, in the order of their names, until there are so many bytes."""
    for file in sorted(folder.rglob("*.py")):
        text = file.read_bytes().decode("utf-8", errors="ignore")
        if most_bytes > 0 and text.strip():
            yield text
            most_bytes -= len(text.encode())


def train_tokenizer(documents, vocab_size: int, out: Path):
    """A byte-level byte-pair tokenizer in `out`, as Hugging Face's libraries read it."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(documents, vocab_size, special_tokens=[END], show_progress=False)
    out.mkdir()
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def run(*command: str):
    print("\nfunctron", *command, flush=True)
    code = cli.main(list(command))
    if code:
        raise SystemExit(code)


def main():
    args, options = parse_args()
    args.out.mkdir(parents=True)
    text, tokenizer, tokens, out = (args.out / x for x in ("text.jsonl", "bpe", "tokens", "run"))
    folder = args.text or Path(sysconfig.get_paths()["purelib"])
    documents = list(texts(folder, args.megabytes * 1e6))
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    train_tokenizer(documents, args.vocab_size, tokenizer)
    run("preprocess", str(text), "--tokenizer", str(tokenizer), "--out", str(tokens))

    files = ["--data", str(tokens), "--split", "98,2", "--out", str(out)]
    sizes = ["--gpt.vocab-size", str(args.vocab_size), "--seq", "128", "--global-batch", "16"]
    evaluated = ["--eval-every", "50", "--eval-batches", "8"]
    run("train", "--model", "llama3-tiny", *files, *sizes, *evaluated, *options)
    for record in (record for record in run_folder.records(out) if "eval" in record):
        perplexity = record["eval"]["validation"]["perplexity"]
        print(f"step {record['step']:5d}  validation perplexity {perplexity:.1f}")
    run("sample", str(out), "--prompt", "def ", "--tokens", "60", "--seed", "1")

    config = run_config.load(out / run_folder.CONFIG).gpt
    like = {"params": params.abstract_params(gpt.defs(config))}
    weights = checkpoint.restore(checkpoint.latest(out / run_folder.CHECKPOINTS), like)["params"]
    read = torch.from_numpy(open_tokens(tokens).read(0, 48).astype("int64"))[None]
    begin, extend = generation.cached(config, None, room=48)
    logits, cache = begin(weights, read[:, :16], torch.tensor([16]))
    found = [logits]
    for place in range(16, 48):
        logits, cache = extend(weights, cache, read[:, place], torch.tensor([place]))
        found.append(logits)
    wanted = gpt.forward(config, weights, read)[:, 15:, : config.vocab_size]
    print(f"with and without the cache: {(torch.stack(found, 1) - wanted).abs().max():.1e} apart")


if __name__ == "__main__":
    main()
