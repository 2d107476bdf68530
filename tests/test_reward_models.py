"""Whole runs of reward_model.py, the folders that they leave, and reward models as rewards of the online scripts."""

import json
import shutil
import sys
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import SMALL, command_line, metrics, new_run, runs_in, user_error, weights, write_rows
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from algos import reward_model, rloo
from utils.core import UserError
from utils.data import Task, load_pairs, load_task
from utils.lm import TINY_MODEL, load_model
from utils.rewards import RewardModel, encode_scored, make_scorer, sequence_scores

CHARACTERS = "0123456789+-*/=,:CS"
FLAGS = SMALL["reward_model"]  # two and a half epochs
LEARNS = "--device cpu --task sort --max-steps 20 --batch-size 16 --num-pairs 320 --learning-rate 5e-4 --eval-every 0"
SORT = load_task("sort")
TEXTS = ["0123", "1023", "9", "77777", "012", "3210"]
TEMPLATE = (
    "{% for m in messages %}{{ '=' if m['role'] == 'user' else '/' }}{{ m['content'] }}<eos>:{% endfor %}"
    "{% if add_generation_prompt %}/{% endif %}"
)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The folder of a run that nothing disturbed, never to be changed."""
    return new_run(reward_model, tmp_path_factory.mktemp("single"), *FLAGS, picture=True)


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory):
    """The same with three members."""
    return new_run(reward_model, tmp_path_factory.mktemp("ensemble"), *FLAGS, "--ensemble", 3, "--label-noise", 0.25)


def by_transformers(folder, texts: list[str], side: str = "right") -> torch.Tensor:
    """What anyone gets: from_pretrained, the tokenizer's own padding, the model's own forward pass."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer([text + tokenizer.eos_token for text in texts], padding=True, padding_side=side,
                    return_tensors="pt", return_token_type_ids=False)  # fmt: skip
    with torch.no_grad():
        return model(**ids).logits[:, 0]


