"""The real default model, end to end. Fetched into the cache when it is not there yet."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import medusa_cli
from medusa_cli.config import Limits, SamplingConfig
from medusa_cli.models.loader import LoadOptions
from medusa_cli.session import Medusa

SKY = "Explain why the sky is blue in three sentences."


@pytest.fixture(scope="module")
def model() -> Iterator[Medusa]:
    """The default model with its heads; two threads, as a laptop would at least use."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield medusa_cli.load()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sky_ids(model: Medusa) -> list[int]:
    """What transformers' own greedy generate answers."""
    prompt = torch.tensor([model.encode(SKY)])
    stock = medusa_cli.load(plain=True, options=LoadOptions(stock=True)).base.module
    with torch.inference_mode():
        output = stock.generate(prompt, max_new_tokens=256, do_sample=False)
    return output[0, prompt.shape[1] :].tolist()


def test_the_answer_is_the_published_one(model: Medusa, sky_ids: list[int]) -> None:
    text = model.tokenizer.decode(sky_ids, skip_special_tokens=True)
    assert len(sky_ids) == 90
    assert text.startswith("The sky is blue in three sentences because of a process called")
    assert text.endswith("which is scattered in all directions.")


@pytest.mark.parametrize("tree", [None, "mc_sim_7b_63"])
def test_the_command_line_gives_the_same_text(
    model: Medusa, sky_ids: list[int], tree: str | None
) -> None:
    command = [sys.executable, "-m", "medusa_cli", "generate", "-p", SKY, "--format", "json"]
    command += [] if tree is None else ["--tree", tree]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    report = json.loads(done.stdout)
    assert report["token_ids"] == sky_ids
    assert report["text"] == model.tokenizer.decode(sky_ids, skip_special_tokens=True)
    assert report["tree"]["name"] == (tree or "auto")
    # What the adaptive tree finds worth its time differs from machine to machine.
    assert report["accept"]["mean"] > (1.4 if tree else 1.0)
    assert report["finish_reason"] == "eos"


def test_plain_decoding_gives_the_same_ids(sky_ids: list[int]) -> None:
    assert list(medusa_cli.load(plain=True).generate(SKY).token_ids) == sky_ids


def test_seeded_samples_do_not_depend_on_the_tree(model: Medusa) -> None:
    sampling = SamplingConfig(temperature=0.8, top_p=0.9, seed=3)
    limits = Limits(max_new_tokens=24)
    plain = medusa_cli.load(plain=True)
    expected = plain.generate("Tell me a story.", sampling=sampling, limits=limits)
    result = model.generate("Tell me a story.", sampling=sampling, limits=limits)
    assert result.token_ids == expected.token_ids
    assert result.text == expected.text
