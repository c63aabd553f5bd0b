"""An environment of `verifiers` (v1) as a `ChatAgent`: its harness plays, its rewards count.

    # my_module.py; data.train = "my_module:prompts", agent.env = "my_module:Task"
    from molt.agents.adapters.verifiers import Verifiers

    class Task(Verifiers):
        config = {"taskset": {"id": "gsm8k-v1"}}

    prompts = Task.prompts

The default harness is `null`, a chat loop with the task's tools in a process of its own (it needs
`uv`). Rewards carry their weights from there: leave reward.weights at 1.
"""

import itertools
import os
from collections.abc import Iterator
from typing import Any, ClassVar

from molt.agents.chat import ChatAgent, Context, Result

HARNESS = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


class Verifiers(ChatAgent):
    """Subclass it and give the environment's configuration, as in its [env] block."""

    config: ClassVar[dict[str, Any]] = {}

    @classmethod
    def environment(cls) -> Any:
        import verifiers.v1 as vf

        return vf.load_environment(vf.resolve_env_config({"agent": HARNESS, **cls.config}))

    @classmethod
    def prompts(cls, seed: int) -> Iterator[dict[str, Any]]:
        """The tasks' places in the taskset; shuffled by `seed` where it has an end."""
        tasks = cls.environment().taskset
        tasks = tasks.shuffle(seed) if tasks.bounded else tasks
        yield from ({"task": task.data.idx} for task in tasks)

    async def run(self, ctx: Context) -> Result:
        import verifiers.v1 as vf

        env = self.environment()
        task = next(itertools.islice(env.taskset, ctx.prompt["task"], None))
        variable = f"MOLT_KEY_{ctx.api_key}"  # the library reads keys from the environment alone
        os.environ[variable] = ctx.api_key
        try:
            client = vf.EvalClientConfig(base_url=ctx.base_url, api_key_var=variable)
            model = vf.ModelContext(model=ctx.model, client=client)
            async with env.serving():
                episode = await env.run_slot(env.slots(task)[0], model)
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(e for t in episode.traces for e in t.errors)]
        if not episode.ok:
            why = "; ".join(f"{e.type}: {e.message}" for e in errors)
            return Result(status="failed", reason=f"verifiers: {why}")
        found = {k: r for trace in episode.traces for k, r in trace.rewards.items()}
        return Result(rewards={k: None if r is None else r.value for k, r in found.items()})
