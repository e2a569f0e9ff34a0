from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.engine.models import CONFIGS, VOCABULARY, drain, fresh, logits_after, reference

from goldilocks.engine import Engine, Generation, SamplingParams
from goldilocks.engine.engine import overwrite

EOS = 5


def make(name: str = "llama", slots: int = 3, max_length: int = 40, eos_ids: tuple[int, ...] = (EOS,)) -> Engine:
    return Engine(fresh(name), slots=slots, max_length=max_length, eos_ids=eos_ids, pad_id=0, device="cpu")


def random_prompts(count: int, longest: int = 10) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def generate(engine: Engine, prompt: list[int], **params: object) -> Generation:
    engine.submit("one", prompt, SamplingParams(**{"max_tokens": 12, **params}))
    return drain(engine)["one"]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_answers_are_those_of_generate(name: str) -> None:
    engine = make(name, eos_ids=())
    prompts = random_prompts(5)
    for i, prompt in enumerate(prompts):
        engine.submit(str(i), prompt, SamplingParams(max_tokens=6 + i, temperature=0))
    done = drain(engine)
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = reference(name).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6 + i, pad_token_id=0
        )
        assert done[str(i)].token_ids == expected[0, len(prompt) :].tolist()
        assert done[str(i)].stop_reason == "length"


def test_log_probs_after_a_cut_are_those_of_the_cut_distribution() -> None:
    prompt = [3, 1, 4]
    generation = generate(make(), prompt, top_k=4, temperature=0.8, ignore_eos=True, seed=0)
    logits = logits_after("llama", prompt, generation.token_ids) / 0.8
    expected = logits.masked_fill(logits < logits.topk(4).values[:, -1:], -torch.inf).log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
    assert (chosen - torch.tensor(generation.log_probs)).abs().max() < 1e-5


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_generated() -> None:
    prompt, params = [7, 8, 9], SamplingParams(max_tokens=15, seed=11)
    alone = generate(make(), prompt, max_tokens=15, seed=11)
    crowd = make(slots=4)
    for i, other in enumerate(random_prompts(9)):
        crowd.submit(f"other {i}", other, SamplingParams(max_tokens=5 + i))
    crowd.submit("one", prompt, params)
    together = drain(crowd)["one"]
    assert together.token_ids == alone.token_ids
    assert together.log_probs == pytest.approx(alone.log_probs, abs=1e-5)


def test_other_seeds_and_no_seed_give_other_tokens() -> None:
    engine = make(slots=8, eos_ids=())
    for i in range(4):
        engine.submit(f"seed {i}", [1, 2], SamplingParams(max_tokens=20, seed=i))
        engine.submit(f"none {i}", [1, 2], SamplingParams(max_tokens=20))
    assert len({tuple(generation.token_ids) for generation in drain(engine).values()}) == 8


def test_an_answer_ends_with_the_first_stop_token() -> None:
    free = generate(make(eos_ids=()), [1, 2, 3], temperature=0, max_tokens=12)
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    never, nor = sorted(set(range(VOCABULARY)) - set(free.token_ids))[:2]
    for engine, params in (
        (make(eos_ids=(stop,)), {}),
        (make(eos_ids=()), {"stop_ids": (never, stop, nor)}),
        (make(eos_ids=(never, stop)), {}),
    ):
        stopped = generate(engine, [1, 2, 3], temperature=0, **params)
        assert stopped.token_ids == free.token_ids[: first + 1]
        assert stopped.stop_reason == "stop"
    ignoring = generate(make(eos_ids=(stop,)), [1, 2, 3], temperature=0, ignore_eos=True)
    assert (ignoring.token_ids, ignoring.stop_reason) == (free.token_ids, "length")


def test_a_prompt_asked_for_many_times_is_prefilled_once() -> None:
    engine = make(slots=2)
    prefilled: list[tuple[int, ...]] = []
    prefill = engine._decoder.prefill

    def spy(rows: list[int], prompts: list[tuple[int, ...]]) -> None:
        prefilled.extend(prompts)
        prefill(rows, prompts)

    engine._decoder.prefill = spy  # type: ignore[method-assign]
    for i in range(6):
        engine.submit(str(i), [9, 8, 7], SamplingParams(max_tokens=3 + i, temperature=0, ignore_eos=True))
    done = drain(engine)
    assert prefilled == [(9, 8)]
    assert all(done[str(i)].token_ids == done["5"].token_ids[: 3 + i] for i in range(6))


def test_new_weights_are_used_at_once_and_old_prompts_are_not() -> None:
    engine, prompt = make(), [4, 4, 2]
    before = generate(engine, prompt, temperature=0)
    other = make("llama")._model
    torch.manual_seed(1)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    addresses = [parameter.data_ptr() for parameter in engine._model.parameters()]
    engine.load_weights(other.state_dict().items())
    assert [parameter.data_ptr() for parameter in engine._model.parameters()] == addresses
    after = generate(engine, prompt, temperature=0)
    expected = Engine(other, slots=3, max_length=40, eos_ids=(EOS,), pad_id=0, device="cpu")
    assert after.token_ids == generate(expected, prompt, temperature=0).token_ids != before.token_ids


