"""Records what Stable-Baselines3's PPO computes on fixed inputs, for tests/test_parity_sb3.py.

    pip install stable-baselines3==2.9.0 && python benchmarks/peers/make_sb3_fixtures.py

writes tests/fixtures/sb3_ppo.safetensors: the inputs, and for every case of CASES two rounds of SB3's own
collect_rollouts and train, unchanged, behind its own VecNormalize: what is in the rollout buffer, the weights after
each round, and the logged metrics. The environments play a recorded stream whatever the actions are, so that the same
stream can go through our code. The test calls the same function live where SB3 is installed.
"""

import itertools
import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

PATH = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "sb3_ppo.safetensors"
T, N, D, ROUNDS = 16, 4, 3, 2  # steps and environments of a rollout, size of an observation
SPACES = {
    "discrete": gym.spaces.Discrete(4),
    "multi_discrete": gym.spaces.MultiDiscrete([2, 3]),
    "continuous": gym.spaces.Box(-1, 1, (2,)),
}
SETTINGS = [  # names and meaning of ppo.Args; all rows in one minibatch, so that their order does not matter
    dict(update_epochs=1, normalize=True, normalize_advantages=True, gamma=0.99, gae_lambda=0.95, ent_coef=0.01,
         vf_coef=0.5, clip_coef=0.2, max_grad_norm=0.5, learning_rate=3e-3),
    dict(update_epochs=5, normalize=True, normalize_advantages=True, gamma=0.9, gae_lambda=0.8, ent_coef=0.3,
         vf_coef=1.0, clip_coef=0.1, max_grad_norm=100.0, learning_rate=1e-2),
    dict(update_epochs=5, normalize=False, normalize_advantages=False, gamma=0.95, gae_lambda=1.0, ent_coef=0.0,
         vf_coef=0.2, clip_coef=0.2, max_grad_norm=1.0, learning_rate=1e-2),
]  # fmt: skip
CASES = [dict(space=space, **settings) for space, settings in itertools.product(SPACES, SETTINGS)]
NAMES = {  # SB3's parameters -> ours
    "log_std": "log_std",
    "mlp_extractor.policy_net.0": "actor.0",
    "mlp_extractor.policy_net.2": "actor.2",
    "action_net": "actor.4",
    "mlp_extractor.value_net.0": "critic.0",
    "mlp_extractor.value_net.2": "critic.2",
    "value_net": "critic.4",
}


def make_stream(seed: int = 0) -> dict[str, np.ndarray]:
    """What N environments answer, step by step: far from normalised, with outliers so late that they are clipped, and
    every kind of end, also in the last row of a rollout."""
    rng, shape = np.random.default_rng(seed), (ROUNDS * T, N)
    terminated, truncated = rng.random((2, *shape)) < 0.12
    terminated[T - 1], truncated[T - 1] = [True, False, True, False], [False, True, True, False]
    obs, final_obs = rng.normal(3, 2, (2, ROUNDS * T + 1, N, D)).astype(np.float32)
    rewards = rng.normal(1, 4, shape)
    obs[29, 0, 0], rewards[30, 1] = 1e3, -1e3  # an outlier is as many standard deviations off as the root of the count
    return dict(obs=obs, final_obs=final_obs, rewards=rewards, terminated=terminated, truncated=truncated)


class Played(gym.Env):
    """Environment `n` of a stream: obs[t] is what the agent acts on, final_obs[t] where an episode ended before it."""

    def __init__(self, stream: dict, n: int, space: gym.Space):
        self.stream, self.n, self.t, self.action_space = stream, n, 0, space
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (D,), np.float32)

    def reset(self, *, seed=None, options=None):
        return self.stream["obs"][self.t, self.n], {}

    def step(self, action):
        reward, terminated, truncated = (self.stream[k][self.t, self.n] for k in ("rewards", "terminated", "truncated"))
        self.t += 1
        obs = self.stream["final_obs" if terminated or truncated else "obs"][self.t, self.n]
        return obs, float(reward), bool(terminated), bool(truncated), {}


def run_sb3(stream: dict, case: dict, hidden_size: int, algorithm=None, played=Played,
            names=NAMES) -> dict[str, torch.Tensor]:  # fmt: skip
    """ROUNDS of SB3's PPO, or of another class with its arguments: `<round>/<what>`, `before/<parameter>` and
    `<round>/<parameter>`."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    envs = VecNormalize(
        DummyVecEnv([lambda n=n: played(stream, n, SPACES[case["space"]]) for n in range(N)]), gamma=case["gamma"],
        norm_obs=case["normalize"], norm_reward=case["normalize"],
    )  # fmt: skip
    model = (algorithm or PPO)(
        "MlpPolicy", envs, n_steps=T, batch_size=T * N, n_epochs=case["update_epochs"], gamma=case["gamma"],
        gae_lambda=case["gae_lambda"], clip_range=case["clip_coef"], ent_coef=case["ent_coef"],
        vf_coef=case["vf_coef"] / 2, max_grad_norm=case["max_grad_norm"], learning_rate=case["learning_rate"],
        normalize_advantage=case["normalize_advantages"], seed=0, device="cpu",
        policy_kwargs=dict(net_arch=dict(pi=[hidden_size] * 2, vf=[hidden_size] * 2)),
    )  # fmt: skip
    model.set_logger(configure(None, []))
    with torch.no_grad():  # from the policy head's 0.01 every action would be as likely as the next
        for parameter in model.policy.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)

    def parameters() -> dict[str, torch.Tensor]:
        weights = {}
        for name, value in model.policy.state_dict().items():
            module, dot, kind = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
            weights[names[module] + dot + kind] = value.clone()
        return weights

    result = {f"before/{name}": value for name, value in parameters().items()}
    _, callback = model._setup_learn(ROUNDS * T * N)
    for i in range(ROUNDS):
        model.collect_rollouts(model.env, callback, model.rollout_buffer, T)
        buffer = model.rollout_buffer
        recorded = {name: torch.tensor(getattr(buffer, name)) for name in
                    ("observations", "actions", "rewards", "values", "log_probs", "advantages", "returns")}  # fmt: skip
        model.train()
        logged = model.logger.name_to_value
        recorded |= {name: torch.tensor(float(logged[f"train/{name}"])) for name in
                     ("approx_kl", "explained_variance", "entropy_loss", "clip_fraction")
                     if f"train/{name}" in logged}  # fmt: skip
        if case["normalize"]:
            recorded |= {"obs_mean": torch.tensor(envs.obs_rms.mean), "obs_var": torch.tensor(envs.obs_rms.var),
                         "return_var": torch.tensor(envs.ret_rms.var)}  # fmt: skip
        result |= {f"{i}/{name}": value for name, value in (recorded | parameters()).items()}
    return result


def main(path: Path = PATH, cases: list[dict] = CASES, run=run_sb3, maker: str = __file__) -> None:
    import safetensors.torch
    import stable_baselines3

    stream = make_stream()
    tensors = {f"stream/{name}": torch.from_numpy(value) for name, value in stream.items()}
    for i, case in enumerate(cases):
        tensors |= {f"case{i}/{name}": value for name, value in run(stream, case, hidden_size=8).items()}
    about = {"stable_baselines3": stable_baselines3.__version__, "torch": torch.__version__,
             "gymnasium": gym.__version__, "command": f"python benchmarks/peers/{Path(maker).name}",
             "cases": json.dumps(cases)}  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()}, about))
    print(f"{len(cases)} cases, {path.stat().st_size / 1024:.0f} KB in {path}")


if __name__ == "__main__":
    main()
