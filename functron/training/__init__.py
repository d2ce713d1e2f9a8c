"""Training runs: a configuration, what follows of it on a mesh, steps, records and folders."""
