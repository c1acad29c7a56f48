"""`transformers serve` in its own process answers the unmodified OpenAI client as generate() writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from documented import command, python_block, server
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = ("What does a read see?", "Who closes a block?", "What is lost?")
TOKENS = 32


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Answer."}, {"role": "user", "content": question}]


def greedy(folder: Path, messages: list[dict[str, str]]) -> str:
    """What the model writes in this process."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["run", "exported"])
def test_chat_completions_are_greedy_generation(workplace, folder, capsys):
    from openai import OpenAI

    expected = {question: greedy(workplace / "run", asked(question)) for question in QUESTIONS}
    assert len(set(expected.values())) == len(QUESTIONS)
    with server(command("transformers serve", folder), workplace) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120, max_retries=0)

        def answer(question: str) -> str:
            settings = {"model": folder, "max_tokens": TOKENS, "temperature": 0}
            whole = client.chat.completions.create(messages=asked(question), **settings)
            assert whole.choices[0].finish_reason == "length"
            assert whole.usage.completion_tokens == TOKENS
            chunks = client.chat.completions.create(messages=asked(question), stream=True, **settings)
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
            assert len([piece for piece in pieces if piece]) > TOKENS // 2  # as they come, not all at the end
            assert "".join(pieces) == whole.choices[0].message.content
            return whole.choices[0].message.content

        assert {question: answer(question) for question in QUESTIONS} == expected
        with ThreadPoolExecutor(len(QUESTIONS)) as clients:
            assert list(clients.map(answer, QUESTIONS)) == list(expected.values())
        if folder == "run":
            page = python_block("OpenAI").replace("http://127.0.0.1:8000", address)
            capsys.readouterr()
            exec(compile(page, "docs/serving.md", "exec"), {})
            printed = capsys.readouterr().out
            whole = printed[: len(printed) // 2]
            assert whole and printed == f"{whole}\n{whole}"  # the second time streamed
