"""Records what the authors' own code of IQL and RLPD computes on fixed inputs, for tests/test_parity_updates.py.

    git clone https://github.com/ikostrikov/implicit_q_learning /tmp/iql           (recorded with its commit 09d7002)
    git clone https://github.com/ikostrikov/rlpd /tmp/rlpd                         (recorded with its commit c90fd4b)
    pip install jax==0.4.30 jaxlib==0.4.30 flax==0.8.5 optax==0.2.3 tensorflow-probability==0.24.0 "scipy<1.14" \
        ml_collections gymnasium safetensors
    python benchmarks/peers/make_authors_fixtures.py /tmp/iql /tmp/rlpd

writes tests/fixtures/authors.safetensors: minibatches, RLPD's noise and random subsets, and, under the authors' names,
every parameter at the start and after each update of `_update_jit` and `SACLearner.update`. `bc/` is IQL's actor at
temperature 0. Their code runs unchanged, in float64 and not compiled; what it draws at random is given.
"""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

PATH = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "authors.safetensors"
D, A, H, B, UPDATES = 3, 2, 8, 16, 4  # observations, actions, hidden units, rows of a minibatch
GAMMA, TAU, RATE, EXPECTILE, TEMPERATURE = 0.9, 0.1, 1e-2, 0.8, 6.0
CRITICS, SUBSET, ALPHA = 4, 2, 0.3


def make_inputs() -> dict[str, np.ndarray]:
    """A third of the rows terminates. The two kinds of noise are for s and for s'."""
    g = np.random.default_rng(0)
    return {"obs": g.normal(size=(UPDATES, B, D)), "actions": g.uniform(-1, 1, (UPDATES, B, A)),
            "rewards": g.normal(size=(UPDATES, B, 1)), "next_obs": g.normal(size=(UPDATES, B, D)),
            "terminated": (g.random((UPDATES, B, 1)) < 1 / 3).astype(float),
            "noise": g.normal(size=(UPDATES, 2, B, A)),
            "subset": np.array([g.permutation(CRITICS)[:SUBSET] for _ in range(UPDATES)])}  # fmt: skip


def record(learner, parts: tuple[str, ...], perturbed, update) -> dict[str, np.ndarray]:
    """Each parameter of the learner's `parts` (UPDATES + 1, ...): at the start, where `perturbed` moves what their code
    initialises, and after `update(learner, i)`."""
    import jax

    def numbers() -> dict[str, np.ndarray]:
        leaves = [(p, x) for p in parts for x in jax.tree_util.tree_leaves_with_path(getattr(learner, p).params)]
        return {"/".join([part, *(key.key for key in path)]): np.array(leaf) for part, (path, leaf) in leaves}

    for part in parts:
        model = getattr(learner, part)
        params = jax.tree_util.tree_map_with_path(perturbed, model.params)
        moments = model.tx and model.tx.init(params)  # in float64, as the parameters
        object.__setattr__(learner, part, model.replace(params=params, opt_state=moments))  # RLPD's is frozen
    states = [numbers()]
    for i in range(UPDATES):
        learner = update(learner, i) or learner
        states.append(numbers())
    return {name: np.stack([state[name] for state in states]) for name in states[0]}


def main(iql: str, rlpd: str) -> None:
    sys.path[:0] = [iql, rlpd]
    import flax
    import gymnasium as gym
    import jax
    import jax.numpy as jnp
    import tensorflow_probability.substrates.jax  # noqa: F401  (RLPD looks it up as an attribute)

    jax.config.update("jax_enable_x64", True)
    flax.config.update("flax_return_frozendict", True)  # as when IQL's code was written
    jax.tree_multimap = jax.tree_util.tree_map
    jax.jit = lambda function, **_: function
    sys.modules["gym"] = gym
    from common import Batch
    from learner import Learner
    from rlpd.agents.sac.sac_learner import SACLearner
    from rlpd.distributions.tanh_transformed import TanhTransformedDistribution

    inputs, g = make_inputs(), np.random.default_rng(2)

    def perturbed(path, x):
        """Biases and scales, too, and targets unlike critics. IQL's second standard deviation is below its bound."""
        if path[-1].key == "log_stds":
            return jnp.array([-0.5, -5.5])
        return jnp.array(x, float) + 0.4 * g.normal(size=x.shape)

    def update_iql(learner, i: int) -> None:
        learner.update(Batch(inputs["obs"][i], inputs["actions"][i], inputs["rewards"][i, :, 0],
                             1 - inputs["terminated"][i, :, 0], inputs["next_obs"][i]))  # fmt: skip

    def update_rlpd(learner, i: int):
        noise = iter(inputs["noise"][i][::-1])  # the critics' first

        def sample(self, **_):
            normal = self.distribution
            return self.bijector.forward(normal.loc + normal.stddev() * next(noise))

        batch = {"observations": inputs["obs"][i], "actions": inputs["actions"][i],
                 "rewards": inputs["rewards"][i, :, 0], "masks": 1 - inputs["terminated"][i, :, 0],
                 "next_observations": inputs["next_obs"][i]}  # fmt: skip
        with (mock.patch.object(TanhTransformedDistribution, "sample", sample),
              mock.patch("jax.random.choice", lambda *_, **__: inputs["subset"][i])):  # fmt: skip
            return learner.update(batch, 1)[0]

    def learner_of_iql(temperature: float):
        return Learner(0, inputs["obs"][0], inputs["actions"][0], RATE, RATE, RATE, (H, H), GAMMA, TAU, EXPECTILE,
                       temperature, opt_decay_schedule="none")  # fmt: skip

    learner = learner_of_iql(TEMPERATURE)
    found = record(learner, ("actor", "critic", "value", "target_critic"), perturbed, update_iql)
    tensors = {f"iql/{name}": x for name, x in found.items()}
    box = gym.spaces.Box
    learner = SACLearner.create(0, box(-1, 1, (D,)), box(-1, 1, (A,)), RATE, RATE, RATE, (H, H), GAMMA, TAU, CRITICS,
                                SUBSET, critic_layer_norm=True, init_temperature=ALPHA)  # fmt: skip
    found = record(learner, ("actor", "critic", "temp", "target_critic"), perturbed, update_rlpd)
    tensors |= {f"rlpd/{name}": x for name, x in found.items()}
    found = record(learner_of_iql(0.0), ("actor",), perturbed, update_iql)
    tensors |= {f"bc/{name}": x for name, x in found.items()}
    save_file({name: np.ascontiguousarray(x) for name, x in (inputs | tensors).items()}, PATH)
    print(f"{PATH.stat().st_size / 1024:.0f} KB in {PATH}")


if __name__ == "__main__":
    main(*sys.argv[1:])
