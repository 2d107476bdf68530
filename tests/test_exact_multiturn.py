"""grpo_multiturn.py: two turns by enumeration, nothing learnt from observations, one turn is grpo.py bit for bit, and
what happens between two turns."""

import copy
import itertools
import math
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import transformers
from control import without
from groups import EVERY, stale, twice
from reference.grpo import Rule, all_tokens
from tiny_runs import result, same
from tiny_runs import train as tiny_train
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from algos import grpo_multiturn
from algos.environments.calculator import Calculator
from algos.grpo_multiturn import (
    Args,
    Batch,
    Episodes,
    Guess,
    around,
    encode_observation,
    load_environment,
    opened,
    play,
    results,
    shown,
    stop_ids,
    until_stop,
    update,
)
from tests.specs import SPECS
from utils.builtin import countdown_score
from utils.core import UserError
from utils.dist import Samples
from utils.lm import TINY_MODEL, completion_logps

SINGLE = tuple("0123456789+-*/=,:CS")  # every token but the special ones ends a turn
A, B, PLUS, MINUS, START = 3, 4, 13, 14, 21  # "0", "1", "+", "-", "C" of the tiny tokenizer


def small_model(seed: int = 0) -> GPT2LMHeadModel:
    """In float64 it computes in float64, which Llama's norm does not."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=23, n_positions=64, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3,
                        bos_token_id=1, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return with_ends(GPT2LMHeadModel(config))


def with_ends(model):
    """As load_model leaves it."""
    model.generation_config.eos_token_id = [model.config.eos_token_id]
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY_MODEL)


def arguments(**more) -> Args:
    defaults = dict(device="cpu", precision="float32", num_prompts=2, num_generations=4, sample_batch_size=64,
                    micro_batch_size=64, micro_batch_tokens=0, max_completion_length=4, max_total_length=60, beta=0.0,
                    max_turns=3, max_grad_norm=1e9, scale_rewards="none", aggregation="constant")  # fmt: skip
    return Args(**defaults | more)


def owned(c: tuple) -> list[bool]:
    """As if a 2 with a token behind it were the environment's."""
    return [token != 2 or t + 1 == len(c) for t, token in enumerate(c)]


@pytest.mark.usefixtures("float64")
@stale
def test_updates_equal_the_reference_s(case):
    """With observations that are neither trained nor counted: in no ratio, penalty, denominator or metric, whatever the
    reference says there."""
    rule = Rule(own=lambda row, s: all_tokens(row, s) & owned(row.c), fixed=dict(max_completion_length=15))
    own = torch.tensor([[*owned(c), False][:2] for group in EVERY for c in group])
    metrics = twice(grpo_multiturn, rule, case, given=dict(own=own), max_turns=3, beta=0.3)
    assert 0 < metrics["clip_fraction"] < 1 and 0 < (~own[:, 0]).sum() < len(own)


def test_evaluation_is_greedy_and_sampled_and_leaves_no_trace(monkeypatch):
    """Environments may draw from the global generators. A reward below 1 is no success."""
    asked, found = [], {1: [1.0, 0.5], 4: [1.0, 0, 0, 1, 0, 0.5, 0, 0]}

    def playing(model, tokenizer, make, rows, count, temperature, *_):
        asked.append((len(rows), count, temperature, torch.rand(()).item()))
        return SimpleNamespace(rewards=torch.tensor(found[count]), samples=None, cut=None)

    monkeypatch.setattr(grpo_multiturn, "play", playing)
    each = lambda count, samples, tokenizer, columns: [{"reward": x} for x in columns["reward"].tolist()]  # noqa: E731
    monkeypatch.setattr(grpo_multiturn, "sample_rows", each)
    torch.manual_seed(0)
    args = Args(eval_prompts=2, eval_samples=4, temperature=0.7)
    task, kept = SimpleNamespace(heldout=["a", "b", "c"]), []
    scored = grpo_multiturn.evaluate(None, None, None, task, args, kept.extend)
    assert kept == [{"reward": x, "greedy": count == 1} for count in (1, 4) for x in found[count]]
    assert [one[:3] for one in asked] == [(2, 1, 0.0), (2, 4, 0.7)] and torch.rand(()).item() == asked[0][3]
    assert scored == {"eval/greedy": 0.5, "eval/pass@1": 0.25, "eval/pass@4": 0.5, "eval/reward": 2.5 / 8}


