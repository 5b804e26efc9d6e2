"""The page at / in a browser, where there is one: typed, streamed, stopped, cleared, refused, on a phone; it
asks nobody but its server. Driven over the DevTools protocol (https://chromedevtools.github.io)."""

import asyncio
import contextlib
import itertools
import re
import shutil
import subprocess

import aiohttp
import pytest
from scripted import script
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


@pytest.fixture(scope="module", autouse=True)
def shallow_tiny():
    """The whole model, not one layer of it: its answers have text."""


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


@contextlib.asynccontextmanager
async def tab(browser: str, url: str):
    async with aiohttp.ClientSession() as session, session.ws_connect(browser, max_msg_size=0) as socket:
        page = Page(socket)
        await page.open(url)
        await page.until("document.getElementById('model').textContent.includes('API key')")
        await page.value(f"document.getElementById('key').value = '{KEY}'")
        await page.value("document.getElementById('key').dispatchEvent(new Event('change'))")
        await page.until("document.getElementById('model').textContent.startsWith('tiny, ')")
        yield page
        assert page.requested and all(asked.startswith((f"{url}/", "data:")) for asked in page.requested)
        assert not page.problems


def test_the_page_in_a_browser(browser):
    with ThreadServer(kv="int8") as server:
        asyncio.run(drive(browser, server))


async def drive(browser: str, server: ThreadServer) -> None:
    async with tab(browser, server.url) as page:
        assert await page.text("kv-format") == "int8" and await page.text("kv-bytes") == "1,632"
        await page.value("document.getElementById('temperature').value = 0")
        await page.value("document.getElementById('max-tokens').value = 12")
        await page.type("What is a <b>list</b>?")
        await page.until("document.querySelector('.answer small')?.textContent.includes('12 tokens')")
        assert (
            await page.value("document.querySelector('.question .plain').textContent")
            == "What is a <b>list</b>?"
        )
        assert await page.value("document.querySelector('.answer .markdown').textContent.length > 3")
        assert "token limit" in await page.value("document.querySelector('.state').textContent")
        await page.until("document.getElementById('generated').textContent !== '0'")
        await page.until("document.getElementById('kv-cached').textContent !== '0 tokens'")

        await page.value("document.getElementById('tab-completion').click()")
        await page.value("document.getElementById('max-tokens').value = 1900")
        await page.type("When a function is called, the")
        await page.until("document.querySelector('#log-completion .plain')?.textContent.length > 60")
        await page.until("document.getElementById('running').textContent === '1'")
        await page.value("document.getElementById('stop').click()")
        await page.until("document.querySelector('#log-completion .state')?.textContent === 'Stopped.'")
        await asyncio.to_thread(wait_idle, server)
        await page.until("document.getElementById('running').textContent === '0'")


HOSTILE = (
    "A *list*: <img src=x onerror=\"document.title='x'\"> [a](javascript:document.title='x') "
    "![b](https://evil.example/b.png) <script>document.title='x'</script>\n\n```py\n<b>1</b>\n```"
)
# what DOMPurify leaves of markup that `reader` in markdown.js would never make
PURIFIED = """(() => {
  const made = document.createElement("i");
  made.append(DOMPurify.sanitize(
    "<p style='color:red' id=prompt onclick=x>a<img src=x onerror=x><a href='javascript:x'>b</a>"
      + "<a href='//evil.example' target=_blank>c</a><script>x</script><form><input></form></p>", POLICY));
  return made.innerHTML;
})()"""
# messages of the requests that the page sends
WATCH = """
window.sent = [];
const real = window.fetch;
window.fetch = (path, options) => {
  if (options?.body) sent.push(JSON.parse(options.body).messages);
  return real(path, options);
};
"""


def test_conversations_in_a_browser(browser):
    with ThreadServer(kv="int8", engine={"max_model_len": 512}) as server:
        script(
            server.engine, server.tokenizer, {"list": HOSTILE, "story": "and so on " * 100, "cat": "A cat."}
        )
        asyncio.run(converse(browser, server))


async def converse(browser: str, server: ThreadServer) -> None:
    async with tab(browser, server.url) as page:
        idle = "document.getElementById('stop').hidden"
        await page.value(WATCH)
        # S38
        await page.type("A story")
        await page.until("document.querySelector('.markdown')?.textContent.length > 20")
        await page.value("document.getElementById('clear').click()")
        await page.type("A cat")
        await page.until("document.querySelector('.markdown')?.textContent === 'A cat.'")
        await page.until(idle)
        assert await page.value("sent") == [
            [{"role": "user", "content": "A story"}], [{"role": "user", "content": "A cat"}],
        ]  # fmt: skip
        # S39
        await page.type("cat " * 600)
        await page.until("!document.getElementById('error').hidden")
        await page.until("document.getElementById('prompt').value.length === 2400")
        await page.value("document.getElementById('prompt').value = ''")
        await page.type("The cat?")
        await page.until("document.querySelectorAll('.answer small').length === 2")
        await page.until(idle)
        assert [m["content"] for m in await page.value("sent.at(-1)")] == ["A cat", "A cat.", "The cat?"]
        assert await page.value("document.getElementById('error').hidden")
        # what a model says is text
        await page.value("document.getElementById('clear').click()")
        await page.type("A list")
        await page.until("document.querySelector('.code pre')?.textContent.startsWith('<b>1</b>')")
        await page.until(idle)
        assert await page.value("document.title") == "qrt"
        assert await page.value("document.querySelectorAll('img, .markdown script, .markdown b').length") == 0
        links = await page.value("[...document.querySelectorAll('a')].map((a) => a.href)")
        assert links == ["https://evil.example/b.png"]
        assert (
            await page.value("document.querySelector('.markdown a').relList.value") == "noopener noreferrer"
        )
        assert await page.value("document.querySelectorAll('.code .bar button').length") == 1
        assert await page.value(PURIFIED) == '<p>a<a>b</a><a target="_blank">c</a></p><p></p>'
        # S42
        await page.call(
            "Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True
        )
        await page.until("innerWidth === 390")
        assert await page.value("document.getElementById('log-chat').clientHeight") > 560
        assert await page.value("document.documentElement.scrollWidth") == 390
        assert not await page.value("document.getElementById('panel').checkVisibility()")
        await page.value("document.getElementById('panel-button').click()")
        assert await page.value("document.getElementById('panel').checkVisibility()")
        # a reload keeps what this tab has
        await page.call("Page.reload")
        await page.until("document.querySelector('.code pre')?.textContent.startsWith('<b>1</b>')")
        await page.until("document.getElementById('model').textContent.startsWith('tiny, ')")
