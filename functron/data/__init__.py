"""Data: batches of tokens as a pure function of the step."""

from functron.data.blend import Blend, Exhaustive, Mixture, split, split_documents
from functron.data.chat import Chat
from functron.data.context_schedule import Costs, Placement, Plan, arrange, schedule
from functron.data.denoising import FillInTheMiddle
from functron.data.indexed import IndexedFile, verify
from functron.data.indexed_writer import IndexedWriter, merge
from functron.data.order import Samples, permute
from functron.data.packed import PackedChat, PackedTokens
from functron.data.packing import balance, pack
from functron.data.shards import open_tokens
from functron.data.text_tokenizer import open_tokenizer
from functron.data.tokenizer import Tokenizer
from functron.data.windows import ByteText, MockTokens, TokenText, TokenWindows, check_tokens

__all__ = [
    "Blend",
    "ByteText",
    "Chat",
    "Costs",
    "Exhaustive",
    "FillInTheMiddle",
    "IndexedFile",
    "IndexedWriter",
    "Mixture",
    "MockTokens",
    "PackedChat",
    "PackedTokens",
    "Placement",
    "Plan",
    "Samples",
    "TokenText",
    "TokenWindows",
    "Tokenizer",
    "arrange",
    "balance",
    "check_tokens",
    "merge",
    "open_tokenizer",
    "open_tokens",
    "pack",
    "permute",
    "schedule",
    "split",
    "split_documents",
    "verify",
]
