"""PPO with an LSTM: algos/ppo_lstm.py."""

from tests.specs import Curve, Effect, Spec
from tests.specs.ppo import DOORKEY

BUGS = """
cuts-of-one-environment: minibatches have several environments, and each has its own ends
- begins[1:].any(1).nonzero()
+ begins[1:, 0].nonzero()

bootstrap-from-an-empty-memory: after the reset the state is what the next episode begins with
- after.append(state * args.memory)
+ after.append(state * ~begins[t][:, None] * 0)

bootstrap-from-the-memory-before: the state that goes into a step is at hand, too
- next_values = agent.value(batch.next_obs.flatten(0, 1), after).view_as(values)
+ next_values = agent.value(batch.next_obs.flatten(0, 1), after.roll(values.shape[1], 1)).view_as(values)

replayed-from-nothing: rollouts begin inside episodes
- rows = [batch.obs, batch.actions, batch.state,
+ rows = [batch.obs, batch.actions, batch.state * 0,

steps-and-environments-exchanged: (T, 2, N, H) and (2, T N, H) have as many numbers
- batch.after.transpose(0, 1).flatten(1, 2)
+ batch.after.reshape(2, -1, batch.after.shape[-1])

h-for-c: two states that are the same size
- (state[:1], state[1:])
+ (state[1:], state[:1])

memory-not-in-evaluation: a policy is a function of the observation, until it is not
- actions, state = agent.act(normalized, state, begins,
+ actions, _ = agent.act(normalized, state, begins,
"""

HIDDEN = dict(env_id="CartPoleNoVelocity-v0", total_timesteps=24_576, eval_every=0)
RECALL = dict(env_id="algos.environments.recall:Recall-v0", total_timesteps=51_200, eval_every=0, eval_episodes=100)

SPEC = Spec(
    "Recurrent PPO",
    small="--hidden-size 16",
    tests="parity_sb3 exact_ppo_lstm atari::test_channels_come_first resume_control wiring "
          "command_line_control::test_evaluate_gives_the_last_row",
    no_recipe="there is no paper of its own; --help has the settings",
    curves={
        "ppo_lstm-cartpole": Curve(
            HIDDEN | dict(eval_every=8192), "eval/return", numbers={"mean eval/return": "plain"},
        ),
        "ppo_lstm-doorkey": Curve(DOORKEY, "eval/return", numbers={}, slow=True),
    },
    effects={
        "ppo_lstm-cartpole": Effect(
            dict(lstm=("ppo_lstm", HIDDEN),
                 ppo=("ppo", HIDDEN | dict(env_id="algos.ppo_lstm:CartPoleNoVelocity-v0")),
                 control=("ppo_lstm", HIDDEN | dict(memory=False))),
            "last eval/return",
            claims={"lstm > 2 * ppo": 9, "lstm > 2 * control": 9},
        ),
        "ppo_lstm-recall": Effect(
            dict(lstm=("ppo_lstm", RECALL), ppo=("ppo", RECALL), control=("ppo_lstm", RECALL | dict(memory=False))),
            "last eval/return",
            claims={"lstm > 0.95": 9, "ppo < 0.5": 9, "control < 0.5": 9},
        ),
    },
    special=dict(num_minibatches=({}, 1), clip_coef=({"clip_coef": 0.01}, 0.005)),
)  # fmt: skip