def scored(specs, weights=(), task=SORT, texts=TEXTS, combine="sum"):
    """Rewards and columns."""
    rows = [task.heldout[i // 2] for i in range(len(texts))] if task.heldout else [{"prompt": "S1:"}] * len(texts)
    args = SimpleNamespace(reward=tuple(map(str, specs)), reward_weights=tuple(weights), combine=combine, max_steps=10,
                           trust_remote_code=False)  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    return make_scorer(task, args, tokenizer, "cpu")(rows, texts, [[4, 1]] * len(texts), 1)


# a run


def test_a_run_logs_the_columns_of_the_docstring(single):
    rows = metrics(single)
    step = {"accuracy", "margin", "chosen_score", "rejected_score", "grad_norm", "learning_rate"}
    pairs = {f"pair_{name}" for name in ("accuracy", "margin", "chosen_score", "rejected_score")}
    evaluated = {f"eval/{name}" for name in pairs | {"ece", "brier", "log_likelihood"}}
    assert [row["step"] for row in rows] == list(range(7))
    for row in rows:
        wanted = {"step"} | (step if row["step"] else set()) | (evaluated if row["step"] % 2 == 0 else set())
        assert row.keys() == wanted
    assert (single / "curve.png").stat().st_size > 10_000


def test_it_learns_and_learns_the_opposite_from_flipped_labels(tmp_path):
    """Held-out pairs keep their labels."""
    right = metrics(new_run(reward_model, tmp_path, *LEARNS.split()))
    wrong = metrics(new_run(reward_model, tmp_path, *LEARNS.split(), "--label-noise", 1))
    assert right[-1]["eval/pair_accuracy"] > 0.95 and right[-1]["eval/brier"] < 0.1
    assert wrong[-1]["eval/pair_accuracy"] < 0.1 and wrong[-1]["accuracy"] > 0.95


def test_members_differ_and_are_ordinary_folders(ensemble):
    assert not (ensemble / "model/config.json").exists()
    heads = [reward_model.load_member(seed, torch.device("cpu"), reward_model.Args())[0].score.weight
             for seed in (1, 1, 2)]  # fmt: skip
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].std().item() == pytest.approx(129**-0.5, rel=0.2)
    scores = [by_transformers(ensemble / f"model/member-{k}", ["S10:01", "S10:10"]) for k in (1, 2, 3)]
    assert len({round(s[0].item(), 4) for s in scores}) == 3
    assert metrics(ensemble)[-1]["eval/disagreement"] > 0 <= metrics(ensemble)[-1]["eval/ensemble_accuracy"]


def test_members_begin_apart_and_see_the_data_in_different_orders(tmp_path, monkeypatch):
    """Each has a head of its own before any data could make it differ, and sees every pair once an epoch."""
    heads, seen, update = [], [], reward_model.update

    def kept(model, optimizer, batch, args):
        heads.append(model.score.weight.detach().clone())
        seen.append([tuple(pair.chosen) for pair in batch])
        return update(model, optimizer, batch, args)

    monkeypatch.setattr(reward_model, "update", kept)
    new_run(reward_model, tmp_path, *FLAGS, "--ensemble", 3, "--batch-size", 10, "--max-steps", 2)
    assert not any(torch.equal(a, b) for a, b in combinations(heads[:3], 2))
    orders = [seen[k] + seen[3 + k] for k in range(3)]
    assert all(len(order) == 20 and sorted(order) == sorted(orders[0]) for order in orders)
    assert not any(a == b for a, b in combinations(orders, 2))


def test_lora(tmp_path):
    """Adapters and head are trained; what is saved has them merged, and scores as the run's model did at its end."""
    pytest.importorskip("peft", reason="not run: peft is not installed")
    seen, save = [], reward_model.save_members
    flags = [*FLAGS, "--lora-rank", 2, "--learning-rate", 1e-3, "--precision", "float32", "--gradient-checkpointing"]
    ids = [[5, 6, 7, 1], [5, 8, 1]]

    def kept(members, tokenizer, folder, args):
        with torch.no_grad():
            seen.append(sequence_scores(members[0].eval(), ids))
        save(members, tokenizer, folder, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward_model, "save_members", kept)
        folder = new_run(reward_model, tmp_path, *flags)
    model = RewardModel(str(folder / "model"), "cpu").model
    with torch.no_grad():
        torch.testing.assert_close(sequence_scores(model, ids), seen[0], rtol=0, atol=1e-5)
    before = reward_model.load_member(1, torch.device("cpu"), reward_model.Args())[0].state_dict()
    after = weights(folder)
    assert before.keys() >= after.keys()
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert "score.weight" in moved and any("q_proj" in name for name in moved)
    assert "model.embed_tokens.weight" not in moved


def test_bfloat16_does_not_round_scores():
    """The head is float32 under autocast: scores lie between the numbers that bfloat16 has."""
    args = reward_model.Args(precision="bfloat16")
    model, _ = reward_model.load_member(1, torch.device("cpu"), args)
    scores = reward_model.pair_scores(model, [reward_model.Pair([5, 6, 1], [7, 8, 9, 1])], args)
    assert scores.dtype == torch.float32 and not torch.equal(scores, scores.bfloat16().float())
    exact = reward_model.pair_scores(model, [reward_model.Pair([5, 6, 1], [7, 8, 9, 1])], reward_model.Args())
    torch.testing.assert_close(scores, exact, rtol=0, atol=0.05)


def test_a_reward_model_is_trained_further(single, tmp_path):
    """It keeps its head: the first evaluation is the last one of the run that made it."""
    folder = new_run(reward_model, tmp_path, *FLAGS, "--model", single / "model", "--seed", 2, "--max-steps", 2)
    assert metrics(folder)[0]["eval/pair_margin"] == pytest.approx(metrics(single)[-1]["eval/pair_margin"], abs=1e-5)


# the data


def test_the_margin_is_the_column_of_the_row():
    args, row = reward_model.Args(task="pairs.jsonl", use_margin=True, max_length=64), {"prompt": "S21:"}
    row, tokenizer = row | {"chosen": "12", "rejected": "21"}, AutoTokenizer.from_pretrained(TINY_MODEL)
    assert reward_model.encode_pair(row | {"margin": 3}, tokenizer, args).margin == 3.0
    assert reward_model.encode_pair(row | {"margin": 3}, tokenizer, reward_model.Args(max_length=64)).margin == 0.0
    for more in ({}, {"margin": "3"}, {"margin": float("nan")}):
        with pytest.raises(UserError, match="pairs.jsonl has the margin .*--use-margin"):
            reward_model.encode_pair(row | more, tokenizer, args)


def test_long_sequences_keep_their_last_token(tmp_path, capsys):
    """Pairs of which equal texts are left are dropped and counted."""
    rows = [dict(prompt=f"S{i}:", chosen=f"{i}", rejected="9" * (30 if i == 12 else 3)) for i in range(10, 40)]
    rows[3] |= dict(chosen="123456781", rejected="123456782")
    path, seen, score = write_rows(tmp_path / "pairs.jsonl", rows), [], reward_model.sequence_scores
    flags = ["--task", path, "--max-steps", 3, "--batch-size", 10, "--device", "cpu", "--eval-every", 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward_model, "sequence_scores", lambda model, ids: seen.extend(ids) or score(model, ids))
        new_run(reward_model, tmp_path / "runs", *flags, "--max-length", 12)
    out = capsys.readouterr().out
    assert "1 of 29 rows cannot be used and are dropped, the first because a row has answers that are equal" in out
    assert max(map(len, seen)) == 12 and all(ids[-1] == 1 and 1 not in ids[:-1] for ids in seen)
    with user_error(capsys, "no row can be used", "equal"):
        command_line(reward_model, *flags, "--max-length", 4, "--output-dir", tmp_path / "none")
    assert runs_in(tmp_path / "none") == []


def test_no_keys_and_values_are_kept_for_a_score(single):
    model = RewardModel(str(single / "model"), "cpu").model
    assert model(input_ids=torch.tensor([[3, 4, 5]])).past_key_values is None


def test_chat_messages_are_what_the_template_makes_of_them():
    """Training and scoring see what anyone gets from apply_chat_template, tokens behind the EOS included."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = TEMPLATE
    user, answer = [{"role": "user", "content": "12"}], [{"role": "assistant", "content": "34"}]
    expected = tokenizer("=12<eos>:/34<eos>:")["input_ids"]
    assert encode_scored({"prompt": user}, answer, tokenizer) == expected
    assert encode_scored({"prompt": user}, "34", tokenizer) == expected
    assert encode_scored({"prompt": "12"}, "34", tokenizer) == expected
    assert encode_scored({"prompt": "12"}, "34", AutoTokenizer.from_pretrained(TINY_MODEL)) == [4, 5, 6, 7, 1]


# the folder, and padding


def test_anyone_gets_our_scores(single):
    """from_pretrained and the model's own forward pass, padded on either side, one by one or together."""
    rows = load_pairs("sort", 20, 1).heldout[:7]
    scorer = RewardModel(str(single / "model"), "cpu")
    model, tokenizer = scorer.model, scorer.tokenizer
    both = "chosen", "rejected"
    pairs = [reward_model.Pair(*(encode_scored(row, row[c], tokenizer) for c in both)) for row in rows]
    texts = [row["prompt"] + row[c] for row in rows for c in both]
    assert len(set(map(len, texts))) > 2
    expected = by_transformers(single / "model", texts)
    assert expected.std() > 1e-2
    for size in (1, 3, 7):
        ours = reward_model.score_pairs(model, pairs, reward_model.Args(micro_batch_size=size, precision="float32"))
        torch.testing.assert_close(ours.flatten(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(by_transformers(single / "model", texts, "left"), expected, rtol=0, atol=1e-5)
    result = scorer([row for row in rows for _ in both], [row[c] for row in rows for c in both])
    torch.testing.assert_close(torch.tensor(result), expected, rtol=0, atol=1e-5)
    last = metrics(single)[-1]
    heldout = torch.tensor(result[:8]).view(4, 2)  # the run evaluated the first four
    margin = reward_model.preference_metrics(heldout)["margin"].mean().item()
    assert margin == pytest.approx(last["eval/pair_margin"], abs=1e-5)


def tokenizer_of(*special: str, **roles) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    unknown = roles.get("unk_token")
    inner = Tokenizer(models.WordLevel(vocabulary, **({"unk_token": unknown} if unknown else {})))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, **roles)


def save_lm(folder, tokenizer, kind) -> str:
    torch.manual_seed(0)
    size = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, **size)
    else:
        config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                          num_attention_heads=2, bos_token_id=None, **size)  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("pads_with_eos", [True, False])