class OneTurn:
    """Countdown as grpo.py has it."""

    def reset(self, row, seed):
        self.row = row

    def step(self, text):
        return "", countdown_score(self.row, text), True


@pytest.mark.usefixtures("float64")
def test_two_turns_by_enumeration():
    """A policy over two tokens, two turns of one token, an observation between them that depends on the first. The
    expected update over all pairs of episodes is (G - 1) / (G L) times the gradient of the expected reward."""
    model = small_model().double()
    prompt, tokens = [START], (A, B)
    reward = {(A, A): 0.3, (A, B): -1.0, (B, A): 2.0, (B, B): 0.5}
    restricted = torch.full((23,), -1e9, dtype=torch.float64)
    restricted[list(tokens)] = 0.0
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + restricted)

    def episode(first: int, second: int) -> list[int]:
        return [first, PLUS if first == A else MINUS, second]

    own = torch.tensor([True, False, True])

    def scored(pairs) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([episode(*pair) for pair in pairs])
        return ids, plain_logps(model, torch.tensor([prompt]), None, ids, None, 1.0)[0] * own

    found, moved = dict(zip(reward, scored(reward)[1].sum(1).exp())), 0.0
    assert sum(found.values()).item() == pytest.approx(1.0, abs=1e-12)
    weights = list(model.parameters())
    expected = torch.autograd.grad(sum(found[pair] * reward[pair] for pair in found), weights)
    args = arguments(num_generations=2, max_turns=2, max_completion_length=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_multiturn, "completion_logps", plain_logps)  # which calls the head, and so its hook
        for pairs in itertools.product(found, repeat=2):
            (ids, logps), mask = scored(pairs), own.expand(2, 3)
            samples = Samples(torch.tensor([prompt]), own[None, :1], ids, ids >= 0, logps.detach(), mask[:, 0])
            other = copy.deepcopy(model)
            batch = Batch(samples, torch.tensor([reward[pair] for pair in pairs]), None)
            update(other, torch.optim.SGD(other.parameters(), 1.0), batch, mask, args)
            step = [after.detach() - before.detach() for after, before in zip(other.parameters(), weights)]
            moved += math.prod(found[pair].item() for pair in pairs) * torch.cat([x.flatten() for x in step])
    torch.testing.assert_close(moved, torch.cat([g.flatten() for g in expected]) / 2 / 2, rtol=0, atol=1e-12)
    assert moved.norm() > 0.01


def plain_logps(model, prompt_ids, prompt_mask, ids, mask, temperature):
    """completion_logps for prompts without padding, by one plain pass."""
    repeats = len(ids) // len(prompt_ids)
    whole = torch.cat([prompt_ids.repeat_interleave(repeats, 0), ids], 1)
    logits = model(input_ids=whole).logits[:, prompt_ids.shape[1] - 1 : -1] / temperature
    logp = logits.log_softmax(-1)
    return logp.gather(2, ids[:, :, None])[..., 0], -(logp.exp() * logp).sum(-1).detach()


def test_one_turn_is_grpo_bit_for_bit():
    """Metrics and weights of whole runs, evaluation included."""
    shared = dict(model="@tiny", task="countdown", max_steps=2, num_prompts=6, num_generations=4, learning_rate=1e-3,
                  eval_prompts=3, eval_samples=2, eval_every=0, sample_batch_size=8, micro_batch_size=8, beta=0.1,
                  max_completion_length=12, num_iterations=2, aggregation="constant", temperature=1.2,
                  micro_batch_tokens=0)  # fmt: skip
    ours = result("grpo_multiturn", shared | dict(environment=f"{__name__}:OneTurn", max_turns=1))
    theirs = result("grpo", shared)
    # here an episode that its budget cut is over, too: in both, truncated counts it
    rows = [{name: row[name] for name in other} for row, other in zip(ours.rows, without(theirs.rows, "eval/distinct"))]
    assert same(ours._replace(rows=rows), theirs._replace(rows=without(theirs.rows, "eval/distinct")))
    assert rows[-1]["truncated"] > 0 and rows[-1]["grad_norm"] > 0


