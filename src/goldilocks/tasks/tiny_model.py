"""A tiny Qwen2-style model and its tokenizer, made from scratch, to train without a download, and lessons before RL.

The tokenizer has a token per character and a chat template of two tokens. It is a byte-level BPE without merges, since
transformers loads the tokenizer of a Qwen2 model as a byte-level BPE.

The lessons are supervised training that leaves a model imperfect, so that RL has something to teach. A tiny model
learns the easy sums and forgets most carries. A larger one learns the form of an answer, and some of the lowest levels.
Invariant: no lesson is a validation problem. What RL teaches afterwards carries over to unseen problems, since one
mistake, the forgotten carry, causes most wrong sums of two digits and one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import Progress

from goldilocks.tasks import arithmetic, calculator, ladder
from goldilocks.tasks.registry import ASSISTANT, END, PAD, UNKNOWN, USER, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM


ARITHMETIC = "0123456789+-*= \n"  # verl wants the newline of a Qwen model to be one token

_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}" + END + "{% else %}"
    "" + USER + "{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)

ANSWER_TOKENS = 16

MOMENTUM, WEIGHT_DECAY = 0.95, 0.01
# Coefficients of the quintic that drives singular values towards one, from the paper's reference code.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
STEPS, PUPIL_STEPS = 600, 300
BATCH = 64
LR, MATRIX_LR, PUPIL_LR = 6e-3, 1e-2, 1e-4
WARM_UP = 30

Lesson = tuple[list[int], list[int]]
Encode = Callable[[str, str], Lesson]
Lessons = Callable[[random.Random], Iterator[Problem]]

# task: its tokenizer, and the lessons of its warm start
TASKS: Mapping[str, tuple[Callable[[], PreTrainedTokenizerFast], Lessons]] = {
    "arithmetic": (lambda: character_tokenizer(), arithmetic.lessons),
    "ladder": (lambda: character_tokenizer(ladder.CHARACTERS), partial(ladder.lessons, fall=ladder.FALL_TINY)),
    "calculator": (lambda: calling_tokenizer(), calculator.lessons),
}


def character_tokenizer(characters: Iterable[str] = ARITHMETIC) -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer over these characters; anything else becomes the unknown token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, END, USER, ASSISTANT, UNKNOWN]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = [by_bytes.pre_tokenize_str(character)[0][0] for character in characters]
    vocabulary = {token: index for index, token in enumerate([*special, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.pre_tokenizer = by_bytes
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def calling_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer for arithmetic with the two tokens of a call, and a template that has messages of tools."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([calculator.CALL, calculator.CLOSE])
    tokenizer.add_tokens([calculator.TOOL], special_tokens=True)
    said = "{% if message['role'] == 'tool' %}" + calculator.TOOL + "{{ message['content'] }}\n{% elif"
    tokenizer.chat_template = _TEMPLATE.replace("{% if", said, 1)
    return tokenizer


def make(
    out: Path, seed: int = 0, steps: int = STEPS, task: str = "arithmetic"
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Build the model, warm-start it under a progress bar, and save both to ``out`` as transformers does."""
    make_tokenizer, taught = TASKS[task]
    tokenizer = make_tokenizer()
    model = build(tokenizer, seed)
    with _few_threads(), Progress(transient=True) as bar:
        line = bar.add_task("warming up the tiny model", total=steps)
        once = functools.cache(partial(encode, tokenizer))  # most lessons come more than once
        warm_start(model, once, seed, steps, lambda done: bar.update(line, completed=done), taught)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return model, tokenizer


