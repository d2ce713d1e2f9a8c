"""What everything is built on: trees, errors, keys of randomness, names of scopes."""
