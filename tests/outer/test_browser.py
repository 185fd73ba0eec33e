"""The page at / in Chromium: it shows what the engine does, chats, asks for keys, and asks nobody else for anything."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from outer.browser import colour_scheme, console_of, new_browser, requests_of, wait_until, window
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from server.served import OPTIONS, Served

from octavo.server.options import ServerOptions

SHARED = list(range(20, 60))  # five blocks that prompts begin with alike


@pytest.fixture(scope="module")
def busy(tiny_folder: Path) -> Iterator[Served]:
    """A server with room for three sequences, of which the fourth waits."""
    served = Served(tiny_folder, OPTIONS, max_num_seqs=3)
    try:
        yield served.ready()
    finally:
        served.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[WebDriver]:
    """One browser for all of these tests."""
    driver = new_browser()
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def page(chromium: WebDriver, busy: Served) -> Iterator[WebDriver]:
    """The page, freshly opened on a wide screen; afterwards, what it asked for and said is judged."""
    yield from opened(chromium, busy.url)


def opened(chromium: WebDriver, url: str, allowed: str | None = None) -> Iterator[WebDriver]:
    window(chromium, 1400, 1000)
    colour_scheme(chromium, "light")
    requests_of(chromium)
    console_of(chromium)
    chromium.get(f"{url}/")
    yield chromium
    assert {urlsplit(asked).netloc for asked in requests_of(chromium)} == {urlsplit(url).netloc}
    assert [said for said in console_of(chromium) if allowed is None or allowed not in said] == []


def element(page: WebDriver, name: str) -> WebElement:
    return page.find_element(By.ID, name)


def text(page: WebDriver, name: str) -> str:
    return element(page, name).text


def number(page: WebDriver, name: str) -> float:
    return float(text(page, name).replace("–", "0").replace("%", "") or 0)


NUM_AT_ONCE = 8  # requests: more than run at once, so that some wait


def long_request(url: str, max_tokens: int = 440) -> dict[str, Any]:
    body = {"prompt": SHARED, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1, "user": "visitor"}
    answer: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
    return answer


def colours_of(page: WebDriver, canvas: str) -> set[str]:
    """Colours that a picture has, as #rrggbb, without those at the edges of shapes."""
    found: list[str] = page.execute_script(
        """
        const canvas = document.getElementById(arguments[0]);
        const copy = new OffscreenCanvas(canvas.width || 1, canvas.height || 1).getContext("2d");
        copy.drawImage(canvas, 0, 0);
        const data = copy.getImageData(0, 0, copy.canvas.width, copy.canvas.height).data;
        const counts = new Map();
        for (let i = 0; i < data.length; i += 4) {
          if (data[i + 3] !== 255) continue;
          const name = "#" + [0, 1, 2].map((k) => data[i + k].toString(16).padStart(2, "0")).join("");
          counts.set(name, (counts.get(name) || 0) + 1);
        }
        return [...counts].filter(([, count]) => count > 60).map(([name]) => name);
        """,
        canvas,
    )
    return set(found)


def colour(page: WebDriver, name: str) -> str:
    style = "return getComputedStyle(document.documentElement).getPropertyValue('--' + arguments[0]).trim()"
    return str(page.execute_script(style, name))


def test_requests_blocks_and_figures_move(page: WebDriver, busy: Served) -> None:
    long_request(busy.url, 1)  # leaves its blocks in the prefix cache
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        wait_until(page, lambda: text(page, "state") == "ready")
        seen: dict[str, float] = {}
        pictures: set[str] = set()

        def look() -> bool:
            for name in ("running", "waiting", "generated", "n-used", "n-shared", "n-cached", "n-free"):
                seen[name] = max(seen.get(name, 0.0), number(page, name))
            pictures.update(colours_of(page, "grid"))
            return all(seen.values())

        running: list[Future[dict[str, Any]]] = []
        while not look() and len(running) < 500:  # a fast machine is through before the page has looked
            num_live = sum(not request.done() for request in running)
            running += [threads.submit(long_request, busy.url) for _ in range(2 * NUM_AT_ONCE - num_live)]
        assert all(seen.values()), seen
        assert seen["running"] <= 3
        assert {colour(page, name) for name in ("used", "shared", "cached", "free")} <= pictures
        for request in running:
            assert request.result()["choices"][0]["finish_reason"] == "length"
    wait_until(page, lambda: number(page, "running") == number(page, "waiting") == number(page, "n-used") == 0)
    for name in ("first50", "first95", "gap50", "gap95", "queue50"):
        assert text(page, name).endswith((" s", " ms")), name
    assert number(page, "hits") > 50
    assert "256 blocks of 8 tokens" in text(page, "blocks")


