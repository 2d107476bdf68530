"""flow_grpo.py: the SDE has the marginals of the flow, and becomes its ODE; evaluation and reference as `train` has
them. What it shares with ddpo.py, and the KL: tests/test_exact_ddpo.py."""

import copy

import numpy as np
import pytest
import torch
from control import close, float64
from test_exact_ddpo import MEAN, exact_velocity
from tiny_runs import train

from algos import flow_grpo


def gaussian(num_steps: int, noise_level: float):
    """Mean and standard deviation of the last point in Gaussian data of standard deviation 1/2: the point is linear in
    its K + 1 normals."""
    normals = torch.cat([torch.zeros(1, num_steps + 1), torch.eye(num_steps + 1)])[:, :, None].expand(-1, -1, 2)
    args, prompts = flow_grpo.Args(num_steps=num_steps, noise_level=noise_level), torch.zeros(num_steps + 2)
    last = flow_grpo.sample(exact_velocity, prompts, normals, args)[:, -1]
    return last[0], (last[1:] - last[0]).square().sum(0).sqrt()


@float64()
@pytest.mark.parametrize("noise_level, coarse", [(1e-4, 0.341), (0.5, 0.413), (0.7, 0.454), (1.0, 0.497)])
def test_the_marginals_are_those_of_the_flow_as_the_steps_grow(noise_level, coarse):
    """Of four steps the noise changes them."""
    for num_steps, std, error in (4, coarse, 6e-4), (400, 0.5, 0.003):
        found = gaussian(num_steps, noise_level)
        close(found[0], MEAN, 0.003 if num_steps == 400 else 0.2)
        close(found[1], [std, std], error)


@float64()
def test_without_noise_the_step_is_that_of_the_ode():
    model, prompts = flow_grpo.Velocity(8), torch.arange(5)
    normals, args = torch.randn(5, 7, 2), flow_grpo.Args(num_steps=6, noise_level=1e-9)
    x = flow_grpo.sample(model, prompts, normals, args)[:, -1]
    close(flow_grpo.solve(model, normals[:, 0], prompts, 6), x, 1e-7)
    for num_steps, std in (4, 0.3415), (40, 0.4823):
        found = flow_grpo.solve(exact_velocity, torch.tensor([[1.0], [0.0]]).expand(2, 2), prompts[:2], num_steps)
        t = np.arange(num_steps) / num_steps
        factor = np.prod(1 + (t / 4 - 1 + t) / ((1 - t) ** 2 + t * t / 4) / num_steps)
        close(found, MEAN + factor * torch.tensor([[1.0], [0.0]]), 1e-8)
        assert factor == pytest.approx(std, abs=1e-3)


def test_an_evaluation_is_of_the_ode_from_the_same_noise():
    """Each prompt as often. The velocity grows with time: Euler steps sum to 1 - 1 / steps."""
    given, args = [], flow_grpo.Args(eval_steps=5, num_steps=3)
    model = lambda x, t, prompts: (2 * t * (1 + prompts))[:, None].expand(-1, 2)  # noqa: E731
    reward = lambda x, c: given.append((x, c)) or x[:, 0] * c  # noqa: E731
    found = [flow_grpo.evaluate(model, reward, torch.device("cpu"), args) for _ in range(2)]
    (x, c), (again, _) = given
    assert torch.equal(x, again) and (c.bincount() == 64).all() and len(c.bincount()) == 8
    noise = x - (1 + c[:, None]) * (1 - 1 / 5)
    assert abs(noise.mean()) < 0.1 and noise.std() == pytest.approx(1, abs=0.1) and len(noise.unique()) > 1000
    assert found == [pytest.approx((x[:, 0] * c).mean().item())] * 2


def test_the_reference_is_the_pretrained_flow_and_evaluations_come_when_due(tmp_path, monkeypatch):
    """The penalty counts from it in each update. An evaluation is of the model behind its update."""
    references, scores, update, pretrain = [], [], flow_grpo.update, flow_grpo.pretrain
    pretrained = lambda model, *_: references.append(copy.deepcopy(model.state_dict()))  # noqa: E731
    monkeypatch.setattr(flow_grpo, "pretrain", lambda *given: pretrain(*given) or pretrained(*given))

    def seen(model, optimizer, batch, args, reference):
        references.append(copy.deepcopy(reference.state_dict()))
        row = update(model, optimizer, batch, args, reference)
        scores.append(flow_grpo.evaluate(model, flow_grpo.closeness, torch.device("cpu"), args))
        return row

    monkeypatch.setattr(flow_grpo, "update", seen)
    settings = dict(max_steps=5, pretrain_steps=20, eval_every=2, hidden_size=8, num_prompts=4)
    rows = train("flow_grpo", settings, tmp_path)[0]
    found = [(row["step"], row["eval/reward"]) for row in rows if "eval/reward" in row]
    assert found == [(2, scores[1]), (4, scores[3]), (5, scores[4])] and len({*scores}) == 5
    assert len({str(weights) for weights in references}) == 1 and len(references) == 6
    assert rows[0]["kl"] < rows[-1]["kl"]
