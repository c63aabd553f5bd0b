"""Environments and rewards of other libraries; each file imports its library when it is used."""