class Scripted:
    """Answers that the test sets, turn by turn: an observation, a reward, done; or something to be called."""

    answers: list = []
    opening = None
    stop: tuple = ()

    def reset(self, row, seed):
        self.turn, self.seed = 0, seed
        return self.opening

    def step(self, text):
        answer = self.answers[min(self.turn, len(self.answers) - 1)]
        self.turn += 1
        return answer(text) if callable(answer) else answer


ROWS = [{"prompt": "C12:"}, {"prompt": "S3:"}]


def played(tokenizer, answers: list, model=None, rows=ROWS, stop=(), opening=None, **more) -> Episodes:
    made = type("Made", (Scripted,), dict(answers=answers, stop=stop, opening=opening))
    args = arguments(**more)
    return play(model or small_model(), tokenizer, made, rows, args.num_generations, 1.0, args, "test")


def parts_of(episodes: Episodes, i: int) -> list[tuple[bool, list[int]]]:
    """(own or not, tokens) of the row, piece by piece."""
    mask = episodes.samples.completion_mask[i]
    pairs = zip(episodes.own[i][mask].tolist(), episodes.samples.completion_ids[i][mask].tolist())
    return [(own, [token for _, token in group]) for own, group in itertools.groupby(pairs, lambda pair: pair[0])]


def test_what_is_trained_is_what_was_sampled(tokenizer):
    """The sampler's log-probability of every own token is the scorer's, given the observations before it."""
    model = small_model()
    episodes = played(tokenizer, [("+-", 0.5, False)], model, max_turns=3, max_completion_length=3)
    samples = episodes.samples
    logps, _ = completion_logps(model, *samples[:4])
    torch.testing.assert_close(logps[episodes.own], samples.logps[episodes.own], rtol=0, atol=1e-5)
    assert (samples.logps[~episodes.own] == 0).all() and not (episodes.own & ~samples.completion_mask).any()
    observations = samples.completion_mask & ~episodes.own
    assert observations.any() and set(samples.completion_ids[observations].tolist()) == {PLUS, MINUS}
    assert len(set(episodes.turns)) > 1
    expected = torch.tensor([0.5 * turns for turns in episodes.turns])
    assert torch.equal(episodes.rewards, expected)
    for i, turns in enumerate(episodes.turns):
        pieces = parts_of(episodes, i)
        assert [own for own, _ in pieces] == [n % 2 == 0 for n in range(2 * turns - 1)]
        assert all(tokens[-1] == 1 for own, tokens in pieces[:-1] if own)  # a turn's EOS is the policy's own


def test_each_row_has_its_own_frame(tokenizer, monkeypatch):
    """Its template's arguments may be its own."""
    monkeypatch.setattr(grpo_multiturn, "around", lambda row, *_: ("<eos>" + row["prompt"][0], ""))
    episodes = played(tokenizer, [("+", 0.0, False)], max_turns=2, max_completion_length=3, num_generations=16)
    for i, letter in enumerate(16 * "C" + 16 * "S"):
        seen = [tokenizer.decode(tokens, skip_special_tokens=True) for own, tokens in parts_of(episodes, i) if not own]
        assert set(seen) <= {f"{letter}+"}
    assert 2 in episodes.turns[:16] and 2 in episodes.turns[16:]


def test_observations_are_counted_without_padding(tmp_path, monkeypatch):
    collect, made = grpo_multiturn.collect, []
    monkeypatch.setattr(grpo_multiturn, "collect", lambda *inputs: made.append(collect(*inputs)) or made[-1])
    rows = tiny_train("grpo_multiturn", SPECS["grpo_multiturn"].flags, tmp_path)[0]
    found = [row["observation_tokens"] for row in rows if "observation_tokens" in row]
    masks = [(episodes.samples.completion_mask.sum(1), episodes.own.sum(1)) for episodes in made]
    assert found == pytest.approx([(whole - own).float().mean().item() for whole, own in masks]) and any(found)
    assert any(len(whole.unique()) > 1 for whole, _ in masks)


