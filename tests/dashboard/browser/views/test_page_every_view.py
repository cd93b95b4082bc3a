"""What holds in every view: keys, names, contrast, room, and a still console in both themes."""

import re

import pytest

from tests.chromium import open_view, wait_until_drawn

pytestmark = pytest.mark.browser

VIEWS = ["breakdown", "timeline", "learning", "trust", "samples", "fleet", "what_if", "alerts"]
LEAST_CONTRAST = 4.5
"""Of text, WCAG 2.2 criterion 1.4.3 (AA)."""
_CONTRAST = """
() => {
  const parse = (text) => {
    const numbers = text.match(/[\\d.]+/g).map(Number);
    const scale = text.startsWith("color(") ? 255 : 1;
    return [...numbers.slice(0, 3).map((x) => x * scale), numbers[3] ?? 1];
  };
  const over = (top, under) => top.slice(0, 3).map((x, i) => x * top[3] + under[i] * (1 - top[3]));
  const luminance = (color) => {
    const [r, g, b] = color.map((x) => x / 255)
      .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      if (style.backgroundImage.includes("gradient")) return null;
      const color = parse(style.backgroundColor);
      if (color[3] > 0) layers.push(color);
      if (color[3] === 1) break;
    }
    return layers.reverse().reduce((under, color) => over(color, under), [255, 255, 255]);
  };
  const poor = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility({ visibilityProperty: true })) continue;
    if (node.closest(PASSED_OVER)) continue;
    const ground = behind(node);
    if (!ground) continue;
    const ink = over(parse(getComputedStyle(node).color), ground);
    const [light, dark] = [luminance(ink), luminance(ground)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < LEAST) {
      const what = `${ratio.toFixed(2)} "${text.data.trim().slice(0, 30)}"`;
      poor.set(`${node.tagName}.${node.className}`, what);
    }
  }
  return [...poor].map(([node, what]) => `${node}: ${what}`);
}
""".replace("LEAST", str(LEAST_CONTRAST)).replace(
    "PASSED_OVER", "'[disabled], [aria-hidden=true], .visually-hidden, noscript, option'"
)
_UNNAMED = """
() => [...document.querySelectorAll("button, input, select, textarea, a[href], [role=tab],"
    + "[role=radio], [role=application], [role=dialog], dialog, [tabindex='0']")]
  .filter((node) => node.checkVisibility({ visibilityProperty: true }))
  .filter((node) => !(node.getAttribute("aria-label") || node.labels?.length
    || node.getAttribute("aria-labelledby") || node.textContent.trim() || node.title))
  .map((node) => node.outerHTML.slice(0, 120))
"""


@pytest.fixture
def page(served, watch):
    return watch(served("finished"), "breakdown").page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_every_view_and_theme(served, watch, scheme):
    page = watch(served("finished"), "breakdown", color_scheme=scheme).page
    found = []
    for view in [*VIEWS, "breakdown?step=20", "samples?id=t30", "samples?id=t30&mode=same"]:
        open_view(page, view)
        found += [f"{view}: {one}" for one in page.evaluate(_CONTRAST)]
    page.keyboard.press("?")
    found += page.evaluate(_CONTRAST)
    assert not found, "\n".join(found)


def test_no_view_scrolls_the_page_on_a_laptop(page):
    for view in VIEWS:
        open_view(page, view)
        width, height = page.evaluate(
            "[document.scrollingElement.scrollWidth, document.scrollingElement.scrollHeight]"
        )
        assert (width, height) == (1366, 768), view
        outside = page.locator(f"#view-{view}").evaluate(
            """view => [...view.children].filter(node => node.checkVisibility() &&
                node.getBoundingClientRect().bottom > innerHeight + 1).length"""
        )
        assert outside == 0, f"{view}: a panel ends below the window"


def test_every_control_has_a_name(page):
    for view in VIEWS:
        open_view(page, view)
        assert page.evaluate(_UNNAMED) == [], view


def test_number_keys_show_the_views_in_the_order_of_the_tabs(served, watch):
    page = watch(served("finished")).page
    tabs = page.get_by_role("tab")
    assert tabs.count() == len(VIEWS)
    for number, view in enumerate(VIEWS, 1):
        page.keyboard.press(str(number))
        page.locator(f"#view-{view}").wait_for(state="visible")
        assert tabs.nth(number - 1).get_attribute("aria-selected") == "true"
    visible = page.locator("[role=tabpanel]:visible")
    assert visible.count() == 1


