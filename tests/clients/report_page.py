"""cw-report's page in a real browser (Chromium through Playwright), for test_report_browser.c, which
makes the runs (tests/support/long_run.h). Arguments: a page as a file, of 10,000 steps of 10 samples;
the URL of a page that is served, of two runs of 200 steps; and the folder of the first of these,
which this script lets grow. Ends with 77 where there is no browser."""

import json
import pathlib
import shutil
import sys

from playwright.sync_api import Error, sync_playwright

TIMEOUT_MS = 120000


def launch(playwright):
    arguments = ["--disable-gpu"]
    try:
        return playwright.chromium.launch(args=arguments)
    except Error:
        for name in ("chromium", "chromium-browser", "google-chrome"):
            if shutil.which(name):
                return playwright.chromium.launch(
                    args=arguments, executable_path=shutil.which(name)
                )
    print("Playwright has no Chromium, and neither has this machine")
    sys.exit(77)


class Page:
    """A page whose faults are faults of the test: errors of its script, loads that it forbids."""

    def __init__(self, browser, url):
        self.faults = []
        self.page = browser.new_page(viewport={"width": 1200, "height": 900})
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("pageerror", lambda e: self.faults.append(str(e)))
        self.page.on("console", lambda m: m.type == "error" and self.faults.append(m.text))
        self.page.goto(url)
        self.wait("page.runs.every(run => run.lines > 0 && !run.behind)")
        self.wait("page.charts.figures.length > 0 && !byId('rollouts').hidden")
        self.settle()

    def js(self, expression, *arguments):
        return self.page.evaluate(expression, *arguments)

    def wait(self, condition):
        try:
            self.page.wait_for_function(f"() => {condition}", polling=50)
        except Error:
            print(f"faults of the page: {self.faults}")
            raise

    def settle(self):
        """Until what is in sight is drawn."""
        self.wait("page.charts.figures.some(f => f.inSight)")
        self.wait("[...waiting].every(figure => !figure.inSight)")

    def end(self):
        assert not self.faults, self.faults
        self.page.close()


def figure(key):
    return f"page.charts.figures.find(f => f.keys.includes('{key}'))"


def colored(page, key, above="-Infinity"):
    """Pixels of a chart, above a value, that are of its first line's colour, more or less."""
    return page.js(
        f"""() => {{
        const f = {figure(key)}, c = f.canvas, scale = c.height / f.height;
        const bottom = {above} > f.yRange[0] ? f.atY({above}) * scale : c.height;
        const data = c.getContext("2d").getImageData(0, 0, c.width, Math.round(bottom)).data;
        let n = 0;
        for (let i = 0; i < data.length; i += 4)
            n += data[i + 3] > 200 && data[i + 2] > data[i] + 60;
        return n;
    }}"""
    )


def drag(page, key, share_from, share_to):
    box = page.page.locator(f"figure[data-metrics~='{key}'] canvas").bounding_box()
    left, right, y = box["x"] + 54, box["x"] + box["width"] - 14, box["y"] + 100
    page.page.mouse.move(left + share_from * (right - left), y)
    page.page.mouse.down()
    page.page.mouse.move(left + (share_from + share_to) / 2 * (right - left), y)
    page.page.mouse.move(left + share_to * (right - left), y)
    page.page.mouse.up()


def choose(page, where, value):
    page.page.locator(where).select_option(value)
    page.settle()


# ---- charts ----


def charts_of_a_long_run(page):
    assert page.js("() => page.runs[0].lines") == 10000
    assert page.js("() => page.charts.figures.length") > 50
    assert colored(page, "reward") > 300
    # a single step's value is not lost among ten thousand
    assert page.js(f"() => {figure('reward')}.yRange[1]") >= 77
    assert 20 < colored(page, "reward", 50) < 200


