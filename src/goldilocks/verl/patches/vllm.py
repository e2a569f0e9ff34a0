"""vLLM's outputs, verl's vLLM server, the sender of its weights, and the end of vLLM's processes.

**Outputs.** vLLM sends its front end a message for every step, with an output for every request: its token, and the
log-prob of that as three arrays. To read it takes the front end 24 ms for 512 requests on an H200's host, where the
GPU's step takes 4. So in the engine's process the outputs of a request are kept back, and sent as one
(``held-outputs``). Arrays of many tokens are written into the message, as vLLM does with small ones. It would send
large ones as parts of their own, and vLLM before 0.27 then writes the next message over the first part of one that is
still being sent (vLLM's pull request 50053).

**The end.** vLLM's engine runs in a process that waits for requests of its parent, the rollout server. vLLM ends the
engine when the server ends by itself. After ``kill -9``, or by the kernel for want of memory, nobody tells the engine,
which waits for ever with the GPU's memory. So a thread looks after the parent, in each process that ``multiprocessing``
started. The kernel's signal at a parent's death (``PR_SET_PDEATHSIG``) will not do: it comes when the *thread* ends
that started the process, and an engine may be started by a thread that ends.
"""

from __future__ import annotations

import contextvars
import functools
import multiprocessing
import multiprocessing.connection  # ``is_alive`` imports it, where the main thread may have imported half of it
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from goldilocks.engine.verl_server.messages import HOLDS, TOP
from goldilocks.verl.patch import Function, Kind, Patch, around

Inline = Callable[[np.ndarray], Any]  # an array as a message has it that has no other parts

TOGETHER = 128  # outputs of a request that are sent as one: reading them must not all fall to the end, or into a pause
LOOK_S = 1.0
GRACE_S = 10.0  # for an engine to end its workers and to remove its shared memory

# The call by which the engine receives the weights that this task sends.
_receiving: contextvars.ContextVar[Any] = contextvars.ContextVar("receiving", default=None)


def end_orphans() -> None:
    """Have this process end with its parent if ``multiprocessing`` started it, and those that it forks."""
    end_with_parent()
    multiprocessing.util.register_after_fork(end_orphans, lambda _: end_with_parent())


def end_with_parent() -> None:
    """Have this process end with its parent, if ``multiprocessing`` started it."""
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_end_after_parent, name="end-with-parent", daemon=True).start()


