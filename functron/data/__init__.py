"""Data: batches of tokens as a pure function of the step.

A source of `Samples` gives the batch of any step and part of a mesh by arithmetic: there is no
iterator state to save, and the same samples come on every mesh and after resuming. ::

    samples = ft.data.TokenWindows(ft.data.open_tokens("corpus"), seq=1024, seed=0)
    batch = samples.batch(step=7, global_batch=32, part=(0, 4))  # the first quarter's rows

- Text: `TextWindows`; tokens on disk (`open_tokens`, `IndexedFile`, `split`):
  `TokenWindows`, `PackedTokens`, `MockTokens`; conversations: `Chat`, `PackedChat`.
- Several sources: `Blend`. Made of others: `FillInTheMiddle`, `Transformed`.
- Documents shared by the ranks of cp: `pack`, `balance`; `schedule`, `arrange`; `deal`.
- Tokenizers: `open_tokenizer`, `Tokenizer`; by what rules: `TextRules`.
- Tokens of text, to disk: `functron.data.preprocess`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.data.blend import Blend, Exhaustive, Mixture, split, split_documents
    from functron.data.chat import Chat
    from functron.data.context_schedule import (
        ContextCosts,
        ContextPlacement,
        ContextPlan,
        arrange,
        deal,
        schedule,
    )
    from functron.data.indexed import IndexedFile, IndexedWriter, merge
    from functron.data.mapped_files import TextRules, python_text
    from functron.data.packing import PackedChat, PackedTokens, balance, pack
    from functron.data.sampling import Samples, Transformed, permute, shuffled
    from functron.data.shards import open_tokens, verify
    from functron.data.token_datasets import (
        FillInTheMiddle,
        MockTokens,
        TextWindows,
        TokenWindows,
        check_tokens,
    )
    from functron.data.tokenizer import Tokenizer, open_tokenizer

import_lazily(__name__)
