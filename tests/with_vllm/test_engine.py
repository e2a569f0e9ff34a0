"""verl's vLLM server on a real engine, in this process: aborts end answers, and gate 2 gets the largest log-probs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from goldilocks.engine.cpu import platform_env

from .conftest import make_model

TOKENS = 40  # of an answer that ends
LONGEST = 4096  # of one that is aborted: however fast the engine is, the abort comes before its end
PROMPT = [3, 4, 5]
WITHOUT_TEXT = {"detokenize": False, "flat_logprobs": True}  # as our client asks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), LONGEST)


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in platform_env("cpu").items():
            patched.setenv(name, value)
        yield


async def server_of(model: Path) -> Any:
    """verl's server with an engine, without the actor and the HTTP port around it."""
    from verl.workers.config import RolloutConfig
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=str(model), enforce_eager=True, dtype="float32", max_model_len=LONGEST, max_num_seqs=8,
        disable_log_stats=True,  # as verl has it
    )  # fmt: skip
    server = vLLMHttpServer.__new__(vLLMHttpServer)
    server.engine = AsyncLLM.from_engine_args(args)
    server.config = RolloutConfig(name="vllm", prompt_length=16, response_length=LONGEST, max_model_len=LONGEST)
    server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    server.node_rank = server.replica_rank = server._admitting = server.global_steps = 0
    server._disaggregation_role = server._pd_decode_peers = None
    server._submission_paused = server._rejecting = False
    server._resume_event = asyncio.Event()
    return server


def params(**more: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "logprobs": True, "ignore_eos": True, **more}


