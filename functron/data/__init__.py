"""Data: batches of tokens as a pure function of the step."""

from functron.data.chat import Chat
from functron.data.order import Samples
from functron.data.permutation import permute
from functron.data.text import ByteText, check_tokens
from functron.data.token_text import TokenText
from functron.data.tokenizer import Tokenizer

__all__ = ["ByteText", "Chat", "Samples", "TokenText", "Tokenizer", "check_tokens", "permute"]
