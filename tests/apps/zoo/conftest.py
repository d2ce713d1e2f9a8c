"""The fixtures of tests of layers and of models, for layers and models of the zoo."""

from __future__ import annotations

from tests.models.conftest import no_random_numbers  # noqa: F401
from tests.nn.conftest import *  # noqa: F403
