"""Many processes: the same mathematics as one, and what is refused. Most tests read what one job of two processes found
(tests/two_processes.py), which runs once, whatever the number of pytest's workers."""

import json
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from filelock import FileLock
from helpers import REPO
from two_processes import CASES, RESUMED

from algos import dapo, dpo, grpo, kto, online_dpo, orpo, ppo_lm, rloo, sft, simpo
from utils.distributed import deal, shard_settings, share, together
from utils.errors import UserError
from utils.models import load_model, share_work

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WAYS = [f"{name}, {way}" for name, (_, _, ways) in CASES.items() for way in ways]


def under_torchrun(*command, cwd=REPO, timeout=300) -> subprocess.CompletedProcess:
    return subprocess.run([*TORCHRUN, *map(str, command)], capture_output=True, text=True, cwd=cwd, timeout=timeout,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip


@pytest.fixture(scope="session")
def found(tmp_path_factory) -> dict:
    """What the job found, of all workers' runs together: the first that comes starts it, the others wait."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder) / "two-processes"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "ended").exists():
            ended = subprocess.run([sys.executable, "tests/two_processes.py", folder], capture_output=True, text=True,
                                   cwd=REPO, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
            (folder / "ended").write_text(f"exit code {ended.returncode}\n{ended.stderr}")
    why = (folder / "ended").read_text()
    assert why.startswith("exit code 0\n"), why
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", WAYS)
def test_two_processes_compute_what_one_does(found, case):
    """The same tokens, gradients of every optimizer step, metrics and final weights, in three steps. FSDP adds in
    another order and repeats prompts, which replicas share: no more than rounding either."""
    result, exact = found[case], "float32" not in case
    assert result["tokens"] and (result["sampled"] or "reward_model" in case)
    assert result["steps"] >= 3 and max(result["gradients"][: None if exact else 1]) < (1e-10 if exact else 1e-5)
    assert max(result["metrics"]) < (1e-10 if exact else 1e-4)
    assert result["names"] and result["weights"] < (1e-7 if "lora" in case else 1e-10 if exact else 1e-4)


@pytest.mark.parametrize("case", RESUMED)
def test_a_checkpoint_goes_on_with_another_number_of_processes(found, case):
    """After two of three steps: the last one is what it would have been, bit for bit where nothing changes."""
    result, (began, went_on) = found[case], RESUMED[case]
    assert result["steps"] == 1 and result["tokens"] and max(result["gradients"] + result["metrics"]) < 1e-10
    assert max(result["beside one"]["gradients"]) < 1e-10 and result["beside one"]["weights"] < 1e-10
    if began == went_on:
        assert result["equal rows"] and result["equal weights"] and max(result["gradients"]) == 0


def test_a_rank_ends_where_it_stops():
    """Nothing that Python does on its way out is done, not even by threads of gloo; output is not lost."""
    code = """import atexit, torch.distributed as dist, utils.distributed
atexit.register(print, "late")
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
print("done")
utils.distributed.stop(7)"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert (ended.returncode, ended.stdout) == (7, "done\n")


def ranks(monkeypatch, count: int):
    """Yields in turn as each rank of `count`."""
    for rank in range(count):
        monkeypatch.setenv("WORLD_SIZE", str(count))
        monkeypatch.setenv("RANK", str(rank))
        yield rank


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("items", [1, 5, 16, 17])
def test_every_item_is_dealt_once(monkeypatch, count, items):
    shares = [list(share(range(items))) for _ in ranks(monkeypatch, count)]
    assert sorted(sum(shares, [])) == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    if items % (2 * count) == 0:  # forth and back: as much work for all, where items become smaller
        assert len(set(map(sum, shares))) == 1


def test_shards_run_equally_many_passes(monkeypatch):
    """A rank with fewer items repeats the first one, which does not count. Replicas do not."""
    sharded = type("FSDPLinear", (torch.nn.Linear,), {"unshard": None})  # FSDP makes such classes
    alike = [[counts for _, counts in deal("abc", torch.nn.Linear(1, 1))] for _ in ranks(monkeypatch, 2)]
    padded = [list(deal("abc", sharded(1, 1))) for _ in ranks(monkeypatch, 2)]
    assert alike == [[True], [True, True]]
    assert padded == [[("a", True), ("a", False)], [("b", True), ("c", True)]]


def test_one_process_needs_no_others():
    assert together(lambda: 5) == [5] and not torch.distributed.is_initialized()


@pytest.mark.parametrize("module", [grpo, dapo, rloo, ppo_lm, online_dpo])
@pytest.mark.parametrize("row", ["full", "lora"])
def test_real_models_are_sampled_in_batches_for_eight_processes(module, row, monkeypatch):
    """At least 16, without a flag, and each process has work in the update."""
    args = module.Args(**module.PRESETS[row])
    group = args.num_generations
    assert args.num_prompts / max(1, args.sample_batch_size // group) >= 16
    for _ in ranks(monkeypatch, 8):
        assert share_work(args, True) in ("", f"\nmicro_batch_size is {args.micro_batch_size}, so that each of 8 "
                                          "processes has work")  # fmt: skip
    minibatches = getattr(args, "num_minibatches", 1)
    assert args.num_prompts * group / minibatches / args.micro_batch_size >= 8 and args.micro_batch_size % group == 0


@pytest.mark.parametrize("module", [grpo, dapo, rloo, ppo_lm, online_dpo, sft, dpo, simpo, orpo, kto])
@pytest.mark.parametrize("count", [2, 3])
def test_too_few_batches_are_refused_with_what_to_type(module, count, monkeypatch):
    """With the shipped model one batch may be the whole step, as its curves were recorded. What the error says works,
    and the least change too: one completion more at once is refused again."""
    args = module.Args(**module.PRESETS["tiny"])
    for _ in ranks(monkeypatch, count):
        if hasattr(args, "num_prompts"):
            group, most = args.num_generations, args.num_prompts // count
            if args.num_prompts * group // count < args.sample_batch_size:
                with pytest.raises(UserError, match="give --sample-batch-size") as error:
                    share_work(args, True)
                args.sample_batch_size = int(re.search(r"give --sample-batch-size (\d+)", str(error.value))[1])
                assert args.sample_batch_size == most * group
        share_work(args, True)
    rows = args.num_prompts * args.num_generations if hasattr(args, "num_prompts") else args.batch_size
    assert rows // args.micro_batch_size >= count


def test_fewer_prompts_than_processes_are_refused(monkeypatch):
    args = grpo.Args(**grpo.PRESETS["tiny"] | dict(num_prompts=2))
    for _ in ranks(monkeypatch, 3):
        with pytest.raises(UserError, match="--num-prompts 2 is too few for 3 processes: give at least 3"):
            share_work(args, True)


def test_the_users_own_micro_batch_stays(monkeypatch):
    for _ in ranks(monkeypatch, 8):
        args = dpo.Args(**dpo.PRESETS["tiny"] | dict(micro_batch_size=64))
        assert share_work(args, False) == "" and args.micro_batch_size == 64


def test_shards_need_processes():
    with pytest.raises(UserError, match="torchrun --nproc-per-node"):
        load_model("utils/tiny_model", fsdp=True)


@pytest.mark.parametrize("older", [None, lambda fsdp_size: None])  # without the class; without mixed precision
def test_shards_need_a_transformers_that_makes_them(older, monkeypatch):
    module = types.ModuleType("transformers.distributed")
    if older:
        module.DistributedConfig = older
    monkeypatch.setitem(sys.modules, "transformers.distributed", module)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="transformers 5.14"):
        shard_settings(torch.device("cpu"), "float32")


@pytest.mark.parametrize(
    "command, says",
    [
        ("algos/grpo.py --max-steps 1", "give --sample-batch-size 256"),
        ("algos/grpo.py --max-steps none", "Error parsing --max-steps"),
        ("algos/ppo.py", "start it without torchrun"),
        ("algos/sft.py --fsdp", "give --model a folder or a hub name"),
    ],
)
def test_an_error_is_shown_once_before_what_torchrun_adds(command, says, tmp_path):
    ended = under_torchrun(*command.split(), "--output-dir", tmp_path)
    assert ended.returncode == 1 and not list(tmp_path.iterdir())
    assert ended.stderr.count(says) == 1 and "Traceback" not in ended.stderr.partition(says)[0]
