"""How well a model answers: problems, answers from any engine, and scores."""
