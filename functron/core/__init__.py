"""The ground that everything stands on, with no meshes and no programs in it.

`tree` (nested containers with paths), `errors` (messages that teach), `random` (counter-based
keys), `scopes` (named scopes and phases), `closure` (tensors a function closes over), `settings`
(configurations in sections, and what fields say of options), `typing` (shapes in signatures),
`chart` (SVG) and `compat` (private names of torch, and of CUDA's streams).
"""