def _end_after_parent() -> None:
    parent, adopted_by = multiprocessing.parent_process(), os.getppid()
    assert parent is not None
    # The first says so even if the parent had ended before we looked, unless a sibling that was forked holds its pipe.
    while parent.is_alive() and os.getppid() == adopted_by:
        parent.join(LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def with_largest(original: Any) -> Any:
    """vLLM's ``SamplingParams`` as verl's server makes them, with the largest log-prob where a request wants it."""

    @functools.wraps(original, updated=())
    def sampling_params(*args: Any, extra_args: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        extra = dict(extra_args or {})
        if extra.pop(TOP, False) and kwargs.get("logprobs") == 0:
            kwargs["logprobs"] = 1
        return original(*args, extra_args=extra or None, **kwargs)

    return sampling_params


@around
def hand_on_largest(
    original: Function, output: Any, num_prompt_logprobs: int | None, result_dict: dict[str, Any]
) -> None:
    """Put the largest log-prob at each position into the fields that verl's server returns beside the tokens."""
    original(output=output, num_prompt_logprobs=num_prompt_logprobs, result_dict=result_dict)
    positions = output.outputs[0].logprobs or ()
    # The log-prob of rank 1, if it is among those that vLLM returned.
    largest = [next((one.logprob for one in at.values() if one.rank == 1), None) for at in positions]
    if largest and None not in largest:
        result_dict["top_log_probs"] = largest


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
            if not ended and _is_unread(self._requests.get(name)):
                if len(self._held) > 2 * len(self._requests):  # requests whose client is gone end without an output
                    self._held = {known: one for known, one in self._held.items() if known in self._requests}
                self._held[name] = _Held(self._requests[name], [])
            return output
        held.outputs.append(output)
        if not ended and len(held.outputs) < TOGETHER:
            return None
        if ended:
            del self._held[name]
        outputs, held.outputs = held.outputs, []
        return _joined(outputs, self._inline)


def _is_unread(request: Any) -> bool:
    params = getattr(request, "sampling_params", None)
    return params is not None and not params.detokenize and params.output_kind.name == "CUMULATIVE"


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


def hold_outputs(original: Function) -> Function:
    """The engine's process sends the first output of a request whose text nobody reads, and those of many steps as one.

    verl's server takes the first for the sign that the engine has the request, and returns the last, which has every
    token. vLLM's own statistics count outputs: with them on, nothing is kept back.
    """

    @functools.wraps(original)
    def run_busy_loop(self: Any) -> Any:
        self.abort_and_answer = functools.partial(abort_and_answer, self)
        if not self.log_stats:
            queue = self.output_queue
            queue.put_nowait = HeldOutputs(queue.put_nowait, self.scheduler.requests, inline_array()).put
        return original(self)

    setattr(run_busy_loop, HOLDS, True)
    return run_busy_loop


def note_receiving(original: Function) -> Function:
    """Note the call that receives weights, so that their sender can look after it."""

    @functools.wraps(original)
    async def _execute_method(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = await original(self, method, *args, **kwargs)
        _receiving.set(answer if method == "update_weights_from_ipc" else None)
        return answer

    return _execute_method


def sender_that_looks(original: Any) -> Any:
    """verl's sender, which waits for an answer only while the engine still receives: verl's waits for ever."""
    from goldilocks.engine.verl_server import replica

    return replica.sender_that_looks(original, _receiving.get)


@around
def own_socket(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Name the socket by this Ray too: each Ray counts jobs from one, and verl's name has only the job's number."""
    original(self, *args, **kwargs)
    self.zmq_handle += f".{os.environ.get('RAY_RAYLET_PID', '')}"  # of Ray on this node, for all its processes


HELD_OUTPUTS = Patch(
    name="held-outputs",
    kind=Kind.SPEED,
    module="vllm.v1.engine.core",
    replaced={"EngineCoreProc.run_busy_loop": hold_outputs, "DPEngineCoreProc.run_busy_loop": hold_outputs},
    written_for={
        "EngineCoreOutput": (  # its fields: what is kept back is joined by them
            "f4d91cfaf958ce2a",  # vLLM 0.20 to 0.25
            "082ce170014255ca",  # 0.26 and 0.27
        ),
        "EngineCoreProc.pause_scheduler": (
            "be60e66df71a4e9e",  # 0.17 to 0.20
            "a91082c0af16c02b",  # 0.21 to 0.27
        ),
        "EngineCoreProc._send_abort_outputs": (
            "06999df5c59d2543",  # 0.18 to 0.25
            "120381c51feefaaf",  # 0.26 and 0.27
        ),
        "EngineCoreProc._process_engine_step": (
            "a29c1ce9077164ea",  # 0.14 to 0.21
            "41295db73bb85ebd",  # 0.22 to 0.27
        ),
    },
    reason="vLLM sends an output for every token of every request, and verl's server reads the last one",
    changes="nothing: the same values; requests with text, such as those of vLLM's HTTP server, stay as they are",
    without="512 answers of a 1.5B shape take 1.6 to 1.9 times as long: +16 to +26 % of a step",
    needless_when="vLLM's engine sends final outputs alone to who asks for these",
    needs="vllm",
)

LARGEST_LOG_PROB = Patch(
    name="largest-log-prob",
    kind=Kind.ALGORITHM,
    module="verl.workers.rollout.vllm_rollout.vllm_async_server",
    replaced={"SamplingParams": with_largest, "extract_prompt_logprobs": hand_on_largest},
    written_for={"vLLMHttpServer.generate": ("383d680001635a76", "faee91ab4f1c609a")},
    reason="gate 2 of the batch filter needs the largest log-prob at each position; verl drops it",
    changes="nothing unless gate 2 is on; then vLLM returns one more log-prob a token",
    without="gate 2 of the batch filter has nothing to judge by on vLLM",
    needless_when="verl hands a request's logprobs to vLLM, and on what vLLM returns",
    needs="vllm",
)

WEIGHTS_WATCHED = Patch(
    name="weights-watched",
    kind=Kind.REPORTS,
    module="verl.workers.rollout.vllm_rollout.vllm_rollout",
    replaced={"ServerAdapter._execute_method": note_receiving, "BucketedWeightSender": sender_that_looks},
    written_for={"ServerAdapter._execute_method": "f58c74367fbad112"},
    reason="where vLLM fails to load weights, their sender waits for ever; the failure ends the run with its reason",
    changes="nothing that is computed",
    without="a run on vLLM that cannot load its weights hangs without a word",
    needless_when="verl's sender of weights has a time limit, or watches the receiver",
    needs="vllm",
)

WEIGHTS_APART = Patch(
    name="weights-apart",
    kind=Kind.RESULTS,
    module="verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
    replaced={"BucketedWeightSender.__init__": own_socket, "BucketedWeightReceiver.__init__": own_socket},
    written_for={"BucketedWeightReceiver._init_socket": "63f7edee883b1597"},
    reason="the socket for weights has one name in all runs of a machine whose Rays are their own",
    changes="the name of a file below /tmp",
    without="of two runs on vLLM on one machine one waits for ever for its weights, or is given the other's",
    needless_when="verl's name of that socket has something that two Rays do not share",
    needs="vllm",
)
