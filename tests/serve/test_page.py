"""The page at / in a real browser, where there is one: typed, streamed, stopped, figures that move, no key at
first; it asks nobody but its server. Driven over the DevTools protocol (https://chromedevtools.github.io)."""

import asyncio
import itertools
import re
import shutil
import subprocess

import aiohttp
import pytest
from servers import KEY, ThreadServer, wait_idle

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
SECONDS = 60.0  # ends a wait for what will never come


class Page:
    """One tab. `requested` are the URLs it has asked for, `problems` what its console says of errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self._session: str | None = None
        self.requested: list[str] = []
        self.problems: list[str] = []

    async def call(self, method: str, **params):
        """A command's result; events that come before it are noted."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": self._session} if self._session else {}))
        while (reply := await self._socket.receive_json(timeout=SECONDS)).get("id") != number:
            match reply.get("method"):
                case "Network.requestWillBeSent":
                    self.requested.append(reply["params"]["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.problems.append(str(reply["params"]))
        assert "error" not in reply, reply
        return reply["result"]

    async def open(self, url: str) -> None:
        """In a new tab, watched from its first request."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Network", "Runtime", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until(f"document.readyState === 'complete' && location.href.startsWith('{url}')")

    async def value(self, expression: str):
        """Of JavaScript in the page."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def text(self, id: str) -> str:
        return await self.value(f"document.getElementById('{id}')?.textContent ?? ''")

    async def until(self, expression: str) -> None:
        """Until it holds."""
        async with asyncio.timeout(SECONDS):
            while not await self.value(expression):
                await asyncio.sleep(0.05)

    async def type(self, text: str) -> None:
        """Into the field for prompts, by the keyboard, and Enter."""
        await self.value("document.getElementById('prompt').focus()")
        await self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13
            )


@pytest.fixture
def browser(tmp_path):
    """The address of a Chromium's DevTools."""
    command = [CHROMIUM, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={tmp_path}", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr:
                if found := re.search(r"ws://\S+", line):
                    yield found[0]
                    break
            else:
                pytest.fail("Chromium has ended")
        finally:
            process.kill()


def test_the_page_in_a_browser(browser):
    with ThreadServer(kv="int8") as server:
        asyncio.run(drive(browser, server))


async def drive(browser: str, server: ThreadServer) -> None:
    async with aiohttp.ClientSession() as session, session.ws_connect(browser, max_msg_size=0) as socket:
        page = Page(socket)
        await page.open(server.url)
        await page.until("document.getElementById('model').textContent.includes('API key')")
        await page.value(f"document.getElementById('key').value = '{KEY}'")
        await page.until("document.getElementById('model').textContent.startsWith('tiny, ')")
        assert await page.text("kv-format") == "int8" and await page.text("kv-bytes") == "1,632"

        await page.value("document.getElementById('temperature').value = 0")
        await page.value("document.getElementById('max-tokens').value = 12")
        await page.type("What is a <b>list</b>?")
        await page.until("document.querySelector('.assistant small')?.textContent.includes('tokens')")
        assert await page.value("document.querySelector('.user').textContent") == "What is a <b>list</b>?"
        answer, note = [
            await page.value(f"document.querySelector('.assistant{x}').textContent") for x in ("", " small")
        ]
        assert len(answer) > len(note) + 3 and "12 tokens" in note
        await page.until("document.getElementById('generated').textContent !== '0'")
        await page.until("document.getElementById('kv-cached').textContent !== '0 tokens'")

        await page.value("document.getElementById('tab-completion').click()")
        await page.value("document.getElementById('max-tokens').value = 1900")
        await page.type("When a function is called, the")
        await page.until("document.querySelector('.assistant').textContent.length > 60")
        await page.until("document.getElementById('running').textContent === '1'")
        await page.value("document.getElementById('stop').click()")
        await page.until("document.querySelector('.assistant small')?.textContent.includes('stopped')")
        await asyncio.to_thread(wait_idle, server)
        await page.until("document.getElementById('running').textContent === '0'")

        assert page.requested and all(url.startswith((f"{server.url}/", "data:")) for url in page.requested)
        assert not page.problems
