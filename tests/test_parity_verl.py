"""Ten scripts of language models compute what verl, OpenRLHF or the authors' code computes.

Recorded by peers/make_verl_fixtures.py and make_reinforce_pp_fixtures.py.

Recorded numbers are compared. `update` runs on a table of log-probabilities in place of a model, and its gradients are
theirs to rounding: 1e-8 of a token in their denominators. What differs is shown exactly:
    - nft: theirs divides by 1000, holds r within 0.02 and 0.98, and log rho below 10.
    - nsr: theirs drops the rows without weight for PSR and NSR, not for W-REINFORCE.
    - reinforce_lm: theirs is RLOO with all prompts in one group.
    - raft: theirs has rewards of 0 and 1 for Reinforce-Rej, too. With 1 and -1 it is --select all.
    - tba: their loss is ours times 2 / beta.
    - topr: ROLL hands its function the ratios of single tokens. With those of completions it is the paper's and ours.
    - vineppo: their k3 is clipped to 10 and summed over a completion, which is beta times the mean length here.
    - ttrl: theirs writes a reward where the prompt's last answer ends.
    - ppo_lm: verl's dual clip (arXiv 1912.09729), which the papers do not have, cuts ratios above 3 at A < 0.
    - ttrl: theirs reads other answers out of the texts (the last test).
"""

import pytest
import torch
from parity import recorded
from table import Table, updated

from algos import nft, nsr, ppo_lm, raft, reinforce_lm, reinforce_pp, tba, topr, ttrl, vineppo
from benchmarks.peers import make_reinforce_pp_fixtures as of_pp
from benchmarks.peers import make_verl_fixtures as peer
from benchmarks.peers.make_verl_fixtures import BASELINE, BETA, EPSILON, HIGH, NFT, NSR, PPO, RAFT, VOTES, B, G, T
from utils.data import Task
from utils.dist import Samples

pytestmark = pytest.mark.usefixtures("float64")
AGGREGATIONS = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
LENGTH = 2 * T  # --max-completion-length
DATA, THEIRS = recorded(peer)
MASK, ROWS, MIXED = DATA["mask"], torch.arange(B), slice(2 * G, B)


def gradients(monkeypatch, module, *batch, old=DATA["old"], **settings) -> Table:
    """The table after one `update`, for the gradients that it got. `batch`: what follows the samples in a Batch."""

    def of_critic(table, optimizer, batch, args):
        return ppo_lm.update(table, table.critic, optimizer, batch, torch.Generator(), args)

    settings = dict(epsilon=EPSILON, max_completion_length=LENGTH) | settings
    data = DATA | {"old": old, "ended": ROWS % 2 == 0}
    return updated(monkeypatch, module, data, *batch, group=G, call=of_critic if module is ppo_lm else None,
                   **settings)  # fmt: skip


def close(ours, theirs) -> None:
    assert theirs.abs().max() > 1e-4  # ten thousand tolerances
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


def test_the_inputs_tell_branches_apart():
    ratio, right = (DATA["logps"] - DATA["old"]).exp(), DATA["rewards"][:, None] == 1
    for rows in (right, ~right):
        for region in (ratio < 1 - EPSILON, (ratio > 0.9) & (ratio < 1.1), ratio > 1 + HIGH, ratio > 3):
            assert (region & rows & MASK).any()
    assert MASK.sum(1).min() == 1 and MASK.sum(1).max() == T and len(MASK.sum(1).unique()) > 3


@pytest.mark.parametrize("i", range(len(PPO)))
def test_ppo_lm(monkeypatch, i):
    """Penalty in the reward, advantages, whitening, returns, both clips and both denominators: verl's."""
    gamma, gae_lambda, mode, bound = PPO[i]
    ours = gradients(monkeypatch, ppo_lm, DATA["rewards"], DATA["ref"], DATA["old_values"], beta=BETA, gamma=gamma,
                     gae_lambda=gae_lambda, aggregation=AGGREGATIONS[mode], epsilon_high=HIGH, vf_coef=0.1,
                     clip_value=EPSILON)  # fmt: skip
    size = B * LENGTH / T if AGGREGATIONS[mode] == "constant" else 1  # verl sums over completions, and divides by T
    cut = (ours.logps.grad > 0) & ((DATA["logps"] - DATA["old"]).exp() > bound)
    assert cut.any() == (bound == 3)
    close(size * ours.logps.grad.masked_fill(cut, 0.0), THEIRS[f"ppo_lm/{i}"])
    close(size * ours.values.grad / 0.1, THEIRS[f"ppo_lm/{i}/values"])


