"""In each process that the stand-in's environment reaches: what is Python's is replaced, too."""

import importlib.abc
import os
import sys

if os.environ.get("FAKE_GPU"):

    class _Hook(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != "functron":
                return
            sys.meta_path.remove(self)
            sys.path.insert(0, os.environ["FAKE_GPU"])
            import standin

            sys.path.remove(os.environ["FAKE_GPU"])
            standin.install()
            return

    sys.meta_path.insert(0, _Hook())
