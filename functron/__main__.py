"""``python -m functron``: the command line."""

import sys

from functron.cli.main import main

sys.exit(main())
