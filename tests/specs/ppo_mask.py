"""PPO with action masks: algos/ppo_mask.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
masked-in-acting-only: the action is what must be valid; the probabilities that are trained keep all actions
- out = self.logits(obs)
-         logp = entropy
+ out = self.actor(obs[..., sum(self.parts) :])
+         logp = entropy

masked-in-training-only: the loss is where the mask is written about
- out = self.logits(obs)
-         return torch
+ out = self.actor(obs[..., sum(self.parts) :])
+         return torch

masked-to-zero: a logit of 0 is as likely as e^0, not impossible
- == 0, -torch.inf)
+ == 0, 0.0)

mask-is-normalised: it comes with the observation, which is
-         scaled[:, : self.masks] = obs[:, : self.masks]

mask-is-shown-to-the-value: one slice is forgotten where two are needed
- return self.critic(obs[..., sum(self.parts) :])[..., 0]
+ return self.critic(obs[..., : -sum(self.parts)])[..., 0]

mask-of-the-last-state-is-checked: at the end of a game nothing is allowed
- self.with_mask(obs, info, terminated or truncated)
+ self.with_mask(obs, info)

info-goes-before-nothing: an environment that has both gives the newest in info
- if "action_mask" in info:
+ if "action_masks" in info:

statistics-of-the-mask-are-saved: they stand before those of the observation
- state[name][self.masks :]
+ state[name][: self.masks]
"""

BOARD = dict(env_id="Board-v0", total_timesteps=8192, eval_every=0)
ALL_ALLOWED = dict(env_kwargs=("mask=false",))

SPEC = Spec(
    "Maskable PPO, arXiv 2006.14171",
    tests="exact_ppo_mask exact_ppo parity_sb3 resume_control wiring "
          "command_line_control::test_evaluate_gives_the_last_row",
    no_recipe="the paper's experiments are of MicroRTS, which needs Java; its hyper-parameters are PPO's of Atari",
    curves={"ppo_mask-board": Curve(
        BOARD | dict(eval_every=2048), "eval/return_stochastic",
        numbers={"mean eval/return_stochastic": "plain", "last eval/return_stochastic": "plain"},
    )},
    effects={"ppo_mask-board": Effect(
        dict(mask=("ppo_mask", BOARD), ppo=("ppo", BOARD | dict(env_id="algos.ppo_mask:Board-v0")),
             control=("ppo_mask", BOARD | ALL_ALLOWED)),
        "last eval/return_stochastic",
        claims={"mask > ppo / 3": 9, "control < 3 * mask": 9, "control == ppo": 10},
    )},
    flags=dict(env_id="Board-v0"),
    special=dict(env_id=({}, "environments:Toll-v0"), env_kwargs=({}, ("n=3",))),
    noise=dict(env_id="environments:Toll-v0", env_kwargs=("label=noisy",)),
)  # fmt: skip
