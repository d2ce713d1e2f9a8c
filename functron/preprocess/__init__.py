"""Text to tokens on disk: parallel, and going on where it was stopped."""

from functron.preprocess.run import preprocess
from functron.preprocess.settings import Progress, Settings, Summary

__all__ = ["Progress", "Settings", "Summary", "preprocess"]