def build(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Return the untrained model of 85 thousand parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        # Heads of 32: the smallest that every engine's attention has.
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        # The usual 0.02 is for a width of thousands: here hundreds of steps would pass before the loss falls.
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


@torch.no_grad()
def pass_rates(model: Any, tokenizer: Any, problems: list[Problem], samples: int) -> list[float]:
    """Return how often each problem is answered right, by sampling at temperature 1."""
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.random.fork_rng(devices=[]), _few_threads():
        torch.manual_seed(0)
        sampling = {"do_sample": True, "top_k": 0, "num_return_sequences": samples}
        out = model.generate(**inputs, **sampling, max_new_tokens=ANSWER_TOKENS)
    answers = out[:, inputs.input_ids.shape[1] :].view(len(problems), samples, -1)
    return [
        sum(_finished(row, tokenizer) == problem.answer for row in rows) / samples
        for problem, rows in zip(problems, answers, strict=True)
    ]


def _finished(tokens: torch.Tensor, tokenizer: Any) -> str | None:
    ids = tokens.tolist()
    return tokenizer.decode(ids[: ids.index(tokenizer.eos_token_id)]) if tokenizer.eos_token_id in ids else None


@contextlib.contextmanager
def _few_threads() -> Iterator[None]:
    """Use two threads at most: with tensors this small, more threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def batches(encode: Encode, endless: Iterator[Problem], rng: random.Random) -> Iterator[list[Lesson]]:
    """Yield batches of lessons of similar length, to save padding."""
    while True:
        pool = [encode(problem.question, problem.answer) for problem in itertools.islice(endless, BATCH * 16)]
        pool.sort(key=lambda lesson: len(lesson[0]) + len(lesson[1]))
        chunks = [pool[start : start + BATCH] for start in range(0, len(pool), BATCH)]
        rng.shuffle(chunks)
        yield from chunks


def warm_start(
    model: torch.nn.Module,
    encode: Encode,
    seed: int,
    steps: int = STEPS,
    told: Callable[[int], None] = lambda step: None,
    taught: Lessons = arithmetic.lessons,
    optimizers: Sequence[tuple[torch.optim.Optimizer, float]] | None = None,
) -> float:
    """Train the model in place on the lessons ``taught``; return the mean loss of the last fifty steps.

    ``optimizers`` have their learning rate beside them; without any they are those of a tiny model.
    """
    optimizers = optimizers or _of_a_tiny_model(model)
    rng = random.Random(seed)
    source = batches(encode, taught(rng), rng)
    recent: list[float] = []
    model.train()
    for step in range(steps):
        loss = _loss(model, next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, lr in optimizers:
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()
        recent = [*recent[-49:], loss.item()]
        told(step + 1)
    model.eval()
    return sum(recent) / len(recent)


def _of_a_tiny_model(model: torch.nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return Muon for the hidden matrices and AdamW for the rest, each with its learning rate."""
    named = list(model.named_parameters())
    hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    others = [p for _, p in named if all(p is not matrix for matrix in hidden)]
    return [
        (Muon(hidden, MATRIX_LR), MATRIX_LR),
        (torch.optim.AdamW(others, LR, betas=(0.9, 0.99), weight_decay=0.05), LR),
    ]


def _loss(model: torch.nn.Module, lessons: list[Lesson]) -> torch.Tensor:
    width = max(len(prompt) + len(answer) for prompt, answer in lessons)
    ids = torch.zeros(len(lessons), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(lessons):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    device = next(model.parameters()).device
    ids, labels = ids.to(device), labels.to(device)
    # Padding is on the right, where causal attention never looks: no mask is needed.
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def teach(model: Path, out: Path, taught: Lessons, steps: int = PUPIL_STEPS) -> None:
    """Train a copy of ``model`` on the lessons, on the GPU where there is one, and save it to ``out``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    pupil = auto.from_pretrained(model, dtype="auto")
    kept = pupil.dtype
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pupil = pupil.to(device, torch.float32)
    optimizers = [(torch.optim.AdamW(pupil.parameters(), PUPIL_LR, betas=(0.9, 0.99), weight_decay=0.0), PUPIL_LR)]
    with Progress(transient=True) as bar, mixed_precision(device.type, enabled=device.type == "cuda"):
        line = bar.add_task(f"teaching {model.name} its first lessons", total=steps)
        encoded = partial(encode, tokenizer)
        warm_start(pupil, encoded, 0, steps, lambda done: bar.update(line, completed=done), taught, optimizers)
    pupil.to(kept).save_pretrained(out)
    tokenizer.save_pretrained(out)


def mixed_precision(device: str, *, enabled: bool) -> torch.autocast:
    """Return a context for many steps of training in bfloat16.

    autocast keeps a bfloat16 copy of each weight until its context ends, so that within one context an update would
    never reach the next forward pass: the copies are switched off.
    """
    return torch.autocast(device, torch.bfloat16, enabled=enabled, cache_enabled=False)


def encode(tokenizer: Any, question: str, answer: str) -> Lesson:
    """Return the tokens of the prompt, by the chat template, and those of the answer with its end token."""
    messages = [{"role": "user", "content": question}]
    prompt: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return prompt, [*tokenizer.encode(answer), tokenizer.eos_token_id]


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are orthogonal matrices (Jordan et al. 2024), for a model's hidden matrices.

    Steps have the size of Adam's, so that one learning rate fits both. torch's own Muon computes in bfloat16, which is
    slow on a CPU without bfloat16 units; this one keeps the type of the parameters.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step along the orthogonalised Nesterov momentum."""
        for group in self.param_groups:
            for matrices in _alike(group["params"]):
                # Matrices of one shape are stacked: the number of operations costs more than their size.
                updates = orthogonal(torch.stack([self._momentum(matrix) for matrix in matrices]))
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * WEIGHT_DECAY)
                    matrix.add_(update, alpha=-0.2 * group["lr"] * max(matrix.shape) ** 0.5)
        return None

    def _momentum(self, matrix: torch.Tensor) -> torch.Tensor:
        assert matrix.grad is not None
        state = self.state[matrix]
        momentum = state.setdefault("momentum", torch.zeros_like(matrix))
        momentum.lerp_(matrix.grad, 1 - MOMENTUM)
        return matrix.grad.lerp(momentum, MOMENTUM)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return the matrices with their singular values moved close to one, by Newton–Schulz iteration."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if tall else x


def _alike(matrices: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    return by_shape.values()
