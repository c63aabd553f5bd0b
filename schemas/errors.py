"""The errors a user of molt may meet. All are picklable: they cross process and Ray borders.

Each names what happened, where (rollout, segment, index, file) and what to do next.
"""


class MoltError(Exception):
    """Base of every error that molt raises on purpose."""


class ConfigError(MoltError, ValueError):
    """A configuration, recipe or command line that cannot be run as written."""


class SegmentRejected(MoltError, ValueError):
    """A row that breaks the schema or an invariant; nothing of it was stored."""


class SchemaMismatch(MoltError, ValueError):
    """A file written by another version of a schema than this program can read."""


class LogCorrupt(MoltError, OSError):
    """A commit whose bytes are not the bytes that were written."""


class LogGap(MoltError, OSError):
    """A sequence number of a writer stayed invisible for longer than the limit."""


class Retired(MoltError, LookupError):
    """A commit that retention has removed on purpose; names the first available one."""


class WriterClosed(MoltError, RuntimeError):
    """An appender that was closed, killed by an error, or carried over a fork."""


class Fenced(MoltError, RuntimeError):
    """A newer epoch has taken over this log; this process must stop."""


class EngineError(MoltError, RuntimeError):
    """The inference engine refused a request or died."""


class WorkerDied(MoltError, RuntimeError):
    """A rollout worker's process is gone; what it had not finished is issued again."""


class RequestRefused(EngineError):
    """One request that the engine cannot serve (too long, malformed); the engine goes on."""


class TemplateError(MoltError, ValueError):
    """Messages that the chat template cannot render; carries the template's own words."""


class WindowFull(RequestRefused):
    """A prompt that leaves no room for a reply in the engine's window."""


class ModelIdentityError(EngineError):
    """The engine does not run the weights that were published (invariant I7 or I3)."""


class TrainerError(MoltError, RuntimeError):
    """The trainer cannot execute a step (bad rows, non-finite loss, unsupported mesh)."""


class RecoveryError(MoltError, RuntimeError):
    """Redo did not reproduce the recorded state; training stops rather than guess."""
