"""Architectures: each a config, definitions of parameters, rules, and a loss, as pure functions."""
