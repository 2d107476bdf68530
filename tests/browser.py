"""Debian's chromium without a window, spoken to over a pipe in its DevTools protocol. Its own flags would not do: a
window is at least 500 pixels wide, and one start for each page takes minutes."""

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium")
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync --hide-scrollbars --allow-file-access-from-files "
         "--remote-debugging-pipe").split()  # fmt: skip


class Browser:
    """One page. `complaints` collects errors of the console and exceptions."""

    def __init__(self, profile: Path):
        to_read, self.to_write = os.pipe()
        self.from_read, from_write = os.pipe()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        shell = f'exec "$@" 3<&{to_read} 4>&{from_write}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command], pass_fds=(to_read, from_write), stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(from_write)
        self.stream, self.numbers, self.events, self.complaints = open(self.from_read, "rb"), itertools.count(1), [], []
        self.rest, self.session = b"", None
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def receive(self) -> dict:
        while b"\0" not in self.rest:
            part = self.stream.read1(65536)
            assert part, "the browser has ended"
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown" or (
            message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error"
            or message.get("method") == "Runtime.consoleAPICalled" and parameters["type"] == "error"
        ):  # fmt: skip
            self.complaints.append(parameters)
        return message

    def send(self, method: str, **parameters) -> dict:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to_write, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != number:
            self.events.append(answer.get("method"))
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path, width: int, height: int = 900) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.events = []
        self.send("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self.events:
            self.events.append(self.receive().get("method"))

    def ask(self, expression: str):
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.stream.close()
        os.close(self.to_write)
