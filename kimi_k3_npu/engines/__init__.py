"""Adapters to the engines that run the model. Nothing outside this package imports an engine.

An engine's own folder holds what only it has: the names that are used of it (`symbols.py`), its hooks, its model class,
its attention, its options. What any engine's adapter needs is here: `launch.py` (was our model asked for), `options.py`
(what is refused), `weights.py` and `reload.py` (checkpoints), `groups.py` (process groups), `images.py`, and
`guard.py`, in which each engine is a row.
"""
