"""`torchrun tests/faulty_rank.py RANK MOMENT COUNT WHAT algos/X.py ...`: the script, one process of which has a fault.

RANK does WHAT (SIGKILL, SIGTERM, or sleep for so many seconds) when it comes to MOMENT for the COUNTth time. MOMENT:
rollout   before it samples a batch
update    between its gradients and their sum
save      with half of a checkpoint written (rank 0); on other ranks, before they wait for rank 0
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import utils.dist  # noqa: E402
import utils.lm  # noqa: E402

rank, moment, count, what = sys.argv[1:5]
sys.argv = sys.argv[5:]
seen = 0


def fault() -> None:
    global seen
    seen += 1
    if seen != int(count):
        return
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))
    else:
        time.sleep(float(what))


def before(module, name: str) -> None:
    function = getattr(module, name)

    def watched(*args, **kwargs):
        fault()
        return function(*args, **kwargs)

    setattr(module, name, watched)


def half_written(state, file, **how) -> None:
    save(state, file, **how)
    if not hasattr(file, "name"):  # what a resumed process sends to the others
        return
    file.flush()
    os.truncate(file.name, file.tell() // 2)
    fault()
    file.seek(0)
    file.truncate()
    save(state, file)


if os.environ["RANK"] == rank:
    if moment == "rollout":
        before(utils.lm, "sample")
    elif moment == "update":
        before(utils.dist, "clip_gradients")
    elif rank == "0":
        save, torch.save = torch.save, half_written
    else:
        before(utils.dist.Trained, "state_dict")
runpy.run_path(sys.argv[0], run_name="__main__")
