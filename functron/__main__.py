"""``python -m functron``: the command line."""

import sys

from functron.cli import main

sys.exit(main())
