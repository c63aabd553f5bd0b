"""Routing replay where it is needed: in bfloat16, where rounding flips experts."""

from pathlib import Path

import moe
import numpy as np
import pytest
from moe import settings
from moe_pair import PROBES, make_pair

from molt.recipes.moe import save_qwen3_moe

pytestmark = pytest.mark.e2e


def test_bfloat16_gap_falls_with_replay(tmp_path: Path) -> None:
    """Rounding flips experts in bfloat16; with the recorded ones the logprobs come closer."""
    folder = save_qwen3_moe(tmp_path / "model")
    pair = make_pair(folder, "bfloat16")
    try:
        pair.publish()
        done = pair.generate([p for p in PROBES for _ in range(4)], 100)
        prompts = [p for p in PROBES for _ in range(4)]
        sequences, recorded = [], []
        for i, (prompt, completion) in enumerate(zip(prompts, done, strict=True)):
            ids = prompt + completion.token_ids.tolist()
            logprobs = np.zeros(len(ids) - 1, np.float32)
            logprobs[len(prompt) - 1 :] = completion.logprobs
            sequences.append(moe.sequence(f"train-{i // 4}/{i % 4}", ids, len(prompt), logprobs))
            recorded.append(moe.known(completion.routing[0][1].astype(np.uint8)))
        pair.trainer.settings = settings(folder, dtype="bfloat16", microbatch_tokens=4096)
        found = pair.trainer.execute(1, sequences, recorded).metrics
        print(found["routing"], found["mismatch"]["all"])
        assert 0.0 < found["routing"]["mismatch"] < 0.1
        assert found["routing"]["gap_replayed"] < found["routing"]["gap_live"]
    finally:
        pair.rig.close()
        pair.trainer.close()