def test_weights_that_do_not_arrive_are_named_once_the_last_have_come() -> None:
    engine, new = make("qwen2"), dict(reference("qwen2").state_dict())
    late, never = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
    del new["lm_head.weight"]  # tied: it comes as the embedding
    parts = [(late, new.pop(late))]
    engine.load_weights(new.items(), last=False)
    engine.load_weights(parts)
    whole = new.pop(never)
    engine.load_weights(new.items(), last=False)
    with pytest.raises(ValueError, match=rf"weight '{never}' and 0 more of Qwen2ForCausalLM did not arrive"):
        engine.load_weights(parts)
    with pytest.raises(ValueError, match=r"weight 'model\.embed_tokens\.weight' and \d+ more"):
        engine.load_weights([(never, whole)])  # what came for the policy before does not count
    engine.load_weights(new.items(), last=False)
    with pytest.raises(ValueError, match="nowhere"):
        engine.load_weights([("nowhere", whole)], last=False)
    with pytest.raises(ValueError, match=r"weight 'model\.embed_tokens\.weight' and \d+ more"):
        engine.load_weights([(never, whole), *parts])  # nor what came for one that failed


def test_a_row_from_before_new_weights_that_moves_takes_its_place_from_the_prompt_there() -> None:
    engine, prompt = make(slots=2, max_length=60, eos_ids=()), [5, 9, 13, 2, 40, 33]
    alone = generate(make(slots=2, max_length=60, eos_ids=()), prompt, seed=4)
    engine.submit("short", [1, 2, 3], SamplingParams(max_tokens=3))
    engine.submit("long", [50, 51, 52, 53, 54, 55, 56], SamplingParams(max_tokens=50))
    engine.step()
    engine.load_weights(reference("llama").state_dict().items())  # the same weights: every answer stays as it is
    while not engine.free:
        engine.step()
    engine.submit("first", prompt, SamplingParams(max_tokens=2))
    while not engine.free:
        engine.step()
    engine.step()  # the long answer moves to where the prompt was read
    engine.submit("again", prompt, SamplingParams(max_tokens=12, seed=4))
    assert drain(engine)["again"].token_ids == alone.token_ids


def test_sleep_gives_the_cache_back_and_wake_takes_it_again_and_with_live_requests_it_is_refused() -> None:
    engine, prompt = make(), [4, 4, 2]
    before = generate(engine, prompt, temperature=0)
    engine.sleep()
    engine.submit("one", prompt, SamplingParams(max_tokens=12, temperature=0))
    with pytest.raises(RuntimeError, match="asleep"):
        engine.step()
    engine.wake()
    engine.step()
    with pytest.raises(RuntimeError, match="1 live"):
        engine.sleep()
    assert drain(engine)["one"] == before


