"""Debian's Chromium without a window, and what it asked for."""

import json
import shutil
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

__all__ = ["colour_scheme", "console_of", "new_browser", "requests_of", "wait_until", "window"]

SECONDS = 60  # for what a page waits for, on a machine that does other things


def new_browser() -> WebDriver:
    """A browser that notes what it asks for, and what its console says."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "disable-background-networking"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver") or "chromedriver"))
    driver.set_page_load_timeout(SECONDS)
    driver.set_script_timeout(SECONDS)
    return driver


def window(browser: WebDriver, width: int, height: int) -> None:
    """How large the page is, in CSS pixels."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def colour_scheme(browser: WebDriver, scheme: str) -> None:
    """What the user prefers: light or dark."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def wait_until(browser: WebDriver, condition: Any) -> None:
    """Return once it holds."""
    # An element may be replaced between finding and reading it: then it is looked for again.
    stale = (StaleElementReferenceException,)
    WebDriverWait(browser, SECONDS, poll_frequency=0.05, ignored_exceptions=stale).until(lambda _: condition())


def requests_of(browser: WebDriver) -> list[str]:
    """Addresses that the browser asked for since it was last asked."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]


def console_of(browser: WebDriver) -> list[str]:
    """What the console said since it was last asked: errors, warnings and the rest."""
    return [f"{entry['level']}: {entry['message']}" for entry in browser.get_log("browser")]