def test_three_truncations_are_told_apart(tokenizer):
    for more, answer, why in (
        (dict(max_turns=2), ("+", 0.0, False), "turns"),
        (dict(max_total_length=9, max_turns=3), ("++", 0.0, False), "total"),
        (dict(max_turns=2), ("+", 1.0, True), ""),
    ):
        episodes = played(tokenizer, [answer], max_completion_length=1, stop=SINGLE, **more)
        kinds = {cut for cut in episodes.cut if cut != "turn"}  # <pad> and <unk> end nothing
        assert kinds == {why}
        assert episodes.samples.ended.tolist() == [cut == "" for cut in episodes.cut]
    for done in False, True:  # whatever the environment makes of a turn that was cut off
        episodes = played(tokenizer, [("", 0.5, done)], max_completion_length=2)
        cut = [why == "turn" for why in episodes.cut]
        assert any(cut) and not episodes.samples.ended[cut].any() and (episodes.rewards >= 0.5).all()


def test_an_episode_stays_within_its_length(tokenizer):
    """Not even one turn goes beyond it, and the observation that would is left out."""
    total = 12
    episodes = played(tokenizer, [("+" * 3, 0.0, False)], max_total_length=total, max_completion_length=2, max_turns=9,
                      stop=SINGLE)  # fmt: skip
    lengths = episodes.samples.prompt_mask.sum(1).repeat_interleave(4) + episodes.samples.completion_mask.sum(1)
    assert lengths.max() <= total and "total" in episodes.cut
    last = episodes.samples.completion_mask.sum(1) - 1
    assert episodes.own[range(8), last].all()  # every episode ends with a turn
    with pytest.raises(UserError, match="what reset of --environment adds, a prompt has 13 tokens: raise"):
        played(tokenizer, [("", 0.0, True)], opening="+" * 9, max_total_length=14, max_completion_length=2)
    lone = played(tokenizer, [("+" * 500, 0.0, False)], max_completion_length=1, stop=SINGLE)
    assert set(lone.cut) <= {"total", "turn"} and set(lone.turns) == {1}


@pytest.mark.parametrize("answer, words", [
    (lambda text: 1 / 0, "ZeroDivisionError"),
    (lambda text: time.sleep(30), "TimeoutError"),
    (lambda text: sys.exit(3), "SystemExit: 3"),
    (("+" * 10**6, 1.0, False), "1000000 characters"),
])  # fmt: skip
def test_an_environment_that_fails_ends_its_episode(tokenizer, capsys, answer, words):
    """With the rewards of the turns before; the others go on."""
    calls = []

    def second(text):
        calls.append(text)
        return answer(text) if len(calls) == 1 and callable(answer) else answer if len(calls) == 1 else ("", 2.0, True)

    start = time.perf_counter()
    episodes = played(tokenizer, [("+", 0.25, False), second], max_completion_length=1, environment_seconds=0.3,
                      stop=SINGLE)  # fmt: skip
    assert time.perf_counter() - start < 10
    assert episodes.cut.count("fault") == 1 and words in capsys.readouterr().err
    failed = episodes.cut.index("fault")
    assert episodes.rewards[failed] == 0.25 and not episodes.samples.ended[failed]
    others = [r for r, cut in zip(episodes.rewards.tolist(), episodes.cut) if cut == ""]
    assert others and set(others) == {2.25}


def test_a_call_that_hangs_is_made_once():
    """What comes behind it is called by another thread, each call once and in order."""
    made = []

    def call(i):
        made.append(i)
        time.sleep(0.4 if i == 1 else 0)
        return i

    found = results([lambda i=i: call(i) for i in range(4)], 0.1)
    time.sleep(0.5)
    assert [found[0], *found[2:]] == [0, 2, 3] and isinstance(found[1], TimeoutError) and made == [0, 1, 2, 3]


@pytest.mark.parametrize("answer", [None, ("", "much", True), (3, 1.0, True), ("", math.nan, True), ("", 1.0)])
def test_an_answer_that_is_none_is_an_error(tokenizer, answer):
    with pytest.raises(UserError, match="step of --environment returned"):
        played(tokenizer, [lambda text: answer])