def constants_are_lines(page):
    """Charts of the mean of spans stay; one of a value that never changes is a line in a list."""
    assert page.js("() => page.charts.figures.every(f => f.element.hidden === f.constant)")
    assert not page.js(f"() => {figure('reward')}.constant")
    constant = page.page.locator("figure[data-metrics~='learning_rate']")
    assert constant.count() == 1 and not constant.is_visible()
    line = page.page.locator(".constant li", has_text="Learning rate")
    assert line.is_visible() and "learning_rate 0.002" in line.inner_text(), line.inner_text()
    page.page.locator("#filter").fill("reward")
    assert not line.is_visible()
    page.page.locator("#filter").fill("")


def zooming(page):
    drag(page, "reward", 0.25, 0.75)
    page.settle()
    low, high = page.js("() => view.range")
    assert 2300 < low < 2700 and 7300 < high < 7700, (low, high)
    assert page.js(f"() => {figure('reward')}.yRange[1]") < 77  # fits what is seen
    assert page.page.locator("#reset").is_visible()
    page.page.locator("figure[data-metrics~='reward'] canvas").dblclick(position={"x": 300, "y": 90})
    assert page.js("() => view.range") is None
    assert not page.page.locator("#reset").is_visible()
    page.page.mouse.move(0, 0)


def smoothing(page):
    values, weight, total, norm = [3, 0, 7, 1], 0.8, 0, 0
    wanted = []
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        wanted.append(total / norm)
    got = page.js("([v, w]) => Array.from(smoothed(v, w))", [values, weight])
    assert all(abs(a - b) < 1e-12 for a, b in zip(got, wanted)), (got, wanted)
    page.js("() => { byId('smooth').value = 0.99; byId('smooth').dispatchEvent(new Event('input')); }")
    page.settle()
    assert page.js(f"() => {figure('reward')}.yRange[1]") < 77  # the spike is flatter
    page.js("() => { byId('smooth').value = 0; byId('smooth').dispatchEvent(new Event('input')); }")
    page.settle()


def axes(page):
    page.page.locator("#log").check()
    page.settle()
    low, high = page.js(f"() => {figure('reward')}.yRange")
    middle = page.js(f"() => {{ const f = {figure('reward')}; return f.atY(Math.sqrt({low} * {high}));}}")
    ends = page.js(f"() => {{ const f = {figure('reward')}; return [f.atY({low}), f.atY({high})];}}")
    assert low > 0 and abs(middle - sum(ends) / 2) < 0.01
    page.page.locator("#log").uncheck()
    choose(page, "#x", "time")  # a quarter and three quarters of a second a step
    assert abs(page.js(f"() => {figure('reward')}.xRange[1]") - 10000) < 1e-6
    choose(page, "#x", "tokens")
    assert page.js(f"() => {figure('reward')}.xRange[1]") == 10_000_000
    choose(page, "#x", "step")


def tips(page):
    page.page.locator("figure[data-metrics~='reward'] canvas").hover(position={"x": 300, "y": 90})
    tip = page.page.locator("figure[data-metrics~='reward'] .tip")
    assert tip.is_visible() and "step" in tip.inner_text() and "reward" in tip.inner_text()


def time_of_steps(page):
    name = "figure[data-metrics~='spans/forward_s']"
    page.page.locator(name).scroll_into_view_if_needed()
    page.settle()
    text = page.page.locator(name).inner_text()
    assert "forward 0.25 s" in text and "rollout 0.75 s" in text, text


# ---- rollouts ----


def bars(page, at, group):
    """The shares that a histogram's bars have, of its groups one, by where they begin."""
    return page.js(
        f"""() => {{
        const h = page.rollouts.histograms[{at}][1], ret = {{}};
        h.groups[{group}].shares.forEach((share, i) => {{ if (share) ret[h.first * h.bin + i * h.bin] = share; }});
        return ret;
    }}"""
    )


