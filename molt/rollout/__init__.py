"""Rollouts: the inference engine, its scheduler and weight transfer, and the workers around it."""
