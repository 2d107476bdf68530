"""utils/vllm.py against a stand-in for a vLLM server, and against what vLLM has replied: tests/fixtures/vllm.json,
which has version and date."""

import json
from pathlib import Path

import pytest
import torch

from algos import grpo
from tests.engine_server import StandIn, make_model, serving
from tests.helpers import command_line, metrics, new_run, runs_in
from utils.core import UserError
from utils.dist import pad_left
from utils.lm import completion_logps, load_model, sample, save_model
from utils.vllm import sample_by_server

EXCHANGES = json.loads((Path(__file__).parent / "fixtures" / "vllm.json").read_text())["exchanges"]
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [3, 4, 5]]


def arguments(server, folder, **more) -> grpo.Args:
    return grpo.Args(sampler=server.url, output_dir=str(folder), precision="float32", **more)


class Replay(StandIn):
    """Says what the real server said to the same prompt at the same temperature."""

    def answer(self, path: str, body: dict | None) -> tuple[int, dict]:
        for exchange in EXCHANGES:
            theirs, same = exchange["body"] or {}, path == exchange["path"]
            if same and all(theirs.get(key) == (body or {}).get(key) for key in ("prompt", "temperature")):
                return exchange["status"], exchange["reply"]
        return 404, {"nobody": "asked vLLM that"}


def test_what_vllm_has_said_is_read_and_is_what_the_model_says(tmp_path):
    """Its log-probabilities of the tokens that it drew are our scorer's, at temperature 0.7."""
    model, prompts = make_model(), [[3, 4, 5], [6, 7]]
    with serving(Replay(model)) as server:
        args = arguments(server, tmp_path)
        samples = sample_by_server(model, prompts, 4, 6, [1, 8], 0.7, args, save_model, "record")
        greedy = sample_by_server(model, prompts, 1, 12, [1, 8], 0.0, args, save_model, "record")
    with torch.no_grad():
        logps, _ = completion_logps(model, *samples[:4], 0.7)
    assert (logps - samples.logps).abs().max() < 1e-4 and not samples.logps[~samples.completion_mask].any()
    assert 0 < samples.ended.sum() < len(samples.ended)  # both kinds are among them
    last = samples.completion_ids.gather(1, samples.completion_mask.sum(1, keepdim=True) - 1)[:, 0]
    assert (((last == 1) | (last == 8)) == samples.ended).all()
    own = sample(model, *pad_left(prompts, "cpu"), 1, 12, [1, 8], 0.0)
    assert torch.equal(own.completion_ids, greedy.completion_ids)


def test_samples_are_those_of_the_model_as_it_is_now(tmp_path):
    """New weights are sent when they have changed, and only then; equal prompts are answered differently."""
    model = make_model()
    with serving(StandIn(model)) as server:
        for change in (0.0, 0.0, 0.3):
            with torch.no_grad():
                for p in model.parameters() if change else ():
                    p.add_(change * p.abs().mean() * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
                args = arguments(server, tmp_path)
                samples = sample_by_server(model, PROMPTS, 8, 10, [1], 0.7, args, save_model, change)
                logps, _ = completion_logps(model, *samples[:4], 0.7)
            torch.testing.assert_close(samples.logps, logps * samples.completion_mask, rtol=0, atol=1e-4)
        sent = [path for path, _ in server.asked if path == "/collective_rpc"]
    assert len(sent) == 2 and not list(tmp_path.iterdir())
    assert not torch.equal(samples.completion_ids[:8], samples.completion_ids[24:])
    assert torch.equal(samples.prompt_ids[0], samples.prompt_ids[3])


def test_the_order_is_that_of_the_index_and_only_our_eos_ends(tmp_path):
    """Whatever comes first; and where the server has another EOS than the run."""
    model = make_model()
    with serving(StandIn(model)) as server:
        args, real = arguments(server, tmp_path), server.answer
        taken = [sample_by_server(model, PROMPTS, 8, 10, [1], 0.7, args, save_model).completion_ids]
        server.answer = lambda path, body: (
            200,
            {k: v[::-1] if k == "choices" else v for k, v in real(path, body)[1].items()},
        )
        taken.append(sample_by_server(model, PROMPTS, 8, 10, [1], 0.7, args, save_model).completion_ids)
    assert torch.equal(*taken) and len(taken[0].unique(dim=0)) > 8
    asked = [body for path, body in server.asked if path == "/v1/completions"]
    assert len(asked) == 8 and all(body["ignore_eos"] and body["stop_token_ids"] == [1] for body in asked)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "localhost:8000", "ftp://127.0.0.1"])
def test_a_server_that_is_not_there_is_one_sentence(url, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        command_line(grpo, "--task", "sort", "--sampler", url, "--output-dir", tmp_path, "--device", "cpu")
    said = capsys.readouterr().err
    assert error.value.code == 2 and f"--sampler {url} does not answer" in said and "Traceback" not in said


def test_a_refusal_is_one_sentence(tmp_path):
    model = make_model()
    with serving(StandIn(model)) as server, pytest.raises(UserError, match="/collective_rpc .*404.*there is no"):
        server.answer = lambda path, body: (404, {"error": f"there is no {path}"})
        sample_by_server(model, PROMPTS, 1, 4, [1], 1.0, arguments(server, tmp_path), save_model)


SMALL = ("--task", "sort", "--num-prompts", 4, "--num-generations", 4, "--max-steps", 5, "--eval-prompts", 2,
         "--eval-every", 0, "--device", "cpu", "--learning-rate", 3e-3, "--precision", "float32",
         "--max-completion-length", 24)  # fmt: skip


@pytest.mark.parametrize("lora", [(), ("--lora-rank", 2)])
def test_a_run_samples_from_the_server(lora, tmp_path):
    with serving(StandIn(load_model(grpo.Args())[0])) as server:
        rows = metrics(new_run(grpo, tmp_path, *SMALL, *lora, "--sampler", server.url))
        sent = [path for path, _ in server.asked if path == "/collective_rpc"]
    assert len(rows) == 6 and len(sent) == 6 and max(row["sampler_gap"] for row in rows[1:]) < 1e-4


def test_a_server_that_keeps_its_weights_is_warned_of_and_stops_the_run(tmp_path, capsys):
    """Only when they are far from the model's: a ratio corrects the rest."""
    with serving(StandIn(load_model(grpo.Args())[0])) as server, pytest.raises(SystemExit) as error:
        server.loads = False
        command_line(grpo, *SMALL, "--max-steps", 40, "--sampler", server.url, "--output-dir", tmp_path)
    said, gaps = capsys.readouterr(), [row["sampler_gap"] for row in metrics(runs_in(tmp_path)[0])[1:]]
    assert error.value.code == 2 and "does not follow the model" in said.err and "old weights" in said.out
    assert gaps[0] < 1e-4 and min(gaps[-2:]) > 0.2 and len(gaps) < 39