def histograms(page, words):
    """Of five samples one has a reward of 1; all have as many tokens."""
    for group in (0, 1):
        found = bars(page, 0, group)
        assert [round(x, 6) for x in found.values()] == [80, 20], found
        assert list(found) == ["0", "1"], found
        assert list(bars(page, 1, group)) == [str(words)]
    fill(page, "from", "10000")
    assert page.js("() => page.rollouts.histograms[0][1].groups.map(g => g.n)") == [10]
    fill(page, "from", "")


def listed(page):
    return page.page.locator("#rollouts > p").inner_text()


def fill(page, name, text):
    page.page.locator(f"#rollouts [name={name}]").fill(text)


def rollouts_of_a_long_run(page):
    assert listed(page) == "100,000 of 100,000 samples", listed(page)
    fill(page, "least", "1")
    assert listed(page).startswith("20,000 of")
    fill(page, "prompt", "#42")
    assert listed(page).startswith("200 of")
    fill(page, "prompt", "question 7?")
    assert listed(page).startswith("200 of")
    fill(page, "from", "10000")
    assert listed(page).startswith("0 of")
    fill(page, "prompt", "")
    assert listed(page).startswith("2 of")
    for name in ("least", "from"):
        fill(page, name, "")
    choose(page, "#rollouts .filters select >> nth=-1", "highest reward")
    first = page.page.locator("#rollouts tbody tr").first.locator("td").all_inner_texts()
    assert first[0] == "1" and first[3] == "1", first
    choose(page, "#rollouts .filters select >> nth=-1", "newest step")
    first = page.page.locator("#rollouts tbody tr").first.locator("td").all_inner_texts()
    assert first[:4] == ["10000", "#0 Question 0?", "0", "0"], first


def a_sample(page, words):
    page.page.locator("#rollouts tbody tr").nth(1).click()
    detail = page.page.locator(".sample")
    page.page.wait_for_function("() => document.querySelector('.sample h3').textContent.includes('sample 1')")
    text = detail.inner_text()
    assert "<|user|>Question" in text and "as the model saw it" in text, text
    tokens = detail.locator(".completion span")
    assert tokens.count() == words
    assert detail.locator(".completion").inner_text().startswith("wordword<b>&word")  # text, no markup
    assert detail.locator(".completion b").count() == 0
    assert detail.locator(".completion .draft").count() == words - 1
    title = tokens.nth(20).get_attribute("title")
    for part in ("token 20", "server: -0.2", "trainer: -0.4", "over server's): 0.8187", "accepted draft, 20"):
        assert part in title, title
    plain = tokens.nth(words - 1).evaluate("e => getComputedStyle(e).backgroundColor")
    detail.locator("select").select_option("")
    assert tokens.nth(words - 1).evaluate("e => getComputedStyle(e).backgroundColor") != plain
    detail.locator("button", has_text="side by side").click()
    cards = detail.locator(".card")
    assert cards.count() == 5 and "sample 4" in cards.nth(4).inner_text()
    cards.nth(3).click()
    page.page.wait_for_function("() => document.querySelector('.sample h3').textContent.includes('sample 3')")
    detail.locator("button", has_text="alone").click()
    detail.locator("button", has_text="◀").click()
    page.page.wait_for_function("() => document.querySelector('.sample h3').textContent.includes('sample 2')")
    detail.locator("button", has_text="◀").click()
    page.page.wait_for_function("() => document.querySelector('.sample h3').textContent.includes('sample 1')")
    detail.locator("button", has_text="▶").click()
    page.page.wait_for_function("() => document.querySelector('.sample h3').textContent.includes('sample 2')")
    detail.locator("button", has_text="this prompt").click()
    assert not listed(page).startswith("100,000")
    fill(page, "prompt", "")


def a_text_that_is_not_here(page):
    fill(page, "from", "2")
    fill(page, "to", "2")
    page.page.locator("#rollouts tbody tr").first.click()
    page.page.wait_for_function("() => document.querySelector('.sample').textContent.includes('--serve')")
    fill(page, "from", "")
    fill(page, "to", "")


