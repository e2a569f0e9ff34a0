"""Runs in the process of vLLM's engine: most outputs of a request are kept there until it ends (``first-and-last``).

vLLM sends its front end a message for every step, with an output for every request: its token, and the log-prob of that
as three arrays. To read it takes the front end 24 ms for 512 requests on an H200's host, where the GPU's step takes 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

TOGETHER = 64  # outputs of a request that become one: each is an object with four others, for a few numbers


class HeldOutputs:
    """Keeps back the outputs of requests whose text nobody reads, from the second to the last; sends these as one."""

    def __init__(self, send: Callable[[Any], None], requests: Mapping[str, Any]) -> None:
        self._send, self._requests = send, requests  # ``requests``: all that the scheduler has
        self._held: dict[str, _Held] = {}

    def put(self, message: Any) -> None:
        """Send the outputs of a step, or any other message, without what is kept back."""
        _, step = message if isinstance(message, tuple) else (0, None)
        if step is not None and step.outputs:
            step.outputs = [due for output in step.outputs if (due := self._due(output)) is not None]
            if not step.outputs and not step.finished_requests and step.scheduler_stats is None:
                return
        self._send(message)

    def _due(self, output: Any) -> Any:
        """The output to send for this one, if any."""
        held = self._held.get(output.request_id)
        if held is None:
            if output.finish_reason is None and self._is_unread(output.request_id):
                self._begin(output.request_id)
            return output
        held.add(output)
        return None if output.finish_reason is None else self._held.pop(output.request_id).all()

    def _is_unread(self, request_id: str) -> bool:
        params = getattr(self._requests.get(request_id), "sampling_params", None)
        return params is not None and not params.detokenize and params.output_kind.name == "CUMULATIVE"

    def _begin(self, request_id: str) -> None:
        if len(self._held) > 2 * len(self._requests):  # requests whose client is gone end without an output
            self._held = {name: held for name, held in self._held.items() if name in self._requests}
        self._held[request_id] = _Held()


class _Held:
    """The outputs of a request, those of ``TOGETHER`` steps as one."""

    def __init__(self) -> None:
        self._joined: list[Any] = []
        self._recent: list[Any] = []

    def add(self, output: Any) -> None:
        self._recent.append(output)
        if len(self._recent) == TOGETHER:
            self._joined.append(_joined(self._recent))
            self._recent = []

    def all(self) -> Any:
        return _joined([*self._joined, *self._recent])


def _joined(outputs: Sequence[Any]) -> Any:
    """The last output, with the tokens and log-probs of all."""
    last = outputs[-1]
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    if log_probs := [output.new_logprobs for output in outputs if output.new_logprobs is not None]:
        columns = zip(*(one[:3] for one in log_probs), strict=True)  # tokens, log-probs, ranks
        last.new_logprobs = type(log_probs[0])(*map(np.concatenate, columns))
    return last


def abort_and_answer(core: Any, request_ids: list[str]) -> None:
    """End requests as a pause of the engine does: their last outputs come from here, with what is kept back."""
    from vllm.v1.request import RequestStatus

    core._send_abort_outputs(core.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED))
