"""What a frontier's report says of its cases: rows and pictures."""

import pytest

from dejakv.experiments.frontier.cells import cells
from dejakv.experiments.frontier.plot import figure_of
from dejakv.experiments.frontier.report import rows_of, table
from dejakv.experiments.frontier.text_cases import KINDS


def test_rows_count_stale_answers_only_where_the_answer_had_to_change():
    def line(number, right, stale):
        row = {
            "right": right,
            "stale": stale,
            "kl": 0.1,
            "kl_mean": 0.1,
            "top1": 1.0,
            "share": 0.4,
            "last": 0.2,
            "seconds": 0.01,
        }
        return {"kind": "edit", "number": number, "tokens": 9, "rows": {"full": row, "context/value/share/1/1": row}}

    made = rows_of(
        [line(0, True, False), line(1, False, True), line(2, True, None)], {c.name: c for c in cells()}, ("edit",)
    )
    assert made[0]["stale_rate"] == 0.5
    assert made[0]["accuracy"] == pytest.approx(2 / 3, abs=1e-4)
    assert "0.500" in table(made)


def frontier_rows(kinds, noise=False):
    """Rows of a report with two ways of blending, one by need."""
    given = {
        "accuracy": 0.9,
        "kl_mean": 0.1,
        "top1": 0.9,
        "quality": "",
        "offsets": False,
        "surroundings": False,
        "complete": 0,
    }
    rows = []
    for kind in kinds:
        rows.append({**given, "kind": kind, "selector": "full", "map": "", "budget": "share"})
        if noise:
            rows.append({**given, "kind": kind, "selector": "noise", "map": "", "budget": "share"})
        for budget in ("share", "need"):
            made = {**given, "kind": kind, "selector": "query", "map": "context", "budget": budget}
            rows += [{**made, "share": share, "last_share": share} for share in (0.1, 0.2)]
    return rows


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_the_picture_has_a_panel_for_each_kind_and_its_legend_beside_them(count):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = frontier_rows(KINDS[:count])
    figure = figure_of([row for row in rows if row["kind"] != KINDS[1] or row["budget"] != "share" or not row["map"]])
    figure.draw_without_rendering()
    assert [panel.get_title() for panel in figure.axes] == list(KINDS[:count])
    assert all(panel.lines for panel in figure.axes)
    (legend,) = figure.legends
    shown = {line.get_label(): line.get_color() for line in legend.get_lines()}
    assert all(line.get_color() == shown[line.get_label()] for panel in figure.axes for line in panel.lines)
    box = legend.get_window_extent()
    assert not any(box.overlaps(panel.get_tightbbox()) for panel in figure.axes)
    plt.close(figure)


def test_the_picture_shows_divergence_where_there_is_a_noise_floor():
    from matplotlib import pyplot as plt

    for noise, label in ((True, "KL along the answer, nats"), (False, "accuracy")):
        figure = figure_of(frontier_rows(KINDS[:1], noise))
        assert figure.axes[0].get_ylabel() == label
        lines = {line.get_label(): line for line in figure.axes[0].lines}
        assert list(lines["by need, query, 0 complete"].get_xdata()) == [10, 20]
        plt.close(figure)
