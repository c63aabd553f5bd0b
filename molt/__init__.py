"""molt: agentic RL training whose backbone is an event-sourced trajectory log."""

__version__ = "0.1.0"
