"""All comparisons of speed, one after the other on an otherwise idle machine; within each the sides take turns.

    git clone https://github.com/vwxyzjn/cleanrl /tmp/cleanrl
    git clone https://github.com/corl-team/CORL /tmp/corl
    pip install -e ".[peers]"
    python benchmarks/peers/speed.py --cleanrl /tmp/cleanrl --corl /tmp/corl

Writes results/speed_*.json and the table of benchmarks/README.md. The scripts that it calls time one part alone:
control_speed.py, trl_grpo.py, trl_family.py, offline_corl.py.
"""

import os
import sys
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import page  # noqa: E402
from benchmarks.peers import control_speed, offline_corl, trl_family, trl_grpo  # noqa: E402

BUSY = 0.5  # processes that want to run, mean of the last minute


def main(cleanrl: Path, corl: Path, rounds: int = 3) -> None:
    """Times all sides in turn.

    Args:
        cleanrl: folder of a clone of CleanRL
        corl: folder of a clone of CORL
        rounds: runs of each side; of fewer than 3 nothing is written for control and offline
    """
    if (load := os.getloadavg()[0]) > BUSY:
        sys.exit(f"the machine does other work (load {load:.1f}): end it, and wait a minute")
    control_speed.main(cleanrl, rounds)
    trl_grpo.speed(rounds=rounds)
    trl_family.speed(rounds=rounds)
    offline_corl.speed(corl, rounds=rounds)
    page.write()


if __name__ == "__main__":
    tyro.cli(main)
