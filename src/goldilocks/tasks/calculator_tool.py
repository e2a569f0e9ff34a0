"""The calculator as a tool of verl, slow or failing where its settings say so."""

from __future__ import annotations

import asyncio
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from goldilocks.tasks.arithmetic import calculate, check_tool


class CalculatorTool(BaseTool):
    """Answers an expression with its value. verl calls ``create``, ``execute`` and ``release`` for every call."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._seconds = float(config.get("seconds", 0))
        self._fail_every = int(config.get("fail_every", 0))
        check_tool(self._seconds, self._fail_every)
        self._calls = 0

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return the value of ``parameters["expression"]``; verl shows the model the text of an error."""
        self._calls += 1
        if self._fail_every and self._calls % self._fail_every == 0:
            raise ConnectionError("no answer")
        await asyncio.sleep(self._seconds)
        return ToolResponse(text=str(calculate(str(parameters.get("expression", ""))))), 0.0, {}