def test_aborts_end_answers_and_the_largest_log_probs_are_handed_on(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An abort waits until the engine knows the request, however long that takes here.
    monkeypatch.setattr("goldilocks.engine.verl_server.messages.TRIES", 100_000)
    asyncio.run(check(model))


async def check(model: Path) -> None:
    from goldilocks.engine.verl_server.messages import ENDED, TOP, abort_in_vllm

    server = await server_of(model)
    try:
        whole = await server.generate(PROMPT, params(max_tokens=TOKENS, extra_args={TOP: True}), "whole")
        assert len(whole.token_ids) == len(whole.log_probs) == len(whole.extra_fields["top_log_probs"]) == TOKENS
        largest, sampled = torch.tensor(whole.extra_fields["top_log_probs"]), torch.tensor(whole.log_probs)
        assert (largest >= sampled).all()
        assert (largest > sampled).any()
        plain = await server.generate(PROMPT, params(max_tokens=TOKENS), "plain")
        assert "top_log_probs" not in plain.extra_fields

        await check_requests_without_text(server)
        await check_that_an_end_loses_no_token(server)

        names = [f"r{i}" for i in range(24)]  # 8 at a time: most wait inside the engine
        tasks = [asyncio.create_task(server.generate(PROMPT, params(), name)) for name in names]
        abort_in_vllm(server, names)  # some before the engine has seen the request
        outputs = await asyncio.gather(*tasks)
        assert [output.stop_reason in ENDED for output in outputs] == [True] * len(names)
        assert sum(len(output.token_ids) for output in outputs) < LONGEST * len(names) / 2
        assert not server.engine.output_processor.request_states
        await check_many(server)
    finally:
        server.engine.shutdown()


def test_a_message_with_outputs_of_many_steps_has_one_part() -> None:
    """vLLM before 0.27 writes the next message over the first part of one with several that is still being sent."""
    import numpy as np
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from goldilocks.verl.patches.vllm import TOGETHER, HeldOutputs, inline_array

    sent: list[Any] = []
    request = SimpleNamespace(sampling_params=SamplingParams(detokenize=False))
    queue = HeldOutputs(sent.append, {"a": request}, inline_array())
    for token in range(1 + TOGETHER):
        found = LogprobsLists(np.array([[token]]), np.array([[-token / 8]], np.float32), np.array([token % 5]))
        queue.put((0, EngineCoreOutputs(outputs=[EngineCoreOutput("a", [token], new_logprobs=found)])))
    assert len(sent) == 2
    parts = MsgpackEncoder().encode(sent[1][1])
    assert len(parts) == 1
    (output,) = MsgpackDecoder(EngineCoreOutputs).decode(parts).outputs
    tokens = list(range(1, 1 + TOGETHER))
    assert output.new_token_ids == tokens
    assert output.new_logprobs.logprob_token_ids.tolist() == [[token] for token in tokens]
    assert output.new_logprobs.logprobs.tolist() == [[-token / 8] for token in tokens]
    assert output.new_logprobs.logprobs.dtype == np.float32
    assert output.new_logprobs.sampled_token_ranks.tolist() == [token % 5 for token in tokens]


async def check_requests_without_text(server: Any) -> None:
    """Such a request has two outputs and the values of any other."""
    from vllm import SamplingParams

    async def outputs(name: str, **more: Any) -> list[Any]:
        asked = SamplingParams(max_tokens=TOKENS, logprobs=0, ignore_eos=True, temperature=0.0, **more)
        return [output async for output in server.engine.generate({"prompt_token_ids": PROMPT}, asked, name)]

    with_text, without = await outputs("text"), await outputs("no-text", **WITHOUT_TEXT)
    assert 1 <= len(without) <= 2  # one where the first was not fetched before the last came
    assert len(without[0].outputs[0].token_ids) >= 1
    last, other = without[-1].outputs[0], with_text[-1].outputs[0]
    assert (last.token_ids, last.finish_reason, last.text) == (other.token_ids, other.finish_reason, "")
    assert [one[token].logprob for one, token in zip(last.logprobs, last.token_ids, strict=True)] == [
        one[token].logprob for one, token in zip(other.logprobs, other.token_ids, strict=True)
    ]


async def check_that_an_end_loses_no_token(server: Any) -> None:
    """Tokens that vLLM's engine keeps back come with an abort, with a pause, and with the abort of who waits for them.

    ``clock`` is a request in the same steps: when it has ended, the long one has as many tokens at the least.
    """
    from goldilocks.engine.verl_server.messages import abort_in_vllm

    async def pause(_name: str) -> None:
        await server.abort_all_requests()
        await server.resume_generation()

    async def abort(name: str) -> None:
        abort_in_vllm(server, [name])

    greedy = params(temperature=0.0, **WITHOUT_TEXT)
    whole = await server.generate(PROMPT, greedy | {"max_tokens": LONGEST // 2}, "greedy")
    for name, end in {"aborted": abort, "paused": pause}.items():
        asked = asyncio.create_task(server.generate(PROMPT, dict(greedy), name))
        while not server.engine.output_processor.request_states or server._admitting:
            await asyncio.sleep(0.01)
        await server.generate(PROMPT, params(max_tokens=TOKENS), f"clock-{name}")
        await end(name)
        ended = await asked
        assert ended.stop_reason == "aborted"
        assert TOKENS <= len(ended.token_ids) == len(ended.log_probs) < LONGEST
        both = min(len(ended.token_ids), len(whole.token_ids))
        assert ended.token_ids[:both] == whole.token_ids[:both]
        assert ended.log_probs[:both] == pytest.approx(whole.log_probs[:both], abs=1e-5)


async def check_many(server: Any) -> None:
    """Many requests of one message: each is answered as by a call of its own, and one fails or is aborted alone."""
    from goldilocks.engine.verl_server.messages import TOP, abort_in_vllm

    shared = params(max_tokens=TOKENS, extra_args={TOP: True}, **WITHOUT_TEXT)
    requests = [(f"m{i}", PROMPT, shared) for i in range(12)]
    requests += [("refused", [3] * LONGEST, shared), ("ended", PROMPT, params())]
    answers = await server.generate_all("batch", requests)
    abort_in_vllm(server, ["ended"])
    while len(answers) < len(requests):
        answers += await server.more_answers("batch")
    found = {name: outcome for name, outcome, _ in answers}
    assert isinstance(found.pop("refused"), ValueError)
    assert found.pop("ended").stop_reason == "aborted"
    for output in found.values():
        assert len(output.token_ids) == len(output.log_probs) == len(output.extra_fields["top_log_probs"]) == TOKENS
        assert output.extra_fields["global_steps"] == server.global_steps
    assert not server.goldilocks_batches
