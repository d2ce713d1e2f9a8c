"""Data: batches of tokens as a pure function of the step."""

from functron.data.blend import Blend, Exhaustive, Mixture
from functron.data.chat import Chat
from functron.data.context_plan import Costs, Placement, Plan, arrange
from functron.data.context_schedule import schedule
from functron.data.indexed import IndexedFile
from functron.data.indexed_verify import verify
from functron.data.indexed_writer import IndexedWriter, merge
from functron.data.middle import FillInTheMiddle
from functron.data.mock import MockTokens
from functron.data.order import Samples
from functron.data.packed_chat import PackedChat
from functron.data.packed_tokens import PackedTokens
from functron.data.packing import balance, pack
from functron.data.permutation import permute
from functron.data.shards import open_tokens
from functron.data.splits import split, split_documents
from functron.data.text import ByteText, check_tokens
from functron.data.text_tokenizer import open_tokenizer
from functron.data.token_text import TokenText
from functron.data.token_windows import TokenWindows
from functron.data.tokenizer import Tokenizer

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
