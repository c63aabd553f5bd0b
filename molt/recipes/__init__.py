"""Recipes: tasks with their configuration, ready for `molt train`."""