def test_episodes_of_a_group_share_their_seed_and_opening(tokenizer):
    seeds = []

    class Seeded(Scripted):
        answers = [("", 0.0, True)]

        def reset(self, row, seed):
            seeds.append((row["prompt"], seed))
            super().reset(row, seed)
            return "12"

    args = arguments()
    episodes = play(small_model(), tokenizer, Seeded, ROWS, 4, 1.0, args, "test")
    assert len(set(seeds)) == 2 and seeds == sorted(seeds, key=lambda s: s[0])
    prompts = [ids[mask].tolist() for ids, mask in zip(*episodes.samples[:2])]
    assert prompts == [tokenizer(text)["input_ids"] for text in ("C12:12", "S3:12")]
    play(small_model(), tokenizer, Seeded, ROWS, 1, 1.0, args, "test", 2)
    assert seeds[-1][1] != seeds[4][1]  # another step, another game

    count = itertools.count()
    Seeded.reset = lambda *_: str(next(count))
    with pytest.raises(UserError, match="answers equal rows and seeds differently"):
        play(small_model(), tokenizer, Seeded, ROWS, 2, 1.0, args, "test")

    with pytest.raises(UserError, match="reset of --environment returned 3: it must return a text or None"):
        played(tokenizer, [], opening=3)


def test_turns_draw_new_numbers(tokenizer):
    """Turns that were drawn by equal streams from equal states would repeat each other."""
    model = small_model()
    usual = torch.zeros(23)
    usual[[0, 2, 22]] = -99.0  # <pad>, <unk> and what has no text end no turn: so every row goes on
    model.lm_head.register_forward_hook(lambda module, inputs, output: 0 * output + usual)
    episodes = played(tokenizer, [("", 0.0, False)], model, rows=ROWS[:1], num_generations=32, max_turns=2,
                      max_completion_length=1, stop=SINGLE)  # fmt: skip
    assert episodes.turns == [2] * 32
    assert sum(first == second for first, second, *_ in episodes.samples.completion_ids.tolist()) < 16


def test_blank_observations_say_nothing(tokenizer):
    answer = lambda text: ("+-" if "1" in text else "-+", 0.0, False)  # noqa: E731
    more = dict(max_completion_length=1, stop=SINGLE, blank_observations=True)
    blank = played(tokenizer, [answer], **more)
    observations = blank.samples.completion_mask & ~blank.own
    assert observations.any() and set(blank.samples.completion_ids[observations].tolist()) == {1}


# --- text and tokens ---


def two_ways() -> PreTrainedTokenizerFast:
    """A tokenizer with two encodings of "ab": it writes [ab], and a model may sample [a, b]."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<eos>": 0, "a": 1, "b": 2, "ab": 3, "x": 4, "bx": 5}
    raw = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("b", "x")]))
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<eos>")


def test_own_tokens_are_never_encoded_again():
    """Where a model samples [a, b], [a, b] is trained, though the text is [ab]; and nothing merges with the x of an
    observation, though "bx" is a token."""
    tokenizer = two_ways()
    assert tokenizer("ab")["input_ids"] == [3] and tokenizer("bx")["input_ids"] == [5]
    config = LlamaConfig(vocab_size=6, hidden_size=8, intermediate_size=8, num_hidden_layers=1, eos_token_id=0,
                         num_attention_heads=1, max_position_embeddings=64)  # fmt: skip
    model = with_ends(LlamaForCausalLM(config))
    favour = torch.tensor([-9.0, 5, 5, -9, -9, -9])
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 0 + favour)
    seen = []
    answer = lambda text: seen.append(text) or ("x", 0.0, False)  # noqa: E731
    episodes = played(tokenizer, [answer], model, rows=[{"prompt": "x"}], num_generations=16, stop=("ab",),
                      max_turns=2, max_completion_length=8)  # fmt: skip
    for i in range(16):
        pieces = parts_of(episodes, i)
        assert all(set(tokens) <= {1, 2} for own, tokens in pieces if own)
        assert all(tokens == [4] for own, tokens in pieces if not own)
        for own, tokens in pieces:
            if own and tokenizer.decode(tokens).endswith("ab"):
                assert tokens[-2:] == [1, 2] and tokenizer.decode(tokens).count("ab") == 1
    assert any(turns == 2 for turns in episodes.turns)
    assert all(text.count("ab") <= 1 for text in seen)


def test_stop_strings(tokenizer):
    assert stop_ids(two_ways(), ("b",)) == [2, 3, 5]  # whole tokens that hold it
    assert stop_ids(tokenizer, ("=",)) == tokenizer("=")["input_ids"] and stop_ids(tokenizer, ()) == []
    tokens = tokenizer("12=34=5")["input_ids"]
    assert [until_stop(tokens, tokenizer, stop) for stop in (("=3",), ("=",), ("9",), (), ("1",), ("=5",))] == [
        4, 3, 0, 0, 1, 7,
    ]  # fmt: skip


CHATML = (
    "{% for m in messages %}{{ '<eos>' if false }}{{ 'S' if m.role == 'user' else 'C' if m.role == 'tool' else '*' }}"
    "{{ m.content }}{% if m.role == 'assistant' %}<eos>{% else %},{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}*{% endif %}"
)


def templated(template: str):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("role, letter", [("user", "S"), ("tool", "C")])
def test_the_text_around_an_observation(role, letter):
    """The template's, from the end of the turn to the start of the next. An EOS that was sampled is not written again;
    behind a turn that a stop string ended it is, and is not the policy's own."""
    tokenizer = templated(CHATML)
    frame = around({"prompt": "12"}, tokenizer, role)
    assert frame == (f"<eos>{letter}", ",*")
    assert tokenizer.decode(encode_observation("7", 1, [1], tokenizer, frame)) == f"{letter}7,*"
    assert tokenizer.decode(encode_observation("7", 5, [1], tokenizer, frame)) == f"<eos>{letter}7,*"
    assert tokenizer.decode(encode_observation("7", 2, [1, 2], tokenizer, frame)) == f"{letter}7,*"  # another EOS
    assert around({"prompt": "12"}, templated(None), role) == ("", "")


