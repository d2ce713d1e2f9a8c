"""Coming from Megatron-LM: its launch lines, checkpoints, order of samples, and logs.

- `migrate`: a launch line or YAML as a configuration, with what became of each argument.
- `make_format`: ``functron convert megatron:PATH run:RUN``, and back (`runs`), over the tensors
  (`tensors`) in the files of its checkpoints (`checkpoint_files`).
- `make_order`: ``order = "megatron"``, the samples that it draws, token for token.
- `name_records`: ``log_names = "megatron"``; `make_log_reader`: its logs in ``functron compare``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.apps.megatron.launches import make_log_reader, name_records
    from functron.apps.megatron.migration import Migration, migrate
    from functron.apps.megatron.runs import make_format
    from functron.apps.megatron.sample_order import make_order

import_lazily(__name__)