def test_a_request_tells_its_timeline(page: WebDriver, busy: Served) -> None:
    name = long_request(busy.url, 5)["id"]
    wait_until(page, lambda: any(name in row.text for row in rows_of(page)))
    wait_until(page, lambda: click_row(page, name, "length"))
    wait_until(page, lambda: element(page, "timeline").is_displayed() and text(page, "t-name") == name)
    events = [item.text for item in element(page, "t-events").find_elements(By.TAG_NAME, "b")]
    assert events[:4] == ["received", "tokenised", "queued", "admitted"]
    assert events[-1] == "finished"
    assert "40 prompt tokens, 32 of them cached" in text(page, "t-facts")
    assert len(element(page, "t-bar").find_elements(By.TAG_NAME, "span")) == 3
    element(page, "t-close").click()
    assert not element(page, "timeline").is_displayed()
    rows_of(page)[0].send_keys(Keys.ENTER)  # by keyboard too
    wait_until(page, lambda: element(page, "timeline").is_displayed())
    element(page, "t-close").click()


def click_row(page: WebDriver, *texts: str) -> bool:
    """Click the one row with all of some texts."""
    [row] = [row for row in rows_of(page) if all(part in row.text for part in texts)]
    row.click()
    return True


def rows_of(page: WebDriver) -> list[WebElement]:
    return element(page, "requests").find_elements(By.TAG_NAME, "tr")


def bubbles(page: WebDriver, role: str) -> list[WebElement]:
    return page.find_elements(By.CSS_SELECTOR, f".said.{role}")


def test_the_chat_box_streams(page: WebDriver, busy: Served) -> None:
    page.execute_script(
        """
        window.lengths = new Set();
        const said = () => document.querySelectorAll(".said.assistant");
        const count = () => said().forEach((bubble) => lengths.add(bubble.textContent.length));
        new MutationObserver(count).observe(document.getElementById("talk"), { childList: true, subtree: true });
        """
    )
    element(page, "temperature").send_keys("0.5")
    element(page, "most").send_keys("150")
    element(page, "text").send_keys("Hello" + Keys.ENTER)
    wait_until(page, lambda: page.find_elements(By.CSS_SELECTOR, ".note"))
    assert [bubble.text for bubble in bubbles(page, "user")] == ["Hello"]
    assert page.execute_script("return lengths.size") > 5, "the answer came in one piece"
    note = page.find_element(By.CSS_SELECTOR, ".note")
    assert "tokens · first after" in note.text
    note.find_element(By.TAG_NAME, "button").click()
    wait_until(page, lambda: element(page, "timeline").is_displayed())
    assert "of at most 150" in text(page, "t-facts")
    element(page, "t-close").click()

    element(page, "most").clear()
    element(page, "text").send_keys("Go on" + Keys.ENTER)  # all that fits, and stopped midway
    wait_until(page, lambda: len(bubbles(page, "assistant")) == 2 and bubbles(page, "assistant")[1].text)
    if text(page, "send") == "Stop":
        element(page, "send").click()
    wait_until(page, lambda: text(page, "send") == "Send")
    busy.wait_until(busy.is_idle)
    element(page, "clear").click()
    assert bubbles(page, "user") == []


def test_an_error_is_said_in_the_chat(chromium: WebDriver, busy: Served) -> None:
    for page in opened(chromium, busy.url, allowed="400 (Bad Request)"):
        page.execute_script("document.getElementById('text').value = 'long '.repeat(3000)")
        element(page, "send").click()
        wait_until(page, lambda page=page: bubbles(page, "assistant")[0].text)
        assert "maximum context length is 512 tokens" in bubbles(page, "assistant")[0].text
        assert "failed" in str(bubbles(page, "assistant")[0].get_attribute("class"))


def test_a_key_is_asked_for_and_kept_in_the_tab(chromium: WebDriver, busy: Served) -> None:
    url = busy.listen(ServerOptions(api_keys=("secret",)))
    for page in opened(chromium, url, allowed="401 (Unauthorized)"):
        wait_until(page, lambda page=page: element(page, "ask").is_displayed())
        element(page, "ask-key").send_keys("wrong" + Keys.ENTER)
        wait_until(page, lambda page=page: "wrong" in text(page, "ask-error"))
        element(page, "ask-key").clear()
        element(page, "ask-key").send_keys("secret" + Keys.ENTER)
        wait_until(page, lambda page=page: text(page, "state") == "ready")
        assert not element(page, "ask").is_displayed()
        page.refresh()
        wait_until(page, lambda page=page: text(page, "state") == "ready")
        assert not element(page, "ask").is_displayed()
        page.execute_script("sessionStorage.clear()")


def test_dark_and_narrow(page: WebDriver, busy: Served) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.execute_script(background)
    colour_scheme(page, "dark")
    assert page.execute_script(background) != light
    # Pictures follow at the next look.
    wait_until(page, lambda: {colour(page, name) for name in ("free", "cached")} & colours_of(page, "grid"))
    for width in (1400, 900, 390, 320):
        window(page, width, 800)
        wait_until(page, lambda width=width: page.execute_script("return innerWidth") == width)
        overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.execute_script(overflow) <= 0, f"it scrolls sideways at {width}"
    for name in ("running", "grid", "text", "send"):
        box = element(page, name).rect
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 320, name
