"""The trajectory log: durable appends, verified reads, one control log, SQL.

Imports neither torch nor vllm nor ray.
"""

if __name__ != "molt.store":
    raise ImportError("import molt.store, not store")

from molt.store.appender import Appender
from molt.store.log import Log
from molt.store.pending import Ticket
from molt.store.tail import Tail
from molt.store.writer import Writer

__all__ = ["Appender", "Log", "Tail", "Ticket", "Writer"]
