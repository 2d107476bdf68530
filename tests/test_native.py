"""--vector native: an environment's own vector is stepped, ends and resumes as ours do, whichever way it resets."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import close, float64
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import SMALL, assert_same_result, command_line, metrics, new_run, stopped_after, user_error
from test_exact_ppo import DISCRETE, SCRIPTS, Script, linear_agent, settings, weights

from algos import ppo, ppo_atari, rnd
from utils.envs import make_env, make_vector, open_env, reset_vector, step_vector
from utils.errors import UserError

NATIVE = ["--vector", "native"]
CARTPOLE = "CartPole-v1", ("max_episode_steps=15",)


def scripted(mode: AutoresetMode | None):
    """`make` of the two scripts of test_exact_ppo.py, whose vector resets as `mode` says."""

    def make(num_envs: int = 0):
        def one(i: int) -> gym.Env:  # with a new array for each observation: Gymnasium's vectors keep the last one
            env = Script(SCRIPTS[i], DISCRETE)
            return gym.wrappers.TransformObservation(env, np.copy, env.observation_space)

        kinds = [lambda i=i: one(i) for i in range(2)]
        return SyncVectorEnv(kinds, autoreset_mode=mode) if num_envs else kinds[0]()

    return make


def rollout(mode: AutoresetMode, steps: int) -> tuple[ppo.Batch, list]:
    agent, statistics = linear_agent(2, DISCRETE).float(), ppo.Statistics(2, 2, 0.9, False)
    agent.noise = lambda shape, generator: torch.zeros(*shape, 3)  # the likeliest actions: the draws would be others
    envs = make_vector(scripted(mode), 2, 0, "native")
    obs, generator = reset_vector(envs), torch.Generator().manual_seed(0)
    batch, _, episodes = ppo.collect(agent, envs, obs, statistics, generator, 0, ppo.Args(num_envs=2, num_steps=steps))
    return batch, episodes


def test_both_ways_to_reset_give_the_same_steps():
    """Without its idle rows, each environment of a NEXT_STEP vector has the rows of a SAME_STEP one, true last
    observations among them, and the same episodes. A row is idle where the one before ended."""
    same, episodes = rollout(AutoresetMode.SAME_STEP, 24)
    following, others = rollout(AutoresetMode.NEXT_STEP, 30)
    ended = following.terminated | following.truncated
    assert not same.idle.any() and torch.equal(following.idle[1:], ended[:-1]) and not following.idle[0].any()
    assert {(t, c) for t, c in zip(same.terminated.flatten().tolist(), same.truncated.flatten().tolist())} >= {
        (True, False), (False, True), (True, True)}  # fmt: skip
    for i in range(2):
        rows = ~following.idle[:, i]
        length = min(24, int(rows.sum()))
        assert length >= 20
        for name in ("obs", "actions", "rewards", "next_obs", "terminated", "truncated"):
            assert torch.equal(getattr(following, name)[rows, i][:length], getattr(same, name)[:length, i]), name
    assert sorted(episodes)[:6] == sorted(others)[:6] and len(others) >= 6


@float64()
def test_idle_rows_teach_nothing(monkeypatch):
    """The update is that of the other rows, each with the advantage it has in a rollout without idle rows, whatever
    stands in them; minibatches differ by one row at most."""
    batch, _ = rollout(AutoresetMode.NEXT_STEP, 30)
    batch = ppo.Batch(*(x.double() if x.is_floating_point() else x for x in batch))
    args, found, sizes = settings(num_minibatches=4, update_epochs=2, gamma=0.9), [], []
    gae = ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda *args: found.append(gae(*args)) or found[-1])

    def counted(agent, obs, *others):
        sizes.append(len(obs))
        return ppo.ppo_loss(agent, obs, *others)

    def update(batch):
        agent, generator = linear_agent(2, DISCRETE), torch.Generator().manual_seed(0)
        return ppo.update(agent, torch.optim.SGD(agent.parameters(), 0.01), batch, generator, args, counted), weights(
            agent
        )

    first, moved = update(batch)
    used, agent = int((~batch.idle).sum()), linear_agent(2, DISCRETE)
    assert sum(sizes) == 2 * used < 2 * 60 and max(sizes) - min(sizes) <= 1
    for i in range(2):
        rows = ~batch.idle[:, i]
        obs, _, rewards, after, terminated, truncated, _ = (x[rows, i][:, None] for x in batch)
        with torch.no_grad():
            alone = gae(rewards, agent.value(obs), agent.value(after), terminated, terminated | truncated, 0.9, 0.95)
        close(found[0][rows, i], alone[:, 0])
    garbage = batch._replace(
        **{name: getattr(batch, name).clone() for name in ("obs", "actions", "rewards", "next_obs")}
    )
    for x in garbage[:4]:
        x[batch.idle] = 2 if x.dtype == torch.int64 else 77.0
    second, again = update(garbage)
    assert first == second and all(np.array_equal(moved[name], again[name]) for name in moved)


def test_cartpole_s_own_vector():
    """Of every row: the physics of a single environment from the same observation with the same action; an episode is
    cut off at its 15th step, where the true next observation is its last; the next one begins near the middle."""
    envs, single = (
        make_vector(lambda **more: make_env(*CARTPOLE, **more), 3, 1, "native"),
        gym.make("CartPole-v1").unwrapped,
    )
    obs, rng, ended, lengths, kinds = reset_vector(envs), np.random.default_rng(0), [], np.zeros(3, int), set()
    single.reset()
    for step in range(400):
        idle, actions = envs.log.idle.copy(), rng.integers(2, size=3)
        after, true_obs, rewards, terminated, truncated, episodes = step_vector(envs, actions, step)
        assert np.array_equal(after, true_obs)
        for i in range(3):
            if idle[i]:
                assert abs(after[i]).max() <= 0.05 and rewards[i] == 0 and not terminated[i] | truncated[i]
                continue
            single.state, single.steps_beyond_terminated = obs[i].astype(float), None
            expected, reward, over, *_ = single.step(actions[i])
            close(true_obs[i], expected, 1e-5)
            lengths[i] += 1
            assert (rewards[i], terminated[i], truncated[i]) == (reward, over, lengths[i] == 15)
            if over or lengths[i] == 15:
                kinds.add((bool(over), lengths[i] == 15))
                ended.append((float(lengths[i]), int(lengths[i])))
                lengths[i] = 0
        assert episodes == ended[len(ended) - len(episodes) :]
        obs = after
    assert kinds >= {(True, False), (False, True)}


@pytest.mark.parametrize("algo", [ppo, rnd])
def test_a_run_is_determined_by_its_seed(algo, tmp_path):
    args = [*SMALL[algo.NAME], *NATIVE, "--env-id", "CartPole-v1"]
    first, second, other = (new_run(algo, tmp_path, *args, "--seed", seed) for seed in (5, 5, 6))
    assert_same_result(first, second)
    assert metrics(first) != metrics(other)


def test_a_resumed_run_begins_new_episodes_and_says_so(tmp_path, capsys):
    args = [*SMALL["ppo"], *NATIVE, "--keep", 99]
    reference = new_run(ppo, tmp_path / "runs", *args)
    (reference / "curve.png").touch()
    rows = []
    for name in "ab":
        folder = stopped_after(96, reference, tmp_path / name)
        capsys.readouterr()
        command_line(ppo, "--resume", folder)
        assert "2 of 2 environments could not be brought back" in capsys.readouterr().out
        rows.append(metrics(folder))
    assert rows[0] == rows[1] and rows[0][-1]["step"] == 160
    assert rows[0][:3] == metrics(reference)[:3] and rows[0] != metrics(reference)


def test_a_new_episode_after_a_resume_is_another():
    envs = make_vector(lambda **more: make_env(*CARTPOLE, **more), 2, 1, "native")
    first = reset_vector(envs)
    assert np.array_equal(first, reset_vector(envs))
    envs.log.begin(0, 1)
    assert not np.array_equal(first, reset_vector(envs)) and len(np.unique(first, axis=0)) == 2


@pytest.mark.parametrize(
    "args, words",
    [
        (["--env-id", "Pendulum-v1"], ["Pendulum-v1", "vector entry point", "--vector sync"]),
        (["--num-minibatches", 16], ["--num-minibatches 16", "at least 4"]),
    ],
    ids=str,
)
def test_what_has_no_vector_of_its_own(args, words, tmp_path, capsys):
    with user_error(capsys, *words):
        command_line(ppo, *SMALL["ppo"], *NATIVE, *args, "--output-dir", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("fault", ["reset", "silent", "space"])
def test_a_vector_must_reset_itself_and_be_of_the_same_spaces(fault):
    make = scripted(AutoresetMode.DISABLED if fault == "reset" else AutoresetMode.SAME_STEP)

    def faulty(*args, num_envs: int = 0):
        envs = make(num_envs)
        if num_envs and fault == "silent":
            del envs.metadata["autoreset_mode"]
        if num_envs and fault == "space":
            envs.single_observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
        return envs

    with pytest.raises(UserError, match="--vector native .*--vector sync"):
        open_env(ppo.Args(vector="native"), faulty)


@pytest.mark.parametrize("frames, end", [(300, (False, True)), (3000, (True, False))])
def test_games_of_the_emulator_s_own_vector(frames, end):
    """The same seeds and actions with ALE's two ways to reset: what comes before an end is equal, and at the end the
    true next observation is what NEXT_STEP shows. Lost lives are terminated, the game goes on."""
    pytest.importorskip("ale_py", reason="not run: ale-py is not installed")

    def make(*kwargs, num_envs=0):
        kwargs = (f"max_num_frames_per_episode={frames}", *kwargs)
        return ppo_atari.make_atari("ALE/Breakout-v5", kwargs, num_envs=num_envs)

    envs = make_vector(make, 3, 1, "native")
    plain = gym.make_vec("ALE/Breakout-v5", 3, "vector_entry_point", repeat_action_probability=0.0, noop_max=30,
                         autoreset_mode="NextStep", max_num_frames_per_episode=frames)  # fmt: skip
    obs, rng = reset_vector(envs), np.random.default_rng(0)
    seed = int(np.random.SeedSequence([1, 0, 0, 0]).generate_state(1)[0] // 2)
    theirs, info = plain.reset(seed=seed)
    assert np.array_equal(obs, theirs)
    lives, ends, lost, running = info["lives"], set(), 0, np.ones(3, bool)
    for step in range(300):
        actions = rng.integers(4, size=3)
        obs, true_obs, _, terminated, truncated, _ = step_vector(envs, actions, step, lives=True)
        theirs, _, over, cut, info = plain.step(actions)
        fewer = (info["lives"] < lives) & ~(over | cut)
        for i in np.flatnonzero(running):
            assert np.array_equal(true_obs[i], theirs[i])
            assert (terminated[i], truncated[i]) == (over[i] or fewer[i], cut[i])
            lost += fewer[i]
            if over[i] or cut[i]:
                assert not np.array_equal(obs[i], true_obs[i])
                ends.add((bool(over[i]), bool(cut[i])))
                running[i] = False
        lives = info["lives"]
    assert lost and not running.any() and end in ends


def test_scores_of_the_emulator_s_own_vector():
    """A dot of Ms. Pacman is 10 points, not 1."""
    pytest.importorskip("ale_py", reason="not run: ale-py is not installed")
    envs = make_vector(lambda **more: ppo_atari.make_atari("ALE/MsPacman-v5", **more), 2, 1, "native")
    reset_vector(envs)
    rewards = np.array([step_vector(envs, np.array([3, 2]), step)[2] for step in range(100)])
    assert rewards.any() and not (rewards % 10).any()
