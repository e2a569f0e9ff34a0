"""Our rollout server: what it generates, how it pauses and aborts, and how new weights reach it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_state import restorer
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast
from unit.engine.models import VOCABULARY, fresh, logits_after, reference
from verl.workers.config import HFModelConfig, RolloutConfig
from verl_world import Actor, balancer_of, client_of

from goldilocks.engine import Engine, Generation
from goldilocks.engine.verl_server.replica import Bucket, TransformersAdapter, TransformersReplica
from goldilocks.engine.verl_server.server import RolloutServer
from goldilocks.verl.dispatch.client import current_session

EOS = 60
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    words = Tokenizer(tokenizer_models.WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token=f"t{EOS}").save_pretrained(path)
    fresh("llama").save_pretrained(path)
    return path


def _server(model_path: Path, **options: Any) -> Any:
    defaults = {"load_format": "auto", "dtype": "float32", "max_num_seqs": 4, "prompt_length": 8, "response_length": 24}
    config = RolloutConfig(
        name="transformers", tensor_model_parallel_size=1, n_gpus_per_node=2, **{**defaults, **options}
    )
    model = HFModelConfig(path=str(model_path), override_config={"attn_implementation": "sdpa"})
    return RolloutServer(config, model, replica_rank=0, visible_device=None)


class Portioned(Engine):
    """Makes a few steps after a request was submitted, then none until a request is submitted or aborted.

    So nothing ends by itself before a test aborts it, however the engine's thread and the test's take turns.
    """

    portion, left = 5, 0

    def submit(self, *args: Any) -> None:
        super().submit(*args)
        self.left = self.portion

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self.left = max(self.left, 1)  # an aborted request comes back from the next step

    def abort_all(self) -> None:
        super().abort_all()
        self.left = max(self.left, 1)

    def step(self) -> list[Generation]:
        if not self.left:
            time.sleep(0.001)
            return []
        self.left -= 1
        return super().step()


@pytest.fixture
def portioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goldilocks.engine.verl_server.server.Engine", Portioned)


async def portion_made(server: Any, requests: int = 1, over: Callable[[], bool] = lambda: False) -> None:
    """Wait until the engine has so many requests and has made its steps, or until it is ``over``."""
    while not over() and (len(server._loop.in_flight()) < requests or server._loop._engine.left):
        await asyncio.sleep(0.001)


@pytest.fixture(scope="module")
def server(model_path: Path) -> Any:
    restore = restorer()  # a server sets torch's threads and oneDNN for its process
    made = _server(model_path, ignore_eos=True)
    restore()
    return made


def test_log_probs_are_those_of_the_model_and_are_left_out_unless_asked_for(server: Any) -> None:
    assert asyncio.run(server.generate(PROMPT, {"max_tokens": 2}, "r")).log_probs is None
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    output = asyncio.run(server.generate(PROMPT, params, "r"))
    expected = logits_after("llama", PROMPT, output.token_ids).log_softmax(-1)
    tokens = torch.tensor(output.token_ids)
    assert output.stop_reason == "completed"
    assert len(tokens) == 24
    torch.testing.assert_close(
        torch.tensor(output.log_probs), expected.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        torch.tensor(output.extra_fields["top_log_probs"]), expected.max(-1).values, atol=1e-5, rtol=0
    )


def test_greedy_with_stop_ids_and_limits_as_verl_names_them(server: Any) -> None:
    whole = asyncio.run(server.generate(PROMPT, {"temperature": 0, "max_new_tokens": 9}, "r")).token_ids
    assert len(whole) == 9
    stop = whole[4]
    cut = asyncio.run(server.generate(PROMPT, {"temperature": 0, "stop_token_ids": [stop]}, "r")).token_ids
    assert cut == whole[: whole.index(stop) + 1]


def test_the_answer_is_cut_to_what_the_context_holds(server: Any) -> None:
    assert len(asyncio.run(server.generate([3] * 30, {}, "r")).token_ids) == 2
    with pytest.raises(ValueError, match=r"tokens of the prompt=32 .* data\.max_prompt_length"):
        asyncio.run(server.generate([3] * 32, {}, "r"))


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.1}, {"min_p": 0.1}])
def test_a_sampling_parameter_that_would_be_ignored_is_refused(server: Any, params: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"sampling parameter {next(iter(params))}="):
        asyncio.run(server.generate(PROMPT, params, "r"))


def test_full_determinism_repeats_a_request_and_tells_requests_apart(model_path: Path) -> None:
    server = _server(model_path, full_determinism=True, ignore_eos=True)
    answers = [asyncio.run(server.generate(PROMPT, {}, request)).token_ids for request in ("a", "a", "b")]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


async def _all(server: Any, requests: list[Any]) -> dict[str, Any]:
    answers = await server.generate_all("batch", requests)
    while len(answers) < len(requests):
        answers += await server.more_answers("batch")
    assert not server.goldilocks_batches
    return {name: outcome for name, outcome, _ in answers}


def test_a_message_of_many_requests_has_the_answers_of_each_by_itself(server: Any) -> None:
    requests = [(f"r{i}", [5 + i, 6], {"seed": i, "max_tokens": 2 + i, "logprobs": True}) for i in range(6)]

    async def one_by_one() -> list[Any]:
        return [await server.generate(prompt, params, name) for name, prompt, params in requests]

    together = asyncio.run(_all(server, [*requests, ("long", [3] * 40, {}), ("odd", [3], {"min_p": 0.1})]))
    for (name, _, _), alone in zip(requests, asyncio.run(one_by_one()), strict=True):
        assert together[name].token_ids == alone.token_ids
        assert together[name].log_probs == pytest.approx(alone.log_probs, abs=1e-5)
        assert together[name].extra_fields["top_log_probs"] == pytest.approx(
            alone.extra_fields["top_log_probs"], abs=1e-5
        )
    assert "tokens of the prompt=40" in str(together["long"])
    assert "sampling parameter min_p" in str(together["odd"])


async def test_a_server_that_leaves_sends_requests_and_messages_of_many_back(server: Any) -> None:
    await server.abort_all_requests(reject_request=True)
    together = await _all(server, [("a", PROMPT, {}), ("b", PROMPT, {})])
    rejected = [await server.generate(PROMPT, {}, "r"), *together.values()]
    await server.resume_generation()
    assert [(one.stop_reason, one.token_ids) for one in rejected] == [("aborted", [])] * 3
    assert (await server.generate(PROMPT, {"max_tokens": 1}, "r")).stop_reason == "completed"


@pytest.mark.usefixtures("portioned")
async def test_abort_all_ends_what_runs_holds_what_comes_and_resumes(model_path: Path) -> None:
    server = _server(model_path, max_num_seqs=1, ignore_eos=True)
    running = [asyncio.ensure_future(server.generate(PROMPT, {}, f"r{i}")) for i in range(3)]
    await portion_made(server, requests=3)
    aborted = await server.abort_all_requests()
    late = asyncio.ensure_future(server.generate(PROMPT, {"max_tokens": 2}, "late"))
    await asyncio.sleep(0.05)
    assert not late.done()
    await server.resume_generation()
    outputs, late = await asyncio.gather(*running), await late
    assert [output.stop_reason for output in outputs] == ["aborted"] * 3
    assert (aborted["aborted_count"], set(aborted["request_ids"])) == (3, {"r0", "r1", "r2"})
    running, *waiting = sorted((len(output.token_ids) for output in outputs), reverse=True)
    assert 0 < running < 24
    assert waiting == [0, 0]
    assert late.stop_reason == "completed"


async def test_one_request_is_aborted_and_the_others_go_on(server: Any) -> None:
    running = [asyncio.ensure_future(server.generate(PROMPT, {}, name)) for name in ("keep", "drop")]
    await asyncio.sleep(0)
    answer = await server.abort_request("drop")
    kept, dropped = await asyncio.gather(*running)
    assert kept.stop_reason == "completed"
    assert len(kept.token_ids) == 24
    assert dropped.stop_reason == ("aborted" if answer["aborted"] else "completed")
    assert await server.abort_request("unheard of") == {"aborted": False, "request_id": "unheard of"}


def test_many_requests_are_aborted_with_one_look_at_all_in_flight(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[list[str]] = []
    in_flight = server._loop.in_flight

    def looked() -> list[str]:
        looks.append(in_flight())
        return looks[-1]

    monkeypatch.setattr(server._loop, "in_flight", looked)
    assert asyncio.run(asyncio.wait_for(server.abort_requests([f"r{i}" for i in range(8)]), 30)) == []
    assert len(looks) == 1


async def test_a_worker_sends_new_weights_and_their_version_in_one_message(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goldilocks.engine.verl_server.replica.is_support_ipc", lambda: False)
    server = _server(model_path, ignore_eos=True, load_format="dummy")
    adapter = object.__new__(TransformersAdapter)  # without the processes that its constructor asks for
    adapter.config, adapter._found = server._config, Actor(server)
    await adapter.update_weights(iter(reference("llama").state_dict().items()), global_steps=7)
    output = await server.generate(PROMPT, {"temperature": 0}, "r")
    assert adapter._found.calls == {"load_weights": 1}
    assert output.extra_fields["global_steps"] == 7
    assert output.token_ids == logits_after("llama", PROMPT, output.token_ids).argmax(-1).tolist()


def test_a_version_comes_with_the_last_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goldilocks.engine.verl_server.replica.is_support_ipc", lambda: False)
    sent: list[tuple[bool, int | None]] = []

    class Server:
        async def load_weights(self, _bucket: Bucket, last: bool, global_steps: int | None = None) -> None:
            sent.append((last, global_steps))

    adapter = object.__new__(TransformersAdapter)
    each_by_itself = SimpleNamespace(update_weights_bucket_megabytes=0)
    adapter.config, adapter._found = SimpleNamespace(checkpoint_engine=each_by_itself), Actor(Server())
    asyncio.run(adapter.update_weights(iter([(name, torch.ones(2)) for name in "abc"]), global_steps=7))
    assert sent == [(False, None), (False, None), (True, 7)]


def test_a_tiny_model_is_served_by_one_thread(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    _server(model_path)
    assert torch.get_num_threads() == 1


def test_weights_of_another_model_and_pictures_are_refused(server: Any) -> None:
    with pytest.raises(ValueError, match="no_such_layer"):
        asyncio.run(server.load_weights(Bucket([("no_such_layer", torch.zeros(2))]), True))
    with pytest.raises(ValueError, match=r"text only; use rollout\.name=vllm"):
        asyncio.run(server.generate(PROMPT, {}, "r", image_data=["picture"]))


async def test_the_end_of_sequence_ends_an_answer(model_path: Path) -> None:
    server = _server(model_path)
    asked = (server.generate(PROMPT, {"seed": seed}, f"r{seed}") for seed in range(24))
    answers = [output.token_ids for output in await asyncio.gather(*asked)]
    assert any(answer[-1] == EOS for answer in answers)
    assert all(EOS not in answer[:-1] for answer in answers)


async def test_a_sleeping_server_generates_once_awake_what_came_meanwhile(model_path: Path) -> None:
    server = _server(model_path, ignore_eos=True)
    early = asyncio.ensure_future(server.generate(PROMPT, {"temperature": 0}, "early"))
    await asyncio.sleep(0)
    falling_asleep = asyncio.ensure_future(server.sleep())
    await asyncio.sleep(0)
    late = asyncio.ensure_future(server.generate(PROMPT, {"temperature": 0}, "r"))
    await falling_asleep
    await server.wake_up(tags=["weights"])
    await asyncio.sleep(0.05)
    assert (early.done(), late.done()) == (True, False)
    await server.wake_up(tags=["kv_cache"])
    output = await late
    assert output.token_ids == logits_after("llama", PROMPT, output.token_ids).argmax(-1).tolist()


def _client(server: Any) -> Any:
    return client_of(balancer_of(a=Actor(server)), max_num_seqs=4, response_length=56)


def test_paused_and_resumed_an_answer_is_as_without_a_pause(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client over the real engine, with the same weights; some answers are as long as they may be."""

    async def answers(pauses: bool) -> tuple[list[Any], int]:
        server = _server(model_path, response_length=56)
        client = _client(server)

        async def one(index: int) -> Any:
            current_session.set(client.begin("g0", index))
            params = {"temperature": 1.0, "logprobs": True, "seed": index}
            return await client.generate(f"r{index}", prompt_ids=PROMPT, sampling_params=params)

        tasks = [asyncio.ensure_future(one(index)) for index in range(6)]  # two wait for a slot
        all_of_them = asyncio.gather(*tasks)
        while pauses and not all_of_them.done():
            await portion_made(server, over=all_of_them.done)
            assert await client.pause(within=60) == 0
            client.resume()
        return await all_of_them, max(len(session.answers[0].parts) for session in client.unfinished)

    whole, once = asyncio.run(asyncio.wait_for(answers(pauses=False), 60))
    monkeypatch.setattr("goldilocks.engine.verl_server.server.Engine", Portioned)
    paused, parts = asyncio.run(asyncio.wait_for(answers(pauses=True), 60))
    assert once == 1 < parts
    for one, other in zip(whole, paused, strict=True):
        assert one.token_ids == other.token_ids
        assert other.stop_reason == "completed"
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=0)
        assert len(other.extra_fields["top_log_probs"]) == len(other.token_ids)


