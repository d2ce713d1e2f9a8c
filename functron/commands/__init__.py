"""The commands, one per module: their options, and ``run(arguments) -> exit code``."""