def test_reinforce_lm(monkeypatch):
    """The mean of the others, a sum over tokens and a mean over completions, also in two micro-batches."""
    close(gradients(monkeypatch, reinforce_lm, DATA["graded"]).logps.grad, THEIRS["reinforce_lm"])


@pytest.mark.parametrize("i", range(len(NFT)))
def test_nft(monkeypatch, i):
    """Both weights of prompts, the weight of wrong answers and the bound; groups of one kind teach nothing."""
    normalize, neg_weight, bound = NFT[i]
    settings = dict(omega="linear" if normalize == 1 else "sqrt", neg_weight=neg_weight, epsilon=bound)
    for rewards in (DATA["rewards"], 2 * DATA["rewards"] - 1):
        ours = gradients(monkeypatch, nft, rewards, None, aggregation="constant", **settings).logps.grad
        close(ours[MIXED] * B * LENGTH / 1000, THEIRS[f"nft/{i}"])
        assert not ours[: 2 * G].any()


def test_nft_holds_nothing(monkeypatch):
    far = DATA["old"].clone()
    far[:, 0] -= 12.0
    settings = dict(omega="linear", neg_weight=1.0, epsilon=1.0, aggregation="constant")
    ours = gradients(monkeypatch, nft, DATA["rewards"], None, old=far, **settings).logps.grad * B * LENGTH / 1000
    held = (DATA["logps"] - far)[MIXED] > 10
    assert held.sum() >= G and ours[MIXED][held].all()
    close(ours[MIXED].masked_fill(held, 0.0), THEIRS["nft/far"])
    logps, right = DATA["logps"][MIXED].clone().requires_grad_(), DATA["rewards"][MIXED]
    outcomes = torch.stack([right, torch.full_like(right, 0.02), torch.full_like(right, 0.98)], 1)
    loss = nft.policy_loss(logps, DATA["old"][MIXED], outcomes, nft.Args(neg_weight=1.0, epsilon=1.0))[0]
    (slope,) = torch.autograd.grad((loss * MASK[MIXED]).sum() / 1000, logps)
    close(slope, THEIRS["nft/rare"])


@pytest.mark.parametrize("i", range(len(RAFT)))
def test_raft(monkeypatch, i):
    name, select, form, mode = RAFT[i]
    rewards = DATA["rewards"] if name == "reinforce_rej" else 2 * DATA["rewards"] - 1
    ours = gradients(monkeypatch, raft, rewards, None, select=select, reject=name == "reinforce_rej", epsilon_high=HIGH,
                     plusplus=form == "plusplus", aggregation=AGGREGATIONS[mode])  # fmt: skip
    close(ours.logps.grad, THEIRS[f"raft/{i}"])


@pytest.mark.parametrize("name", NSR)
def test_nsr(monkeypatch, name):
    """PSR and NSR have the mean over the tokens of the rows that are left, W-REINFORCE that over all."""
    positive, negative = NSR[name]
    ours = gradients(monkeypatch, nsr, DATA["rewards"], None, positive_weight=positive, negative_weight=negative,
                     aggregation="token", denominator="all" if name == "weighted" else "subset")  # fmt: skip
    close(ours.logps.grad, THEIRS[f"nsr/{name}"])


def test_tba(monkeypatch):
    ours = gradients(monkeypatch, tba, DATA["graded"], DATA["ref"].sum(1), beta=BETA)
    close(ours.logps.grad, BETA / 2 * THEIRS["tba"])


def test_topr(monkeypatch):
    ours = gradients(monkeypatch, topr, DATA["rewards"], None, baseline=BASELINE, aggregation="constant")
    ours = ours.logps.grad * B * LENGTH
    close(ours, THEIRS["topr/completion"])
    same = (DATA["rewards"] == 1) | (MASK.sum(1) == 1)
    close(ours[same], THEIRS["topr/token"][same])
    assert ((ours - THEIRS["topr/token"])[~same].abs().amax(1) > 1e-4).any()


