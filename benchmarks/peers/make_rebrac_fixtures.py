"""Updates of the authors' ReBRAC, for tests/test_parity_rebrac.py.

    git clone https://github.com/tinkoff-ai/ReBRAC, commit 694385b
    pip install jax flax optax chex tqdm          recorded with VERSIONS
    python benchmarks/peers/make_rebrac_fixtures.py ReBRAC

In float64, with networks of H units, and with the noise of the fixture in place of jax's. What is not used here is
imported as empty modules. The authors move their target actor towards the actor before its step; here it moves towards
the new one, as in TD3.
"""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

PATH = Path(__file__).resolve().parents[2] / "tests/fixtures/rebrac.safetensors"
D, A, H, B, UPDATES = 3, 2, 8, 16, 4
SETTINGS = dict(tau=0.1, policy_noise=0.4, noise_clip=0.5, actor_bc=0.3, critic_bc=0.2)
FIELDS = {"obs": (D,), "actions": (A,), "rewards": (1,), "terminated": (1,), "next_obs": (D,), "next_actions": (A,),
          "noise": (A,)}  # fmt: skip


def make_inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = {name: rng.normal(size=(UPDATES, B, *shape)) for name, shape in FIELDS.items()}
    inputs |= {name: np.tanh(inputs[name]) for name in ("actions", "next_actions")}
    return inputs | {"terminated": (inputs["terminated"] > 1) * 1.0}


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    for name in ("wandb", "pyrallis", "gym", "d4rl", "distrax", "src.utils.buffer"):
        sys.modules[name] = mock.MagicMock(Transformed=object)
    import jax
    import optax
    from flax.traverse_util import flatten_dict

    jax.config.update("jax_enable_x64", True)
    from src.algorithms import rebrac

    adam, inputs, states = optax.adam(1e-2), make_inputs(), []
    nets = rebrac.DetActor(A, H, False, 3), rebrac.EnsembleCritic(H, 2, True, 3)
    examples = (np.zeros((1, D)),), (np.zeros((1, D)), np.zeros((1, A)))
    actor, critic = (
        rebrac.CriticTrainState.create(apply_fn=net.apply, params=params, target_params=params, tx=adam)
        for net, example in zip(nets, examples)
        for params in [jax.tree_util.tree_map(np.float64, net.init(jax.random.PRNGKey(0), *example))]
    )
    metrics = mock.MagicMock()
    for i in range(UPDATES + 1):
        parts = {"actor": actor.params, "target_actor": actor.target_params, "critics": critic.params,
                 "target_critics": critic.target_params}  # fmt: skip
        states.append({name: np.asarray(x) for name, x in flatten_dict(parts, sep="/").items()})
        if i == UPDATES:
            break
        names = dict(states="obs", next_states="next_obs", dones="terminated")
        batch = {theirs: inputs[names.get(theirs, theirs)][i]
                 for theirs in ("states", "actions", "rewards", "dones", "next_states", "next_actions")}  # fmt: skip
        batch |= {name: batch[name][:, 0] for name in ("rewards", "dones")}
        key, tau = jax.random.PRNGKey(0), SETTINGS["tau"]
        with mock.patch.object(jax.random, "normal", lambda *_, i=i: inputs["noise"][i]):
            _, critic, _ = rebrac.update_critic(key, actor, critic, batch, 0.99, SETTINGS["critic_bc"], tau,
                                                SETTINGS["policy_noise"], SETTINGS["noise_clip"], metrics)  # fmt: skip
        if i % 2:
            lagging = actor.target_params
            _, actor, critic, _ = rebrac.update_actor(
                key, actor, critic, batch, SETTINGS["actor_bc"], tau, True, metrics
            )
            actor = actor.replace(target_params=optax.incremental_update(actor.params, lagging, tau))
    save_file(inputs | {name: np.stack([s[name] for s in states]) for name in states[0]}, PATH)


if __name__ == "__main__":
    main(sys.argv[1])
