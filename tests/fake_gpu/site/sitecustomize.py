"""In each process that the stand-in's environment reaches: what is Python's is replaced, too."""

import importlib.abc
import importlib.util
import os
import sys

if os.environ.get("FAKE_GPU"):

    class _Hook(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == "functron":
                sys.path.insert(0, os.environ["FAKE_GPU"])
                import standin

                sys.path.remove(os.environ["FAKE_GPU"])
                standin.install()
            if name != "functron.ops.launch":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module

            def load_and_watch(module):
                load(module)
                sys.modules["standin"].watch_launches(module.Launcher)

            spec.loader.exec_module = load_and_watch
            return spec

    sys.meta_path.insert(0, _Hook())
