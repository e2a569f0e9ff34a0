"""Runs in the process of vLLM's engine: outputs of a request are kept there, and sent as one (``held-outputs``).

vLLM sends its front end a message for every step, with an output for every request: its token, and the log-prob of that
as three arrays. To read it takes the front end 24 ms for 512 requests on an H200's host, where the GPU's step takes 4.

Arrays of many tokens are written into the message, as vLLM does with small ones. It would send large ones as parts of
their own, and vLLM before 0.27 then writes the next message over the first part of one that is still being sent
(vLLM's pull request 50053).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Inline = Callable[[np.ndarray], Any]  # an array as a message has it that has no other parts

TOGETHER = 128  # outputs of a request that are sent as one: reading them must not all fall to the end, or into a pause


class HeldOutputs:
    """Keeps back the outputs of requests whose text nobody reads; sends the first, and those of many steps as one."""

    def __init__(self, send: Callable[[Any], None], requests: Mapping[str, Any], inline: Inline) -> None:
        """``requests``: all that the scheduler has."""
        self._send, self._requests, self._inline = send, requests, inline
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
        name, ended = output.request_id, output.finish_reason is not None
        held = self._held.get(name)
        if held is None or (not ended and held.request is not self._requests.get(name)):  # or an older one's name
            if not ended and self._is_unread(name):
                self._begin(name)
            return output
        held.outputs.append(output)
        if not ended and len(held.outputs) < TOGETHER:
            return None
        if ended:
            del self._held[name]
        outputs, held.outputs = held.outputs, []
        return _joined(outputs, self._inline)

    def _is_unread(self, request_id: str) -> bool:
        params = getattr(self._requests.get(request_id), "sampling_params", None)
        return params is not None and not params.detokenize and params.output_kind.name == "CUMULATIVE"

    def _begin(self, request_id: str) -> None:
        if len(self._held) > 2 * len(self._requests):  # requests whose client is gone end without an output
            self._held = {name: held for name, held in self._held.items() if name in self._requests}
        self._held[request_id] = _Held(self._requests[request_id], [])


@dataclass
class _Held:
    request: Any
    outputs: list[Any]


def _joined(outputs: Sequence[Any], inline: Inline) -> Any:
    """The last output, with the tokens, log-probs and routed experts of all."""
    last = outputs[-1]
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    if log_probs := [output.new_logprobs for output in outputs if output.new_logprobs is not None]:
        # A row is as wide as the widest request of its step wants it: the sampled token comes first, the largest next.
        width = min(one[0].shape[1] for one in log_probs)
        columns = zip(*((one[0][:, :width], one[1][:, :width], one[2]) for one in log_probs), strict=True)
        whole = map(np.concatenate, columns)  # tokens, log-probs, ranks
        last.new_logprobs = type(log_probs[0])(*map(inline, whole))
    if experts := [found for output in outputs if (found := getattr(output, "routed_experts", None)) is not None]:
        last.routed_experts = inline(np.concatenate(experts))
    return last


def inline_array() -> Inline:
    """vLLM's own encoding of an array, for which none is too large to be written into its message."""
    from vllm.v1.serial_utils import MsgpackEncoder

    encoder = MsgpackEncoder(size_threshold=sys.maxsize)
    encoder.aux_buffers = []
    return encoder.enc_hook


def abort_and_answer(core: Any, request_ids: list[str]) -> None:
    """End requests as a pause of the engine does: their last outputs come from here, with what is kept back."""
    from vllm.v1.request import RequestStatus

    core._send_abort_outputs(core.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED))
