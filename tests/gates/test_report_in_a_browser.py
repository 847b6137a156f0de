"""The report in headless Chromium: silent, self-contained, and as wide as the screen it is on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qualitygates.page import TONES
from qualitygates.report import write_report
from tests.gates import verdicts
from tests.gates.browser import PROGRAM, Browser

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium in PATH")
CASES = {
    "ACCEPT": verdicts.accepted,
    "REJECT": verdicts.rejected,
    "INCONCLUSIVE": verdicts.undecided_offline,
}
CONTRAST = """(() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[0-9.]+/g).slice(0, 3).map((one) => {
      const part = one / 255;
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
  };
  let least = 21;
  for (const node of document.querySelectorAll('p,li,td,th,dt,dd,pre,summary,h1,h2,a,.verdict')) {
    if (!node.textContent.trim()) continue;
    const [one, two] = [light(getComputedStyle(node).color), light(behind(node))];
    least = Math.min(least, (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05));
  }
  return least;
})()"""
CLIPPED = """[...document.querySelectorAll('header *, section *')].filter((node) =>
  !node.closest('.scroll, pre, svg, details:not([open])') &&
  node.getBoundingClientRect().right > innerWidth + 0.5).length"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("pages"), {}
    for word, made in CASES.items():
        promise, runs, verdict = made()
        assert verdict["verdict"] == word
        found[word] = write_report(folder / word, promise, runs, verdict=verdict)
    return found


@pytest.mark.parametrize("word", CASES)
def test_it_is_silent_asks_for_nothing_and_fits(
    browser: Browser, pages: dict[str, Path], word: str
) -> None:
    for width in (375, 1440):
        for scheme in ("light", "dark"):
            seen = browser.load(pages[word], width=width, scheme=scheme)
            assert seen.messages == []
            assert seen.requests == [pages[word].as_uri()]
            assert browser.evaluate(seen, "document.documentElement.scrollWidth") <= width
            assert browser.evaluate(seen, CLIPPED) == 0
            # WCAG AA for body text.
            assert browser.evaluate(seen, CONTRAST) >= 4.5
            ground = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0] > 128"
            assert browser.evaluate(seen, ground) == (scheme == "light")


def test_the_verdict_is_on_the_first_screen_of_a_telephone(
    browser: Browser, pages: dict[str, Path]
) -> None:
    for word, page in pages.items():
        seen = browser.load(page, width=375)
        bottom = "document.querySelector('.lead').getBoundingClientRect().bottom"
        assert browser.evaluate(seen, bottom) < 667
        assert browser.evaluate(seen, "document.querySelector('.verdict').textContent") == word
        tone = browser.evaluate(seen, "document.querySelector('header').getAttribute('style')")
        assert f"--tone:var(--{TONES[word]})" in tone


def test_it_prints_with_everything_open_on_white(browser: Browser, pages: dict[str, Path]) -> None:
    seen = browser.load(pages["ACCEPT"], width=1440, scheme="dark")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    shown = "document.querySelector('details > :not(summary)').checkVisibility()"
    assert not browser.evaluate(seen, shown)
    browser.call("Emulation.setEmulatedMedia", seen, media="print", features=features)
    assert browser.evaluate(seen, shown)
    white = "getComputedStyle(document.body).backgroundColor"
    assert browser.evaluate(seen, white) == "rgb(255, 255, 255)"
    assert browser.evaluate(seen, CONTRAST) >= 4.5
    assert browser.printed(seen).startswith(b"%PDF")
