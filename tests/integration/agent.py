"""An agent loop with a tool, for launches: each rollout calls the tool once, and may be cut into two or three rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import Run

OPENED, EACH = 16, 3  # groups that are opened at first, rollouts of each

# Every rollout calls the tool once. Of the groups that are opened at first every other one waits in its calls for ever,
# and the others wait until all of those wait.
AGENT = f'''
import asyncio
import os
import pathlib
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from goldilocks.verl.dispatch.client import current_session

JOURNAL = pathlib.Path(os.environ["GOLDILOCKS_RUN"]) / "journal"  # one for each launch


@ToolParser.register("once")
class Once(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        session = current_session.get()
        calls = [] if session is None or session.asked > 1 else [FunctionCall(name="waits", arguments="{{}}")]
        return "", calls


class Waits(BaseTool):
    async def create(self, instance_id=None, **kwargs):
        session = current_session.get()
        return f"{{session.uid}} {{session.index}}", ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        number = int(instance_id.split()[0][1:])
        if self.config["waits"] and number < {OPENED}:
            if number % 2:
                self.note("waits", instance_id)
                await asyncio.Event().wait()
            while not JOURNAL.exists() or JOURNAL.read_text().count("waits") < {OPENED // 2 * EACH}:
                await asyncio.sleep(0.01)
        self.note("answers", instance_id)
        return ToolResponse(text="1"), 0.0, {{}}

    async def release(self, instance_id, **kwargs):
        self.note("released", instance_id)

    def note(self, what, instance_id):
        with JOURNAL.open("a") as file:
            file.write(f"{{what}} {{instance_id}}\\n")


class Cut(ToolAgentLoop):
    """A row for the call, and one for what follows; of odd rollouts the first row is cut in two, if it can be."""

    async def run(self, sampling_params, **kwargs):
        whole = await super().run(sampling_params, **kwargs)
        said = whole.response_mask.index(0) if 0 in whole.response_mask else len(whole.response_mask)
        ends = {{1, said, len(whole.response_mask)}} if kwargs["session_id"] % 2 else {{said, len(whole.response_mask)}}
        starts = [0, *sorted(ends)]
        return [self.part(whole, *span) for span in zip(starts, starts[1:])]

    def part(self, whole, start, end):
        return AgentLoopOutput(
            prompt_ids=whole.prompt_ids + whole.response_ids[:start],
            response_ids=whole.response_ids[start:end],
            response_mask=whole.response_mask[start:end],
            response_logprobs=whole.response_logprobs[start:end],
            num_turns=whole.num_turns,
            metrics=whole.metrics,
            extra_fields=dict(whole.extra_fields),
        )
'''

TOOLS = """
tools:
  - class_name: agent_of_the_test.Waits
    config: {type: native, waits: WAITS}
    tool_schema:
      type: function
      function:
        name: waits
        description: Waits.
        parameters: {type: object, properties: {}, required: []}
"""


def with_agent(folder: Path, monkeypatch: pytest.MonkeyPatch, *, cut: bool) -> list[str]:
    """Return the settings of a run with a tool; with ``cut`` rollouts are cut into rows and wait for each other."""
    (folder / "agent_of_the_test.py").write_text(AGENT)
    (folder / "tools.yaml").write_text(TOOLS.replace("WAITS", str(cut).lower()))
    (folder / "loops.yaml").write_text("- name: cut\n  _target_: agent_of_the_test.Cut\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    rollout = "actor_rollout_ref.rollout"
    return [
        f"{rollout}.agent.agent_loop_config_path={folder / 'loops.yaml'}",
        f"{rollout}.agent.default_agent_loop={'cut' if cut else 'tool_agent'}",
        f"{rollout}.multi_turn.enable=True",
        f"{rollout}.multi_turn.format=once",
        f"{rollout}.multi_turn.tool_config_path={folder / 'tools.yaml'}",
        "data.max_response_length=24",
        f"trainer.rollout_data_dir={folder / 'rollouts'}",
    ]


def journal_of(run: Run) -> list[list[str]]:
    """What happened to calls of the tool in a launch, each with its group and its rollout."""
    return [line.split() for line in (run.folder / "journal").read_text().splitlines()]


def answered(run: Run) -> list[tuple[str, str]]:
    """The rollouts whose call was answered, each as often as it was."""
    return [(uid, index) for what, uid, index in journal_of(run) if what == "answers"]