@pytest.mark.usefixtures("portioned")
async def test_tokens_written_before_and_after_an_update_say_so(model_path: Path) -> None:
    server = _server(model_path, response_length=56, ignore_eos=True)
    client = _client(server)
    session = client.begin("g0", 0)

    async def answer() -> Any:
        current_session.set(session)
        return await client.generate("r", prompt_ids=PROMPT, sampling_params={"logprobs": True, "seed": 1})

    await server.set_global_steps(4)
    task = asyncio.ensure_future(answer())
    await portion_made(server)
    await client.pause(within=60)
    before = session.tokens
    await server.set_global_steps(5)
    server._loop._engine.portion = 56
    client.resume()
    assert len((await task).token_ids) == 56
    assert 0 < before < 56
    assert session.versions == [[4, before], [5, 56 - before]]


@pytest.mark.parametrize("frees", [True, False])
def test_a_server_that_keeps_its_cache_is_not_asked_to_sleep(frees: bool) -> None:
    asked: list[bool] = []

    async def sleep() -> None:
        asked.append(frees)

    replica = TransformersReplica.__new__(TransformersReplica)
    replica.config = RolloutConfig(name="transformers", free_cache_engine=frees)
    replica.servers = [SimpleNamespace(sleep=SimpleNamespace(remote=sleep))]
    asyncio.run(replica.sleep())
    assert asked == [True] * frees