@pytest.mark.parametrize("template", [
    CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' }}"),  # drops earlier turns
    CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"),
    CHATML.replace("{% else %},", "{% else %}{{ loop.index }}"),  # numbers messages
    CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"),
    CHATML.replace("{{ '<eos>' if false }}", "{{ raise_exception('no') if m.role == 'user' and not loop.first }}"),
])  # fmt: skip
def test_an_ambiguous_template_is_refused(template):
    with pytest.raises(UserError, match="the chat template"):
        around({"prompt": "12"}, templated(template), "user")


def test_a_template_that_drops_thinking_is_not_ambiguous():
    """What it drops is not what stands around an observation."""
    drops = CHATML.replace("{{ m.content }}", "{{ m.content.split(':')[-1] if not loop.last else m.content }}")
    assert around({"prompt": "12"}, templated(drops), "user") == around({"prompt": "12"}, templated(CHATML), "user")


class Tool:
    """A tool call and its answer: the sum of two digits behind `+`, then an answer behind `=`."""

    stop, role, seen = ("=",), "tool", []

    def reset(self, row, seed):
        self.calls = 0

    def step(self, text):
        self.calls += 1
        self.seen.append(text)
        return "9", float(self.calls), self.calls == 2


def test_a_conversation_with_a_tool_on_a_model_with_a_template(tokenizer):
    """Prompt, call, answer, and last turn: the tokens are those of the template's own rendering of the conversation,
    where the policy's turns are in it as sampled."""
    chat, model = templated(CHATML), small_model()
    args = arguments(max_completion_length=5, max_turns=2, num_generations=32)
    episodes = play(model, chat, Tool, [{"prompt": "12+34"}], 32, 1.0, args, "test")
    complete = [i for i, cut in enumerate(episodes.cut) if cut == ""]
    assert complete
    prompt = episodes.samples.prompt_ids[0].tolist()
    ended_by_eos = 0
    for i in complete:
        (_, call), (_, between), (_, last) = parts_of(episodes, i)
        texts = [chat.decode(tokens, skip_special_tokens=True) for tokens in (call, last)]
        messages = [{"role": "user", "content": "12+34"}, {"role": "assistant", "content": texts[0]},
                    {"role": "tool", "content": "9"}]  # fmt: skip
        if not any(token in (0, 2) for token in call):  # <pad> and <unk> have no text
            whole = chat.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
            assert prompt + call + between == whole["input_ids"]
            ended_by_eos += call[-1] == 1
        assert episodes.rewards[i] == 3.0
    text = shown(chat, episodes, 32)
    lines = [line.split()[0] for line in text.splitlines()]
    kinds = [["turn", "observation"] * (turns - 1) + ["turn", "reward"] for turns in episodes.turns]
    assert lines == ["prompt", *itertools.chain(*kinds)] and "C9,*'" in text and "reward       3\n" in text
    assert text.count("cut: turn") == episodes.cut.count("turn") > 0
    seen = "".join(Tool.seen)  # a special token may be a tool's tag
    assert "<unk>" in seen and "<eos>" not in seen and "<pad>" not in seen