@pytest.mark.parametrize("name", ["plain", "whitened"])
def test_vineppo(monkeypatch, name):
    """Advantages of a step's tokens, EOS among them, whitening, clip and penalty."""
    batch = DATA["rewards"], DATA["ref"], DATA["ends"], DATA["old_values"]
    close(vineppo.advantages(batch[0], batch[3], batch[2]) * MASK, THEIRS["vineppo/advantages"])
    ours = gradients(monkeypatch, vineppo, *batch, beta=BETA * MASK.sum().item() / B, aggregation="token",
                     whiten_advantages=name == "whitened").logps.grad  # fmt: skip
    gap = DATA["ref"] - DATA["logps"]
    clipped = MASK & (gap.exp() - gap - 1 > 10)
    assert clipped.any()
    close(ours - BETA / B * (1 - gap.exp()) * clipped, THEIRS[f"vineppo/{name}"])


def judged(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Our rewards of the trained answers to one prompt, and label accuracy, share of the majority, true accuracy."""
    texts, truth = VOTES[i][0].split(), VOTES[i][1]
    answers = [ttrl.final_answer(Task("file", None, [], rows=[]), text) for text in texts]
    true = torch.tensor([float(answer == truth) for answer in answers])
    rewards, columns = ttrl.judged(answers, true, 4, 2)
    return rewards, torch.tensor([columns[name] for name in ("label_accuracy", "majority_share", "reward/true")])


def test_ttrl():
    """Votes, ties, labels from answers that are not trained; and which are trained."""
    rewards, metrics = THEIRS["ttrl/rewards"].view(-1, 2, T), THEIRS["ttrl/metrics"]
    assert not rewards[:, :, :3].any() and not rewards[:, :, 4:].any()  # the last of four answers has four tokens
    found = [judged(i) for i in range(4)]
    close(torch.stack([ours for ours, _ in found]).double(), rewards[:4].sum(2))
    close(torch.stack([ours for _, ours in found]), metrics[:4])
    rows = torch.arange(4 * len(VOTES))
    samples = Samples(rows[::4], rows[::4], *[rows[:, None]] * 3, rows)
    assert torch.equal(ttrl.first_votes(samples, 4, 2).completion_ids[:, 0], THEIRS["ttrl/kept"])


@pytest.mark.parametrize("i, ours, theirs, metrics", [
    (4, [0.0, 0.0], [1.0, 1.0], [0.0, 0.75, 0.25]),  # silence has votes, is a label, and is rewarded
    (5, [0.0, 0.0], [1.0, 1.0], [1.0, 0.5, 0.5]),  # without a box the last number counts
    (6, [1.0, 0.0], [1.0, 1.0], [1.0, 0.5, 0.75]),  # votes are counted by spelling, rewards given by value
    (7, [1.0, 0.0], [1.0, 0.0], [0.0, 0.5, 0.5]),  # only in a metric: of the label's own text the 3 is read
    (8, [0.0, 0.0], [1.0, 1.0], [0.0, 1.0, 0.0]),
])  # fmt: skip
def test_ttrl_reads_other_answers(i, ours, theirs, metrics):
    """Their extractor never says that there is no answer: it takes the last number, else the empty text."""
    found = judged(i)
    assert found[0].tolist() == ours and found[1].tolist() != metrics
    assert THEIRS["ttrl/rewards"].view(-1, 2, T)[i].sum(1).tolist() == theirs
    assert THEIRS["ttrl/metrics"][i].tolist() == metrics


def advantages_of_pp(data: dict, baseline: str) -> torch.Tensor:
    """With the penalty in the reward where there is no baseline of groups, as all have it here."""
    mask, none = data["mask"], torch.zeros(0)
    samples = Samples(none, none, none, mask, data["logps"], none)
    batch = reinforce_pp.Batch(samples, data["rewards"], data["ref"])
    args = reinforce_pp.Args(num_generations=of_pp.G, baseline=baseline, beta=of_pp.BETA)
    return reinforce_pp.advantages(batch, mask, args)


@pytest.mark.parametrize("baseline", ["none", "group"])
@pytest.mark.parametrize("script", ["reinforce_pp"])
def test_advantages_are_verl_s_and_openrlhf_s(script, baseline):
    """verl's to rounding of its 1e-8 per token. OpenRLHF's variance is biased, and its numbers are float32."""
    data, theirs = recorded(of_pp)
    suffix, n = " group" if baseline == "group" else "", data["mask"].sum()
    found = advantages_of_pp(data, baseline)
    torch.testing.assert_close(found, theirs[f"verl{suffix}"], rtol=0, atol=1e-7)
    biased = found * (n / (n - 1)).sqrt()
    torch.testing.assert_close(biased, theirs[f"openrlhf{suffix}"], rtol=0, atol=1e-5)
    assert (biased - found).abs().max() > 1e-3