def test_keys_in_quick_succession_end_in_the_last_view(served, watch):
    page = watch(served("finished")).page
    for _ in range(5):
        for number in (2, 5, 3):
            page.keyboard.press(str(number))
        page.locator("#view-learning").wait_for(state="visible")
        wait_until_drawn(page)
        assert page.evaluate("location.hash") == "#learning"


def test_arrows_move_along_the_tabs(served, watch):
    page = watch(served("finished"), "breakdown").page
    page.get_by_role("tab", name="Breakdown").focus()
    for key, view in (("ArrowRight", "timeline"), ("End", "alerts"), ("ArrowRight", "breakdown")):
        page.keyboard.press(key)
        page.locator(f"#view-{view}").wait_for(state="visible")
        assert page.evaluate("document.activeElement.id") == f"tab-{view}"


@pytest.mark.parametrize("view", VIEWS)
def test_tab_reaches_every_control_and_shows_where_it_is(served, watch, view):
    page = watch(served("finished"), view).page
    wanted = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, a[href]")]
            .filter(node => node.checkVisibility({ visibilityProperty: true }))
            .filter(node => !node.disabled && node.tabIndex >= 0)
            .map((node, i) => (node.dataset.walk = String(i)))"""
    )
    reached, hidden = set(), []
    page.evaluate("document.activeElement.blur()")
    for _ in range(2 * len(wanted) + 40):
        page.keyboard.press("Tab")
        walk, seen, html = page.evaluate(
            """() => {
              const node = document.activeElement;
              const style = getComputedStyle(node);
              return [node.dataset.walk ?? null, style.outlineStyle !== "none"
                || node === document.body, node.outerHTML.slice(0, 100)];
            }"""
        )
        if not seen:
            hidden.append(html)
        reached.add(walk)
        if set(wanted) <= reached:
            break
    assert set(wanted) <= reached, "not reached by Tab"
    assert not hidden, "the focus cannot be seen"


def test_question_mark_lists_the_keys_and_escape_closes_panels(served, watch):
    page = watch(served("finished"), "breakdown?step=5").page
    panel = page.get_by_test_id("step-panel")
    panel.wait_for(state="visible")
    panel.get_by_role("button", name="close the step").focus()
    page.keyboard.press("Escape")
    panel.wait_for(state="hidden")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    dialog.wait_for(state="visible")
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")


def test_digits_that_are_typed_into_a_field_stay_there(served, watch):
    page = watch(served("finished"), "samples").page
    page.locator("#sample-search").fill("")
    page.locator("#sample-search").press("1")
    assert page.locator("#view-samples").is_visible()
    assert page.locator("#sample-search").input_value() == "1"


def test_the_switch_of_the_theme_lasts(served, watch):
    page = watch(served("finished"), "breakdown", color_scheme="light").page
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.locator("#theme-switch").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    wait_until_drawn(page)
    assert page.evaluate(ground) == dark
    page.keyboard.press("t")
    assert page.evaluate(ground) == light


def test_nothing_moves_for_those_who_ask_for_rest(served, watch):
    page = watch(served("finished"), "breakdown", reduced_motion="reduce").page
    moving = page.evaluate(
        """() => [...document.querySelectorAll("*")].filter(node => {
            const style = getComputedStyle(node);
            return style.animationName !== "none" || parseFloat(style.transitionDuration) > 0;
        }).map(node => node.className)"""
    )
    assert moving == []


@pytest.mark.parametrize(
    "kind, scheme",
    [("stale", "dark"), ("grown", "light"), ("failed", "dark"), ("nonfinite", "light")],
)  # the finished one: above, in both themes
def test_the_console_stays_still(served, watch, kind, scheme):
    watched = watch(served(kind), "breakdown", color_scheme=scheme)
    for view in VIEWS:
        open_view(watched.page, view)
    watched.check()


def test_the_page_has_its_language_and_title(served, watch):
    page = watch(served("finished")).page
    assert page.locator("html").get_attribute("lang") == "en"
    assert re.fullmatch(r"40/40 made · Tandem", page.title())
