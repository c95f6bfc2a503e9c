"""Adapters to the engines that run the model. Nothing outside this package imports an engine."""
