"""Five faults that a review found in the language scripts, as the command lines that showed them. Prompts that are too
long are in test_text.py (test_long_prompts_are_left_out_before_the_first_step)."""

import importlib

import pytest
from architectures import make
from helpers import SMALL, command_line, new_run, user_error, write_rows
from test_text import CHATML, THINKING, qwen, sentencepiece
from transformers import LlamaConfig, LlamaForCausalLM

from algos import grpo
from utils.lm import load_model

LONGROPE = dict(original_max_position_embeddings=11, rope_parameters=dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
    original_max_position_embeddings=11))  # fmt: skip


@pytest.mark.parametrize("algo", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("tokenizer, prompt, answers, expected", [
    (sentencepiece(), "Capital?", [" Paris", " Rome"], "Capital? Paris</s>"),  # every completion got one space more
    (qwen(CHATML), "2+2?", ["\nYes.", "No."], "assistant\n\nYes.<|im_end|>\n<|endoftext|>"),  # one row ended the run
    (qwen(THINKING), "2+2?", ["Yes.", "No."], "assistant\nYes.<|im_end|>\n<|endoftext|>"),  # all rows were refused
], ids=["SentencePiece", "a token across the seam", "a template that thinks"])  # fmt: skip
def test_what_is_trained_is_what_stands_in_the_file(algo, tokenizer, prompt, answers, expected, tmp_path, own_cache,
                                                    monkeypatch, capsys):  # fmt: skip
    """No space that nobody wrote, and no row lost."""
    module, seen = importlib.import_module(f"algos.{algo}"), []
    as_samples = module.as_samples
    monkeypatch.setattr(module, "as_samples", lambda rows, *more: seen.extend(rows) or as_samples(rows, *more))
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=1)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": prompt * (1 + i)} for i in range(20)]
    for row in rows:
        row |= {"sft": {"completion": answers[0]}, "dpo": dict(zip(("chosen", "rejected"), answers)),
                "kto": {"completion": answers[0], "label": len(row["prompt"]) % 3 == 0}}[algo]  # fmt: skip
    how = ["--model", tmp_path / "model", "--task", write_rows(tmp_path / "rows.jsonl", rows), "--batch-size", 19]
    new_run(module, tmp_path / "runs", *SMALL[algo], *how, "--max-steps", 1, "--max-length", 200)
    assert "cannot be used" not in capsys.readouterr().out
    texts = [tokenizer.decode([*ids, *completion]) for ids, completion, *_ in seen]
    assert len(texts) >= 19 and all(text.endswith(expected) for text in texts)


@pytest.mark.parametrize("name, more", [("PhiMoE", {}), ("Mixtral", dict(router_jitter_noise=0.1)), ("Jamba", {}),
                                        ("Phi 3", LONGROPE)])  # fmt: skip
def test_models_that_score_otherwise_than_they_sample_stop_at_once(name, more, tmp_path, capsys):
    """Experts that are drawn in training, or jitter; a cache of recurrence; longrope beyond its length."""
    make(name, vocab_size=22, **more).save_pretrained(tmp_path / "model")
    load_model(grpo.Args())[1].save_pretrained(tmp_path / "model")
    with user_error(capsys, "sampler_gap is", "tokens are not scored as they were sampled"):
        command_line(grpo, *SMALL["grpo"], "--model", tmp_path / "model", "--max-completion-length", 8,
                     "--output-dir", tmp_path / "runs")  # fmt: skip
