"""Agents: plain Python that plays an environment against the policy."""