def timings(page):
    """For a reader; nothing depends on them."""
    ready = page.js("() => performance.getEntriesByName('report-ready')[0].startTime")
    print(f"ready after {ready:.0f} ms")
    for what, act in (
        ("smoothing", "view.smooth = 0.9; page.draw()"),
        ("zoom", "page.zoom([1000, 2000])"),
        ("no zoom", "view.smooth = 0; page.zoom(null)"),
        ("list of samples", "page.rollouts.find()"),
    ):
        ms = page.js(
            f"""async () => {{
            const start = performance.now();
            {act};
            await new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
            return performance.now() - start;
        }}"""
        )
        print(f"{what}: {ms:.0f} ms")


# ---- a served page ----


def runs_beside_each_other(page):
    curves = f"() => {figure('reward')}.curves().map(c => [c.run.name, c.color])"
    found = page.js(curves)
    assert len(found) == 2 and found[0][1] != found[1][1], found
    page.page.locator(".runs input").nth(1).uncheck()
    page.settle()
    page.page.wait_for_function(f"() => {figure('reward')}.curves().length === 1")
    page.page.locator(".runs input").nth(1).check()
    page.page.wait_for_function(f"() => {figure('reward')}.curves().length === 2")


def new_steps_appear(page, folder):
    sizes = []
    page.page.on("response", lambda r: "/data?run=0" in r.url and sizes.append(len(r.body())))
    page.page.locator("#options summary").click()
    lines = folder.joinpath("rollouts/step-200.jsonl").read_text()
    folder.joinpath("rollouts/step-201.jsonl").write_text(lines)
    with open(folder / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"step": 201, "reward": 5, "brand_new": 1}) + "\n")
    page.wait("page.runs[0].lines === 201 && page.runs[0].nSamples === 1005")
    page.wait("page.charts.figures.some(f => f.keys.includes('brand_new'))")
    page.wait("document.querySelector('#rollouts tbody').textContent.startsWith('201')")
    assert page.js("() => document.querySelector('#options details').open")  # as the reader left it
    # only what is new was sent
    assert max(sizes) < 10000, sizes
    assert "live" in page.page.locator("#status").inner_text()


def a_resumed_run_is_read_anew(page, folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    fewer = folder / "metrics.tmp"
    fewer.write_text("".join(lines[:100]))
    fewer.rename(folder / "metrics.jsonl")
    page.wait("page.runs[0].lines === 100 && page.runs[0].nSamples === 500")
    page.wait(f"{figure('reward')}.points(page.runs[0], 'reward').x.length === 100")
    page.wait("document.querySelector('#rollouts > p').textContent === '500 of 500 samples'")


def on_a_phone(page):
    """Nothing is wider than the screen, and a group's samples lie below one another."""
    page.page.set_viewport_size({"width": 390, "height": 844})
    page.page.locator(".sample button", has_text="side by side").click()
    assert page.js("() => document.documentElement.scrollWidth") <= 390
    left = page.js("() => [...document.querySelectorAll('.card')].map(c => c.getBoundingClientRect().left)")
    assert len(left) == 5 and len(set(left)) == 1, left
    page.page.locator(".sample button", has_text="alone").click()
    page.page.set_viewport_size({"width": 1200, "height": 900})


def main():
    page_file, url, folder = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = Page(browser, pathlib.Path(page_file).as_uri())
        charts_of_a_long_run(page)
        constants_are_lines(page)
        zooming(page)
        smoothing(page)
        axes(page)
        tips(page)
        time_of_steps(page)
        rollouts_of_a_long_run(page)
        histograms(page, 24)
        a_sample(page, 24)
        on_a_phone(page)
        a_text_that_is_not_here(page)
        timings(page)
        page.end()
        page = Page(browser, url)
        runs_beside_each_other(page)
        a_sample(page, 24)
        new_steps_appear(page, pathlib.Path(folder))
        a_resumed_run_is_read_anew(page, pathlib.Path(folder))
        page.end()
        browser.close()


main()
