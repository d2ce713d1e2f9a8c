"""Model families beside the decoder: BERT, T5, vision transformers, LLaVA and Mamba-2.

Each is a module with ``defs``, ``rules``, ``forward`` and ``loss``, and with ``make_family``, by
which the library finds it in `functron.apps.PLUGINS`; `formats` are those of Hugging Face, and
`denoising` has the objectives of BERT (`mask_tokens`) and T5 (`spans_of`, `take_out`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.apps.zoo import bert, llava, mamba, t5, vit
    from functron.apps.zoo.denoising import mask_tokens, spans_of, take_out

import_lazily(__name__)