def test_aborted_requests_come_back_with_what_they_have() -> None:
    engine = make(slots=1)
    whole = generate(engine, [1, 2], temperature=0, ignore_eos=True)
    for name in ("live", "waiting"):
        engine.submit(name, [1, 2], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert [engine.step() for _ in range(4)] == [[]] * 4
    engine.abort("waiting")
    engine.abort("live")
    engine.abort("never heard of")
    assert engine.busy
    waiting, live = sorted(engine.step(), key=lambda generation: len(generation.token_ids))
    assert waiting == Generation("waiting", [], [], [], "aborted")
    assert (live.token_ids, live.stop_reason) == (whole.token_ids[:4], "aborted")
    assert (engine.busy, engine.free) == (False, 1)


def test_free_counts_slots_nobody_waits_for() -> None:
    engine = make(slots=3)
    for i in range(2):
        engine.submit(str(i), [1], SamplingParams(max_tokens=30, ignore_eos=True))
    assert (engine.free, engine.busy) == (1, True)
    engine.step()
    assert engine.free == 1
    for i in range(2, 5):
        engine.submit(str(i), [1], SamplingParams(max_tokens=30, ignore_eos=True))
    assert engine.free == 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt_ids=.* one token"),
        ([1] * 30, {"max_tokens": 11}, r"prompt tokens \+ max_tokens=41 .* max_length=40 or less"),
        ([1, VOCABULARY], {}, r"prompt_ids=\(1, 61\) .* 0 to 60"),
        ([-1], {}, r"prompt_ids=\(-1, -1\)"),
    ],
)
def test_a_request_that_cannot_run_is_refused(prompt: list[int], params: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().submit("x", prompt, SamplingParams(**{"max_tokens": 4, **params}))


def test_an_id_in_use_is_refused_until_it_has_come_back() -> None:
    engine = make()
    engine.submit("x", [1], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="request_id='x' is not accepted"):
        engine.submit("x", [1], SamplingParams(max_tokens=2))
    drain(engine)
    engine.submit("x", [1], SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    "params",
    [{"max_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}],
)
def test_parameters_out_of_range_are_named(params: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(params))):
        SamplingParams(**{"max_tokens": 4, **params})


def test_an_engine_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="max_position_embeddings=64"):
        make(max_length=65)
    with pytest.raises(ValueError, match="slots=0"):
        make(slots=0)
    with pytest.raises(ValueError, match=rf"no memory .* slots={2**36} × max_length=40"):
        make(slots=2**36)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 4), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("abort_all"), st.just(0), st.just(0)),
        st.tuples(st.just("load"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=settings.default.max_examples // 2)
@given(events=EVENTS, slots=st.integers(1, 5))
def test_every_request_comes_back_once_and_alike_whatever_happens_around_it(
    events: list[tuple[str, int, int]], slots: int
) -> None:
    prompts = random_prompts(5)
    engine = _shared(slots)
    submitted: dict[str, tuple[int, int]] = {}
    done: list[Generation] = []
    for kind, number, tokens in events:
        if kind == "submit":
            name = str(len(submitted))
            submitted[name] = (number, tokens)
            engine.submit(name, prompts[number], SamplingParams(max_tokens=tokens, temperature=0))
        elif kind == "abort":
            engine.abort(str(number))
        elif kind == "abort_all":
            engine.abort_all()
        elif kind == "load":
            engine.load_weights(reference("llama").state_dict().items())  # the same ones: no answer changes
        else:
            for _ in range(number):
                done += engine.step()
    done += drain(engine).values()
    assert sorted(generation.request_id for generation in done) == sorted(submitted)
    assert engine.free == slots
    for generation in done:
        number, tokens = submitted[generation.request_id]
        expected = _greedy(number)
        if generation.stop_reason == "aborted":
            assert generation.token_ids == expected[: len(generation.token_ids)]
        else:
            assert generation.token_ids == expected[:tokens]


@functools.cache
def _shared(slots: int) -> Engine:
    """One engine for all examples: what an earlier one left behind must not matter either."""
    return make(slots=slots)


@functools.cache
def _greedy(number: int) -> list[int]:
    return generate(make(slots=1), random_prompts(5)[number], temperature=0).token_ids


@settings(max_examples=settings.default.max_examples // 4)
@given(st.lists(st.integers(1, 6), max_size=4), st.integers(0, 2**32))
def test_an_answer_that_is_stopped_and_gone_on_with_is_what_it_would_have_been(stops: list[int], seed: int) -> None:
    """Noise is a function of seed and position in the whole text: a prefix behind the prompt changes no position."""
    prompt, params = [3, 9, 4], {"temperature": 1.0, "seed": seed}
    whole = generate(_shared(1), prompt, max_tokens=20, **params)
    engine, written, log_probs, reason = _shared(3), [], [], "aborted"
    for steps in (*stops, 10**6):
        if reason != "aborted":
            break
        engine.submit("one", [*prompt, *written], SamplingParams(max_tokens=20 - len(written), **params))
        for _ in range(steps):
            if done := engine.step():
                break
        if not done:
            engine.abort_all()
            done = engine.step()
        written, log_probs = written + done[0].token_ids, log_probs + done[0].log_probs
        reason = done[0].stop_reason
    assert (written, reason) == (whole.token_ids, whole.stop_reason)
    np.testing.assert_allclose(log_probs, whole.log_probs, atol=1e-5)


# -- new weights -------------------------------------------------------------------------------------------------------


def test_a_name_the_model_lacks_and_another_shape_are_errors() -> None:
    with pytest.raises(ValueError, match=r"'model\.nothing' is not in LlamaForCausalLM"):
        overwrite(fresh("llama"), {"model.nothing": torch.zeros(1)}.items())
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has shape \(3,\); the model's is \(32,\)"):
        overwrite(fresh("llama"), {"model.norm.weight": torch.zeros(3)}.items())


def test_another_type_is_converted() -> None:
    model = fresh("llama")
    overwrite(model, {"model.norm.weight": torch.full((32,), 0.5, dtype=torch.bfloat16)}.items())
    assert model.model.norm.weight.dtype == torch.float32
    assert model.model.norm.weight.tolist() == [0.5] * 32


@pytest.mark.parametrize("names", [["lm_head.weight"], ["model.embed_tokens.weight"]])
def test_tied_weights_may_come_under_either_name(names: list[str]) -> None:
    model = fresh("qwen2")
    new = torch.randn_like(model.lm_head.weight)
    overwrite(model, dict.fromkeys(names, new).items())
    assert torch.equal(model.lm_head.weight, new)
    assert torch.equal(model.model.embed_tokens.weight, new)


def test_tied_weights_that_differ_are_an_error() -> None:
    model = fresh("qwen2")
    new = torch.randn_like(model.lm_head.weight)
    overwrite(model, {"lm_head.weight": new, "model.embed_tokens.weight": new.clone()}.items())
    assert torch.equal(model.lm_head.weight, new)
    with pytest.raises(ValueError, match="are tied"):
        overwrite(model, {"lm_head.weight": new, "model.embed_tokens.weight": new + 1}.items())


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_an_error_that_says_why(name: str) -> None:
    model = fresh("qwen2")
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    weights[name].view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match=rf"'{name}' and \d+ more are not finite: the training has diverged"):
        overwrite(model, weights.items())
