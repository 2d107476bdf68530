"""SAC's update, written again in NumPy for the whole family: forward passes, target, losses, Adam, the targets' lag.

No derivative is written down. A parameter is moved by i h, h = 1e-30; the imaginary part of the loss over h then is the
slope, to the last digit. Real parts decide at a kink, and stay what they are without i h.

A script that differs is a child of `Sac` with other hooks: `normal` or `policy`, `norm`, `q`, `target`, `climbed`, ...
Arrays have a minibatch's rows first; what `update` drew is given.
"""

import numpy as np

STEP, STATISTICS = 1e-30, ("mean", "variance", "passes")  # which are no parameters


class Sac:
    critics, targets, layers = "critics", "targets", (0, 2, 4)
    names, share, always_lags = ("q1", "q2"), 0.5, True

    def __init__(self, state: dict, args, rate: float, learned: bool):
        """state: name -> array; learned: whether the temperature is."""
        self.p = {name: np.array(array) for name, array in state.items()}
        self.args, self.rate, self.learned, self.moments, self.smallest = args, rate, learned, {}, set()

    def network(self, name: str, x, layers: tuple = ()):
        """Linear layers and norms, by their numbers; a number that is left out before the last one is a ReLU."""
        for number in layers or self.layers:
            weight, bias = self.p[f"{name}.{number}.weight"], self.p[f"{name}.{number}.bias"]
            x = x @ weight.T + bias if weight.ndim == 2 else weight * self.norm(f"{name}.{number}", x) + bias
            if number != self.layers[-1] and number + 1 not in self.layers:
                x = np.where(x.real > 0, x, 0)
        return x

    def normal(self, obs) -> tuple:
        """Mean and log standard deviation of u."""
        mean, log_std = np.split(self.network("actor.net", obs), 2, 1)
        return mean, np.where(log_std.real > 2, 2, np.where(log_std.real < -20, -20, log_std))

    def policy(self, obs, noise) -> tuple:
        """Actions, and their log-densities in a column."""
        mean, log_std = self.normal(obs)
        u = mean + np.exp(log_std) * noise
        logps = -(noise**2) / 2 - log_std - np.log(2 * np.pi) / 2 + 2 * np.log(np.cosh(u))
        return np.tanh(u), logps.sum(1)[:, None]

    def q(self, part: str, obs, actions) -> list:
        return [self.network(f"{part}.{name}", np.hstack([obs, actions])) for name in self.names]

    def lowest(self, part: str, q):
        which = np.real(q := np.stack(q)).argmin(0)
        self.smallest |= {(part, number) for number in which.flat}
        return np.take_along_axis(q, which[None], 0)[0]

    def climbed(self, q):
        """What the actor maximises."""
        return self.lowest("critics", q)

    def alpha(self):
        return np.exp(self.p["log_alpha"])

    def target(self, batch, noise):
        actions, logps = self.policy(batch.next_obs, noise)
        return self.backup(batch, self.lowest("targets", self.q("targets", batch.next_obs, actions)), logps)

    def backup(self, batch, value, logps):
        value = value - self.alpha() * logps
        return np.where(batch.terminated == 1, batch.rewards, batch.rewards + self.args.gamma * value)

    def critic_loss(self, batch, target):
        q = self.q(self.critics, batch.obs, batch.actions)
        self.first = q[0].real
        return sum(((x - target) ** 2).sum() * self.share / len(x) for x in q)

    def actor_loss(self, batch, noise):
        actions, logps = self.policy(batch.obs, noise)
        self.logps = logps.real
        return (self.alpha() * logps - self.climbed(self.q(self.critics, batch.obs, actions))).sum() / len(logps)

    def moves(self, number: int) -> bool:
        """Whether the actor does in this update."""
        return True

    def step(self, part: str, loss) -> dict:
        """Moves the parameters of a part by Adam; returns their slopes."""
        names = [name for name in self.p if name.partition(".")[0] == part and not name.endswith(STATISTICS)]
        slopes = {name: np.zeros(self.p[name].shape) for name in names}
        for name, slope in slopes.items():
            x = self.p[name]
            for index in np.ndindex(x.shape):
                self.p[name] = np.array(x, complex)
                self.p[name][index] += STEP * 1j
                slope[index] = loss().imag / STEP
            self.p[name] = x
        for name, slope in slopes.items():
            m, v, t = self.moments.get(name, (0, 0, 0))
            self.moments[name] = m, v, t = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2, t + 1
            self.p[name] = self.p[name] - self.rate * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        return slopes

    def move_actor(self, batch, noise) -> dict:
        self.step("actor", lambda: self.actor_loss(batch, noise))
        if self.learned:
            self.step("log_alpha", lambda: -(self.alpha() * (self.logps + self.args.target_entropy)).mean())
        return {"entropy": -self.logps.mean(), "alpha": self.alpha()}

    def lag(self) -> None:
        for name, x in self.p.items():
            if name.startswith("targets"):
                follows = self.p[name.replace("targets", "critics")]
                self.p[name] = x + self.args.tau * (follows - x)

    def update(self, batch, number: int, drawn: dict) -> dict:
        """drawn: loss -> what `update` drew for it, by name. Returns the metrics."""
        target = self.target(batch, **drawn["critic_loss"])
        slopes = self.step(self.critics, lambda: self.critic_loss(batch, target))
        metrics = {"q": self.first.mean(), "td_error": np.abs(self.first - target).mean(),
                   "grad_norm": np.sqrt(sum((x**2).sum() for x in slopes.values()))}  # fmt: skip
        moves = self.moves(number)
        if moves:
            metrics |= self.move_actor(batch, **drawn["actor_loss"])
        if moves or self.always_lags:
            self.lag()
        return metrics


class Ddpg(Sac):
    """Its targets, of the actor too, are called target_; td3.py is a child."""

    critics, targets, share = "critic", "target_critic", 1.0

    def policy(self, obs, part: str = "actor"):
        return np.tanh(self.network(f"{part}.net", obs))

    def q(self, part: str, obs, actions) -> list:
        return [self.network(f"{part}.net", np.hstack([obs, actions]))]

    def target(self, batch):
        (value,) = self.q(self.targets, batch.next_obs, self.policy(batch.next_obs, "target_actor"))
        return self.backup(batch, value, 0)

    def alpha(self):
        return 0

    def move_actor(self, batch) -> dict:
        def loss():
            self.of_policy = self.q(self.critics, batch.obs, self.policy(batch.obs))[0].mean()
            return -self.of_policy

        self.step("actor", loss)
        return {"q_policy": self.of_policy.real}

    def lag(self) -> None:
        for name, x in self.p.items():
            if name.startswith("target_"):
                self.p[name] = x + self.args.tau * (self.p[name.removeprefix("target_")] - x)
