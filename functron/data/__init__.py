"""Data: batches of tokens as a pure function of the step."""

from functron.data.permutation import permute
from functron.data.text import ByteText, check_tokens

__all__ = ["ByteText", "check_tokens", "permute"]