def test_a_tokenizer_that_pads_with_eos(pads_with_eos, tmp_path):
    """Where there is another special token, that one pads instead, and the score is read at EOS by everyone."""
    roles = dict(eos_token="<eos>", unk_token="<unk>", **({"pad_token": "<eos>"} if pads_with_eos else {}))
    path = save_lm(tmp_path / "lm", tokenizer_of("<eos>", "<unk>", **roles), "llama")
    flags = [*FLAGS, "--model", path, "--max-steps", 2]
    folder = new_run(reward_model, tmp_path / "runs", *flags) / "model"
    scorer = RewardModel(str(folder), "cpu")
    model, tokenizer = scorer.model, scorer.tokenizer
    assert AutoTokenizer.from_pretrained(folder).pad_token == tokenizer.pad_token == "<unk>"
    assert model.config.pad_token_id == 1
    texts = ["S10:01", "S3210:0123", "S:"]
    ids = [tokenizer(text)["input_ids"] + [0] for text in texts]
    with torch.no_grad():
        ours = sequence_scores(model, ids)
        at_eos = [model.score(model.model(torch.tensor([i])).last_hidden_state)[0, -1, 0] for i in ids]
        without = sequence_scores(model, [i[:-1] for i in ids])
    torch.testing.assert_close(ours, torch.stack(at_eos), rtol=0, atol=1e-5)
    torch.testing.assert_close(by_transformers(folder, texts), ours, rtol=0, atol=1e-5)
    assert (ours - without).abs().min() > 1e-4


