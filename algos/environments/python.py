"""python algos/grpo_multiturn.py --environment python --task questions.jsonl --model ORG/NAME

A Python interpreter (ReTool, arXiv 2504.11536): what the code prints. Each call is a process of its own, with limits of
time, memory and output. This is not a security boundary: code can read and delete your files. Run models that you do
not trust in a container.
"""

import os
import signal
import subprocess
import sys
import tempfile

from algos.environments.tool import Tool

LIMITED = """import resource, sys
cpu, memory, size = map(int, sys.argv[1:])
for name, soft, hard in (("CPU", cpu, cpu + 1), ("AS", memory, memory), ("FSIZE", size, size), ("CORE", 0, 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (soft, hard))  # at its hard limit it would die of SIGKILL
exec(compile(sys.stdin.read(), "<python>", "exec"), {"__name__": "__main__"})
"""


def load(_: str) -> type:
    return Python


class Python(Tool):
    tag, shown, stop = "python", "output", ("</python>", "</answer>")
    seconds, megabytes = 5, 512
    characters = 2000  # of the output; what is longer loses its middle

    def use(self, call: str) -> str:
        output, half = run_python(call, self.seconds, self.megabytes), self.characters // 2
        return output if len(output) <= self.characters else f"{output[:half]}\n...\n{output[-half:]}"


def run_python(code: str, seconds: int, megabytes: int) -> str:
    """What a Python program prints, errors included. It is killed after `seconds`, with all processes it began."""
    limits = map(str, (seconds, megabytes << 20, 1 << 20))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        child = subprocess.Popen([sys.executable, "-I", "-c", LIMITED, *limits], stdin=subprocess.PIPE, stdout=output,
                                 stderr=subprocess.STDOUT, cwd=folder, env={}, start_new_session=True)  # fmt: skip
        try:
            child.communicate(code.encode(errors="replace"), timeout=seconds)
            late = child.returncode == -signal.SIGXCPU
        except subprocess.TimeoutExpired:
            late = True
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return text + f"\nTimeoutError: longer than {seconds} seconds" * late
