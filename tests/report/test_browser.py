"""The pages as a person meets them, in Chromium: no error in the console, the timeline zooms, tables sort, both schemes, a phone.

With WEFT_SCREENSHOTS=docs the pictures of the documentation are made anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.conftest import EVERY, NAMES
from weft import Mesh, lang, trace
from weft.report import html

pytestmark = pytest.mark.timeout(400)  # the pages take a while to make on a busy machine
WAIT = 60  # seconds; a busy machine is slow to start a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium with its driver here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    found.set_page_load_timeout(WAIT)
    found.set_script_timeout(WAIT)
    yield found
    found.quit()


def show(browser: Any, page: Path, scheme: str = "light", width: int = 1280, height: int = 1000, scale: float = 1) -> None:
    """Open a page as a reader with this scheme and screen would."""
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


def errors(browser: Any) -> list[Any]:
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def shown(browser: Any) -> tuple[float, float]:
    canvas = browser.find_element("id", "timeline")
    return float(canvas.get_attribute("data-from")), float(canvas.get_attribute("data-to"))


def background(browser: Any) -> str:
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_opens_without_error(browser: Any, pages: dict[str, Path], name: str, scheme: str) -> None:
    show(browser, pages[name], scheme)
    assert errors(browser) == []
    red = int(background(browser).split("(")[1].split(",")[0])
    assert (red > 200) is (scheme == "light")
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    if folder := os.environ.get("WEFT_SCREENSHOTS"):
        height = min(3600, browser.execute_script("return document.documentElement.scrollHeight"))
        show(browser, pages[name], scheme, height=height, scale=0.6)
        browser.save_screenshot(f"{folder}/report-{name}-{scheme}.png")
        if name == "llama3-8b-plan":  # the README's: as much as fits a screen
            show(browser, pages[name], scheme, height=1000, scale=0.8)
            browser.save_screenshot(f"{folder}/report-first-screen-{scheme}.png")


@pytest.mark.parametrize("name", EVERY)
def test_a_page_fits_a_phone(browser: Any, pages: dict[str, Path], name: str) -> None:
    show(browser, pages[name], width=390, height=844)
    assert errors(browser) == []
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.execute_script("return document.getElementById('timeline').clientWidth") > 250
    if (folder := os.environ.get("WEFT_SCREENSHOTS")) and name == "llama3-8b-plan":
        for scheme in ("light", "dark"):
            show(browser, pages[name], scheme, width=390, height=1300, scale=2)
            browser.save_screenshot(f"{folder}/report-phone-{scheme}.png")


@pytest.mark.parametrize("name", NAMES)
def test_the_timeline_zooms(browser: Any, pages: dict[str, Path], name: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    show(browser, pages[name])
    canvas = browser.find_element("id", "timeline")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    start, end = shown(browser)
    canvas.send_keys("+")
    half = shown(browser)
    assert half[1] - half[0] == pytest.approx((end - start) / 2)
    canvas.send_keys("\ue014")  # the right arrow
    moved = shown(browser)
    assert moved[0] > half[0] and moved[1] - moved[0] == pytest.approx(half[1] - half[0])
    ActionChains(browser).scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -120).perform()
    closer = shown(browser)
    assert closer[1] - closer[0] < moved[1] - moved[0]
    ActionChains(browser).move_to_element(canvas).click_and_hold().move_by_offset(60, 0).release().perform()
    assert shown(browser)[0] < closer[0]
    browser.find_element("css selector", "[data-zoom=all]").click()
    assert shown(browser) == (start, end)
    assert errors(browser) == []


def test_what_is_under_the_pointer_is_told(browser: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    show(browser, pages["gpt-run"])
    canvas = browser.find_element("id", "timeline")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    lane = browser.execute_script("return timeline.lanes.find((l) => l.name === \"compute\").y")
    across = browser.execute_script("const e = timeline.lanes.find((l) => l.name === 'compute').events[5]; return (e.start + e.end) / 2 / timeline.end")
    box = canvas.size
    left = browser.execute_script("return timeline.left")
    x = left + across * (box["width"] - left) - box["width"] / 2
    ActionChains(browser).move_to_element_with_offset(canvas, round(x), round(lane + 12 - box["height"] / 2)).perform()
    assert " ms" in browser.find_element("id", "tip").text or " µs" in browser.find_element("id", "tip").text


@pytest.mark.parametrize("name", NAMES)
def test_tables_sort(browser: Any, pages: dict[str, Path], name: str) -> None:
    show(browser, pages[name])
    for table in browser.find_elements("css selector", "table.sortable"):
        if not table.is_displayed():
            continue
        for column, head in enumerate(table.find_elements("css selector", "thead th")):
            for want in ("ascending", "descending"):
                browser.execute_script("arguments[0].click()", head.find_element("css selector", "button"))
                assert head.get_attribute("aria-sort") == want
                values = browser.execute_script("return [...arguments[0].tBodies[0].rows].map((r) => valueOf(r.cells[arguments[1]]))", table, column)
                if all(isinstance(v, (int, float)) for v in values):
                    assert values == sorted(values, reverse=want == "descending")
    assert errors(browser) == []


def test_the_toggle_and_views_work_by_keyboard(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["llama3-8b-plan"])
    before = background(browser)
    browser.find_element("id", "theme").send_keys("\ue007")  # enter
    assert background(browser) != before
    tabs = browser.find_elements("css selector", "[role=tab]")
    tabs[1].send_keys("\ue007")
    assert tabs[1].get_attribute("aria-selected") == "true" and tabs[0].get_attribute("aria-selected") == "false"
    assert errors(browser) == []


@pytest.mark.parametrize("theme", ['data-jp-theme-light="{}"', 'class="vscode-{}"', 'data-md-color-scheme="{}"', ""])
@pytest.mark.parametrize("system", ["light", "dark"])
@pytest.mark.parametrize("wanted", ["light", "dark"])
def test_pictures_have_the_notebooks_colours(theme: str, system: str, wanted: str, browser: Any, tmp_path: Path) -> None:
    words = {"data-jp": ("true", "false"), 'class="': ("light", "dark"), "data-md": ("default", "slate")}
    said = theme.format(words[theme[:7]][wanted == "dark"]) if theme else ""
    drawn = html(trace(lambda x: x + 1.0, Mesh(dp=2), x=lang.f32(4)))
    (tmp_path / "cell.html").write_text(f"<!doctype html><html><body {said}>{drawn}</body></html>")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": system}]})
    browser.get((tmp_path / "cell.html").as_uri())
    colour = browser.execute_script("return getComputedStyle(document.querySelector('.weft-picture')).backgroundColor")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgba(0, 0, 0, 0)"  # the notebook's own
    assert colour == {"light": "rgb(251, 250, 248)", "dark": "rgb(20, 22, 27)"}[wanted if theme else system]