# --- the two environments ---


def test_guess():
    """Binary search finds every digit within four turns; fixed guesses find four of ten."""
    found, fixed = [], []
    for digit in range(10):
        game, low, high = Guess(), 0, 9
        game.reset({"digit": digit}, 0)
        for _ in range(4):
            guess = (low + high) // 2
            answer, reward, done = game.step(str(guess))
            if done:
                break
            low, high = (guess + 1, high) if answer == "+" else (low, guess - 1)
        found.append((reward, done))
        game.reset({"digit": digit}, 0)
        fixed.append(max(game.step(str(guess))[1] for guess in (1, 3, 5, 7)))
    assert found == [(1.0, True)] * 10 and sum(fixed) == 4
    for text in "", "12", "+", "x", "²":
        game.reset({"digit": 1}, 0)
        assert game.step(text) == ("", 0.0, True)
    task = Guess.task()
    assert [task.train(i, 7)["digit"] for i in range(12)] == [*range(10), 0, 1] and len(task.heldout) == 10
    with pytest.raises(UserError, match="leave --task out"):
        game.reset({"prompt": "S1:"}, 0)


def test_calculator():
    row = {"numbers": [5, 7, 3], "target": 32}
    game = Calculator()
    game.reset(row, 0)
    assert game.step("5*7=") == ("35", 0.0, False) and game.step(",35-3=") == ("32", 1.0, True)
    for turns in (["5*7=", ",35+3="], ["5*7=", ",5*7="]):
        game.reset(row, 0)
        assert [game.step(text) for text in turns][-1][1:] == (0.0, True)
    for text in "5*7", "=", "7/5=", "7/0=", "5**7=", "":
        game.reset(row, 0)
        assert game.step(text) == ("", 0.0, True)
    with pytest.raises(UserError, match="rows of countdown"):
        game.reset({"prompt": "S1:"}, 0)


@pytest.mark.parametrize("spec, words", [
    ("nothing", "cannot load nothing"),
    ("none.py:Game", "none.py"),
    ("recall", "must have the methods reset"),  # an environment of another kind
    ("math:sqrt", "must have the methods reset"),
])  # fmt: skip
def test_an_environment_that_is_none_is_refused(spec, words):
    with pytest.raises(UserError, match=words):
        load_environment(spec)


@pytest.mark.parametrize("stop", ["</search>", ("</search>", ""), (1,)])
def test_stop_strings_that_are_none_are_refused(stop, monkeypatch):
    monkeypatch.setattr(Scripted, "stop", stop)
    with pytest.raises(UserError, match="must be texts in a tuple"):
        load_environment(f"{__name__}:Scripted")


def test_an_opening_behind_any_content():
    """Messages may hold parts, or nothing."""
    part = {"type": "text", "text": "3"}
    for content, opened_content in (("3", "3+"), ([part], [part, {"type": "text", "text": "+"}]), (None, "+")):
        row = {"prompt": [{"role": "user", "content": content}]}
        assert opened(row, "") == row
        assert opened(row, "+")["prompt"] == [{"role": "user", "content": opened_content}]


@pytest.mark.parametrize("more, words", [
    (dict(environment="@turns.py:Graded"), "has no prompts of its own: give --task"),
    (dict(stop=("+", "")), "--stop has an empty text"),
    (dict(max_total_length=65), "--max-total-length 65 is beyond the 64 tokens"),
    (dict(max_total_length=9), "a prompt of 2 tokens, and 1 are allowed"),
])  # fmt: skip
def test_wrong_input(tmp_path, more, words):
    with pytest.raises(UserError, match=words):
        tiny_train("grpo_multiturn", dict(model="@model", max_steps=1, max_completion_length=8) | more, tmp_path)
    assert not list(tmp_path.iterdir())
