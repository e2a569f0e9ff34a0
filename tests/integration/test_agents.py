"""An agent loop with a tool that returns several rows a rollout, on the real trainer."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from run_files import json_lines

from .conftest import Launch, Run, Task
from .killed import assert_none_twice, killed, trained_groups
from .test_partial import of_all_lengths, unfinished_rows
from .test_trainer import MODE, assert_accounts_sum, assert_trained, rewards

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SIBLINGS = 7  # of the third rollout, which are cancelled when it is right

# Every rollout calls the tool once. The third waits in its call until its siblings are in theirs, which never end.
AGENT = f'''
import asyncio
import os
import pathlib
from collections import Counter

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from goldilocks.verl.dispatch.session import current_session

JOURNAL = pathlib.Path(os.environ["GOLDILOCKS_TEST_RUN"]) / "journal"  # one for each launch


@ToolParser.register("once")
class Once(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        session = current_session.get()
        calls = [] if session is None or session.called else [FunctionCall(name="waits", arguments="{{}}")]
        return "", calls


class Waits(BaseTool):
    waiting = Counter()

    async def create(self, instance_id=None, **kwargs):
        session = current_session.get()
        return f"{{session.uid}} {{session.index}}", ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        uid, index = instance_id.split()
        if not self.config["waits"]:
            index = 0
        if int(index) > 2:
            self.waiting[uid] += 1
            self.note("waits", instance_id)
            await asyncio.Event().wait()
        while int(index) == 2 and self.waiting[uid] < {SIBLINGS}:
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


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings of a run with the agent loop and the tool above."""
    (tmp_path / "agent_of_the_test.py").write_text(AGENT)
    (tmp_path / "tools.yaml").write_text(TOOLS.replace("WAITS", "true"))
    (tmp_path / "loops.yaml").write_text("- name: cut\n  _target_: agent_of_the_test.Cut\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    rollout = "actor_rollout_ref.rollout"
    return [
        f"{rollout}.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
        f"{rollout}.agent.default_agent_loop=cut",
        f"{rollout}.multi_turn.enable=True",
        f"{rollout}.multi_turn.format=once",
        f"{rollout}.multi_turn.tool_config_path={tmp_path / 'tools.yaml'}",
        "data.max_response_length=24",
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
    ]


def journal_of(run: Run) -> list[list[str]]:
    """What happened to calls of the tool in a launch, each with its group and its rollout."""
    return [line.split() for line in (run.folder / "journal").read_text().splitlines()]


def answered(run: Run) -> list[tuple[str, str]]:
    """The rollouts whose call was answered, each as often as it was."""
    return [(uid, index) for what, uid, index in journal_of(run) if what == "answers"]


def test_rollouts_of_several_rows_count_once_and_tools_of_cancelled_ones_are_told(
    launch: Launch, agent: list[str], tmp_path: Path
) -> None:
    run = launch(
        MODE,
        "algorithm.adv_estimator=rloo",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=score",
        "+adaptive_rollout.enable=True",
        "+adaptive_rollout.stop=contrast",
        "+adaptive_rollout.max_n=10",
        *agent,
        *rewards(tmp_path, "right_from_the_third_on"),
    )
    assert_trained(run, 1, 2)
    assert_accounts_sum(run)
    rows = json_lines(tmp_path / "rollouts" / "1.jsonl")
    parts: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        uid, index, _ = row["uid"].rsplit("_", 2)
        if not uid.startswith("pad"):
            parts[uid, index].append(row["score"])
    assert {len(scores) for scores in parts.values()} == {2, 3}
    assert all(len(set(scores)) == 1 for scores in parts.values())
    groups = {uid: [parts[uid, str(index)][0] for index in range(3)] for uid, _ in parts}
    assert len(groups) == 8
    assert all(scores == [0, 0, 1] for scores in groups.values())
    first = run.steps[0]
    assert first["accounts/trained_rollouts"] == len(parts) == 24
    assert first["accounts/tool_tokens"] > 0
    journal = Counter((what, uid) for what, uid, _ in journal_of(run))
    for uid in groups:  # of the first step: its cancelled calls were told of before the second step began
        assert journal["waits", uid] == SIBLINGS
        assert journal["answers", uid] == 3
        assert journal["released", uid] == SIBLINGS + 3


@pytest.mark.runs(2)
def test_a_paused_conversation_goes_on_after_an_update_and_after_a_kill_without_a_second_call(
    launch: Launch, agent: list[str], task: Task, tmp_path: Path
) -> None:
    (tmp_path / "tools.yaml").write_text(TOOLS.replace("WAITS", "false"))
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    overrides = [*agent, *of_all_lengths(task, tmp_path), loop]
    before = killed(launch, tmp_path, *overrides)
    saved = before.saved
    unfinished = unfinished_rows(tmp_path / "checkpoints" / f"global_step_{saved}")
    replied = {(uid, str(index)) for uid, index, states in unfinished if any("call" in state for state in states)}
    run = launch(*overrides, f"trainer.total_training_steps={saved + 2}", "trainer.resume_mode=auto")
    assert run.status == 0, run.tail()
    assert [step["step"] for step in run.steps] == [saved + 1, saved + 2]
    assert_accounts_sum(run)
    assert all(step["accounts/tool_tokens"] > 0 for step in (*before.run.steps, *run.steps))
    for life in (before.run, run):
        assert len(answered(life)) == len(set(answered(life)))
    assert not replied & set(answered(run))
    after = [trained_groups(tmp_path / "rollouts", step) for step in (saved + 1, saved + 2)]
    assert_none_twice(*before.trained.values(), *after)
