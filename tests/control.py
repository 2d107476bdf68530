"""What the tests of the control scripts share. Another script is one more row of SCRIPTS, and of helpers.SMALL."""

import pytest

from algos import ppo, sac

SCRIPTS = {"ppo": ppo, "sac": sac}
scripts = pytest.mark.parametrize("algo", SCRIPTS)
WALK = ["--env-id", "environments:Walk-v0"]