def test_a_tokenizer_with_no_special_token_but_eos(tmp_path):
    """GPT-2's: everyone reads the score at the token before EOS. Dropout is off in training."""
    path = save_lm(tmp_path / "lm", tokenizer_of("<eos>", eos_token="<eos>", pad_token="<eos>"), "gpt2")
    folder = new_run(reward_model, tmp_path / "runs", *FLAGS, "--model", path, "--max-steps", 2) / "model"
    scorer = RewardModel(str(folder), "cpu")
    model, tokenizer = scorer.model, scorer.tokenizer
    texts = ["S10:01", "S3210:0123", "S:"]
    ids = [tokenizer(text)["input_ids"] + [0] for text in texts]
    with torch.no_grad():
        ours = sequence_scores(model, ids)
        alone = torch.cat([sequence_scores(model, [i[:-1]]) for i in ids])
    torch.testing.assert_close(ours, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(by_transformers(folder, texts), ours, rtol=0, atol=1e-5)
    assert json.loads((folder / "config.json").read_text())["resid_pdrop"] == 0.1
    member, _ = reward_model.load_member(1, torch.device("cpu"), reward_model.Args(model=path))
    member.train()
    with torch.no_grad():
        assert torch.equal(sequence_scores(member, ids), sequence_scores(member, ids))


# as a reward


def test_several_models_are_combined_before_functions_are_added(ensemble, tmp_path):
    """By their raw scores alone; a deviation is that of the models at hand. Functions have their weights."""
    path = tmp_path / "mine.py"
    path.write_text("def length(completions, **columns):\n    return [len(c) for c in completions]\n")
    members = [ensemble / f"model/member-{k}" for k in (1, 2, 3)]
    raw = torch.stack([scored([member])[0] for member in members])
    assert raw.std(0).min() > 1e-3
    lengths = torch.tensor([float(len(text)) for text in TEXTS])
    expected = {
        "sum": raw[0] + 2 * raw[1] + 3 * raw[2],
        "min": raw.min(0).values,
        "mean-std": raw.mean(0) - ((raw - raw.mean(0)) ** 2).mean(0).sqrt(),
    }
    for combine, rewards in expected.items():
        ours, columns = scored([members[0], f"{path}:length", *members[1:]], [1, 0.5, 2, 3], combine=combine)
        torch.testing.assert_close(ours, rewards + 0.5 * lengths, rtol=0, atol=1e-5)
        assert columns["reward/member-2"] == pytest.approx(raw[1].mean().item(), abs=1e-5)
        assert columns["reward/length"] == lengths.mean()


def test_beside_functions_and_the_task(single, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def length(completions, **columns):\n    return [len(c) for c in completions]\n")
    right = ["".join(sorted(SORT.heldout[0]["digits"])), "0"] + ["1"] * 4
    alone, columns = scored([single / "model"], texts=right)
    both, of_both = scored([f"{path}:length", single / "model"], [0.5, -2.0], texts=right)
    lengths = torch.tensor([float(len(t)) for t in right])
    torch.testing.assert_close(both, 0.5 * lengths - 2 * alone)
    assert sorted(of_both) == ["reward/length", "reward/model", "reward/task"]
    assert of_both["reward/task"] == columns["reward/task"] == pytest.approx(1 / 6)
    _, two = scored([single / "model", single / "model"], texts=right)
    assert sorted(two) == ["reward/model_0", "reward/model_1", "reward/task"]
    _, unscored = scored([single / "model"], task=Task("mine", None, []), texts=right)
    assert list(unscored) == ["reward/model"]


def test_many_answers_are_scored_in_batches(single, monkeypatch):
    model, sizes = RewardModel(str(single / "model"), "cpu"), []
    inner = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda **k: sizes.append(len(k["input_ids"])) or inner(**k))
    rows, texts = [{"prompt": f"S{i}:"} for i in range(150)], [str(i) for i in range(150)]
    together = model(rows, texts)
    assert sizes == [64, 64, 22]
    assert together[::40] == pytest.approx([model(rows[i : i + 1], texts[i : i + 1])[0] for i in range(0, 150, 40)],
                                           abs=1e-5)  # fmt: skip


CODE = """from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaModel):
    config_class = OwnConfig
AutoModel.register(OwnConfig, OwnModel)
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
class OwnForSequenceClassification(LlamaForSequenceClassification):
    config_class = OwnConfig
"""


def with_own_code(folder, kind: str, to):
    """A copy of a model whose classes come with it, under a model type that transformers does not know."""
    shutil.copytree(folder, to)
    (to / "own.py").write_text(CODE)
    config = json.loads((to / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", f"AutoModelFor{kind}": f"own.OwnFor{kind}"}
    own = {"model_type": "own", "architectures": [f"OwnFor{kind}"], "auto_map": auto_map}
    (to / "config.json").write_text(json.dumps(config | own))
    return to


def test_trust_remote_code_is_for_the_policy_and_for_reward_models(single, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    policy = with_own_code(TINY_MODEL, "CausalLM", tmp_path / "policy")
    reward = with_own_code(single / "model", "SequenceClassification", tmp_path / "reward")
    flags, own = [*SMALL["rloo"], "--max-steps", 1], ["--model", policy, "--reward", reward]
    (*_, known) = metrics(new_run(rloo, tmp_path / "known", *flags, "--reward", f"{single}/model"))
    (*_, row) = metrics(new_run(rloo, tmp_path / "own", *flags, *own, "--trust-remote-code"))
    assert row["reward/reward"] == known["reward/model"]
    for pair in own[:2], own[2:]:
        with user_error(capsys, str(pair[1]), "contains custom code"):
            command_line(rloo, *flags, *pair, "--output-dir", tmp_path)


def test_functions_of_a_package_are_no_models(tmp_path, monkeypatch):
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage/__init__.py").write_text("def f(completions, **columns):\n    return [1.0] * 6\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert scored(["mypackage:f"])[0].tolist() == [1.0] * 6


def test_what_is_no_reward_model(single, tmp_path):
    """One label, and a head that was saved: transformers would score with a random one."""
    three, headless = tmp_path / "three", tmp_path / "headless"
    model, tokenizer = load_model(reward_model.Args())
    model.save_pretrained(headless)
    model.config.num_labels = 3
    transformers.LlamaForSequenceClassification(model.config).save_pretrained(three)
    for folder in three, headless:
        tokenizer.save_pretrained(folder)
    (tmp_path / "empty").mkdir()
    for spec in (TINY_MODEL, three, headless, tmp_path / "empty", single, "nobody/nothing"):
        with pytest.raises(UserError, match=f"cannot load the reward model {spec}"):
            scored([spec])
    with pytest.raises(UserError, match="cannot load .*nowhere"):
        scored([tmp_path / "nowhere"])
