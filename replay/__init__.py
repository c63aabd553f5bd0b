"""From the log back to batches and steps: assembly and redo. Needs neither vllm nor ray."""

if __name__ != "molt.replay":
    raise ImportError("import molt.replay, not replay")
