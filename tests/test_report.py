"""The display of a run, and its report."""

import html.parser
import json
import re

import matplotlib
import numpy as np
import pytest
import runs

from fp8jax.inspect.memory import MemoryPlan
from fp8jax.quantization import UNSET
from fp8jax.train import metrics
from fp8jax.train.metrics import Bytes, ScaledTensor, ScaleMetrics, StepMetrics
from fp8jax.train.report import figures, page, report
from fp8jax.train.report.outcome import MemoryPart, Outcome, memory_of
from fp8jax.train.report.progress import Progress


def test_without_a_terminal_progress_is_lines(capsys, monkeypatch):
    curves = {"O2": runs.make_curves(10), "bf16": runs.make_curves(10)}
    with Progress(curves, steps=20, amount=100) as progress:
        progress.show()
        progress.show()  # too soon for another line
        for of_one in curves.values():
            of_one.add([StepMetrics(1.5, 0, ScaleMetrics(np.zeros(3), np.zeros(3)))] * 10, seconds=0.5)
        progress.show()  # the last one always comes
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step 10/20") and "O2: loss 3.100 val 1.250, 4,000 tokens/s" in first
    assert last.startswith("step 20/20") and "bf16: loss 1.500" in last and "2,000 tokens/s" in last


TENSORS = [ScaledTensor("h/mlp/c_fc", "0", operand) for operand in metrics.OPERANDS]


MEMORY = [MemoryPart("weights <", 1_510_000, None), MemoryPart("total", None, 7)]


def make_outcome(loss=1.25, tensors=TENSORS):
    curves = runs.make_curves(tensors=len(tensors))
    curves.validation[-1] = (30, loss)
    layers = "O2: 4 < 7 layers in FP8"
    return Outcome(curves, 768, 1000, Bytes(2.0, 1.0, 3.0, 0.5), tensors, layers, MEMORY)


class Page(html.parser.HTMLParser):
    """The text of a page, its images, and its tags that were never closed."""

    def __init__(self, content):
        super().__init__()
        self.text, self.images, self.open = [], [], []
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.images.append(dict(attributes)["src"])
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag == self.open.pop()

    def handle_data(self, content):
        self.text.append(content)


ABOUT = {"data": "some <text>", "device": "cpu", "settings": {"steps": 30, "lr": 0.001}}


def test_report_holds_everything(tmp_path):
    outcomes = {"O2": make_outcome(1.2612), "bf16": make_outcome(1.25, tensors=[])}
    path = report.write(tmp_path, ABOUT, outcomes)
    for name in ("losses.png", "scales.png", "saturation.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    page = Page(path.read_text())
    text = " ".join(page.text)
    assert len(page.images) == 3 and all(src.startswith("data:image/png;base64,") for src in page.images)
    assert page.open == []
    for expected in (
        "1.2612",
        "+0.0112",
        "0.0112 above its bf16 twin",
        "some <text>",
        "4 < 7 layers",
        "MB on one device",
        "1.51",
        "weights <",
        "Skipped steps: none.",
        "0.001",
    ):
        assert expected in text, expected
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["gap"] == pytest.approx(0.0112)
    assert result["models"]["O2"]["training_losses"] == outcomes["O2"].curves.loss
    assert result["models"]["bf16"]["validation_losses"] == [[15, 3.5], [30, 1.25]]
    assert result["models"]["O2"]["memory"][1] == {
        "part": "total",
        "arrays": None,
        "compiled": 7,
    }
    assert result["models"]["O2"]["bytes_per_parameter"] == Bytes(2.0, 1.0, 3.0, 0.5)._asdict()
    assert result["models"]["O2"]["tokens_per_second"] == pytest.approx(30 * 768 / 0.75)


def test_sections_in_the_order_of_questions(tmp_path):
    """And each quantity of the terminal's table is in one of them."""
    outcomes = {"O2": make_outcome(1.2612), "bf16": make_outcome(1.25, tensors=[])}
    page = report.write(tmp_path, {**ABOUT, "versions": {"jax": "1.2"}}, outcomes).read_text()
    heads = ["What was trained", "What FP8 did", "What it saved", "What went wrong", "Settings"]
    assert re.findall("<h2>(.*?)</h2>", page) == heads
    parts = [report.rows(outcomes, [section])[1:] for section in report.SECTIONS]
    assert sorted(sum(parts, [])) == sorted(report.rows(outcomes)[1:])
    assert "On cpu, jax 1.2." in page
    for part, head, following in zip(parts, [heads[0], *heads[2:4]], [heads[1], *heads[3:]], strict=True):
        section = page[page.index(f"<h2>{head}") : page.index(f"<h2>{following}")]
        assert part and all(f"<td>{label}</td><td>{value}</td>" in section for label, value, _ in part)


def test_the_page_begins_with_its_occasion(tmp_path):
    about = {**ABOUT, "date": "2026-11-25 09:30 UTC", "seconds": 3725.4, "command": "python a.py '<b>'"}
    page = report.write(tmp_path, about, {"O2": make_outcome()}).read_text()
    top = page[page.index("<h1>") : page.index("<h2>")]
    assert "2026-11-25 09:30 UTC; 1:02:05 h from start to end; " in top
    assert "<code>python a.py &#x27;&lt;b&gt;&#x27;</code>" in top and "resumed" not in top
    page = report.write(tmp_path, {**about, "resumed after step": 1500}, {"O2": make_outcome()}).read_text()
    assert "1:02:05 h from start to end, resumed after step 1,500; " in page


@pytest.mark.parametrize("is_of_cpu, section", [(True, "trained"), (False, "saved")])
def test_the_speed_of_a_cpu_is_nothing_that_was_saved(tmp_path, is_of_cpu, section):
    outcomes = {"O2": make_outcome()._replace(is_of_cpu=is_of_cpu)}
    for name in report.SECTIONS:
        found = [row[0] for row in report.rows(outcomes, [name])]
        assert ("tokens/s" in found) == ("time in steps" in found) == (name == section)
    page = report.write(tmp_path, ABOUT, outcomes).read_text()
    assert ("so its speed says nothing about a GPU" in page) == is_of_cpu
    assert page.count("Speed and time are those of training steps") == 1


@pytest.mark.parametrize("blocks, labels", [(2, 12), (1000, 250)])
def test_pictures_of_deep_models(blocks, labels, monkeypatch):
    """A picture of 1,000 blocks would be larger than a PNG file can be; a panel for each would take hours."""
    drawn = []
    png = figures._png
    monkeypatch.setattr(figures, "_png", lambda figure: drawn.append(figure) or png(figure))
    tensors = [
        ScaledTensor(f"h_{block}/{name}/kernel", "", operand)
        for block in range(blocks)
        for name in ("up", "down")
        for operand in metrics.OPERANDS
    ]
    curves = runs.make_curves(tensors=len(tensors))
    for draw in (figures.scales, figures.saturations):
        assert draw(tensors, curves).startswith(b"\x89PNG")
    scales, saturation = drawn
    assert [panel.get_title() for panel in scales.axes[:2]] == ["up/kernel", "down/kernel"]
    assert len(scales.axes[0].lines) == blocks
    shown = [label.get_text() for panel in saturation.axes[:3] for label in panel.get_yticklabels()]
    assert shown[0] == "up/kernel 0" and labels <= len(shown) <= 1.3 * labels


def test_pictures_leave_the_backend_of_matplotlib(monkeypatch, tmp_path):
    """A notebook shows its pictures inline after a run, too."""
    monkeypatch.setitem(matplotlib.rcParams, "backend", "svg")
    report.write(tmp_path, ABOUT, {"O2": make_outcome()})
    assert matplotlib.get_backend() == "svg"


@pytest.mark.parametrize("steps", [0, 7])
def test_curves_of_unequal_length(steps):
    curves = {"O2": runs.make_curves(), "bf16": metrics.Curves(loss=[1.0] * steps)}
    assert figures.losses(curves).startswith(b"\x89PNG")


def test_dollars_in_pictures_are_no_formulas(monkeypatch):
    """matplotlib takes text between two of them for TeX, and raises for a formula that it cannot read."""
    drawn = []
    png = figures._png
    monkeypatch.setattr(figures, "_png", lambda figure: drawn.append(figure) or png(figure))
    tensors = [tensor._replace(layer=r"h_0/$\up$") for tensor in TENSORS]
    figures.losses({"O2": runs.make_curves()}, r"loss ($\nats$)")
    for draw in (figures.scales, figures.saturations):
        draw(tensors, runs.make_curves())
    losses, scales, saturations = (figure.axes[0] for figure in drawn)
    assert losses.get_ylabel() == r"loss ($\nats$)" and scales.get_title() == r"h_*/$\up$"
    assert saturations.get_yticklabels()[0].get_text() == r"h_0/$\up$ 0 0"


def test_clipped_casts_are_counted(tmp_path):
    outcome = make_outcome()
    values = np.full_like(outcome.curves.saturations, 1.05)  # rounded to the largest number
    outcome.curves.saturations[:] = values.tolist()
    assert "Clipped casts: none." in report.write(tmp_path, ABOUT, {"O2": outcome}).read_text()
    values[0, 2], values[1, 0], values[-1, 2] = 1.5, 2.6, 1.25
    outcome.curves.saturations[:] = values.tolist()
    text = report.write(tmp_path, ABOUT, {"O2": outcome}).read_text()
    assert "Casts clipped 2 of 3 tensors at least once, and 1 at the end." in text
    assert (
        f"2.6 times the range of FP8: h/mlp/c_fc 0 input, before step {outcome.curves.scale_steps[1]}."
        in text
    )


def test_tensors_whose_scaling_state_is_that_of_init(tmp_path):
    """A loop that drops the new state, a layer that is not used, and a tensor of zeros look like this."""
    outcome = make_outcome()

    def written():
        return report.write(tmp_path, ABOUT, {"O2": outcome}).read_text()

    outcome.curves.saturations[:] = np.ones_like(outcome.curves.saturations).tolist()
    assert "Tensors without an amax: none." in written()
    outcome.curves.scales[-1][1] = UNSET  # where the first scale is that of the tensor
    assert "No step recorded an amax for 1 of 3 tensors" in written()
    for row in outcome.curves.saturations:
        row[2] = 0.0  # where the first scale is one
    assert "No step recorded an amax for 2 of 3 tensors" in written()
    assert "h/mlp/c_fc 0 weight, h/mlp/c_fc 0 output gradient." in written()


def test_report_without_scales_says_so(tmp_path):
    text = report.write(tmp_path, ABOUT, {"te": make_outcome(tensors=[])}).read_text()
    assert "te has no delayed scales" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["losses.png", "report.html", "result.json"]


def test_report_of_skipped_steps(tmp_path):
    """The report counts them, and their losses are not drawn."""
    skipping = make_outcome(tensors=[])
    skipping.curves.skipped += [3, 20]
    skipping.curves.loss[2], skipping.curves.loss[19] = float("nan"), float("inf")
    skipping.curves.validation[-1] = (30, float("nan"))
    path = report.write(tmp_path, ABOUT, {"O2": skipping})
    assert "O2 skipped 2 of 30 steps: 3, 20." in " ".join(Page(path.read_text()).text)

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert result["models"]["O2"]["skipped_steps"] == [3, 20]
    losses = result["models"]["O2"]["training_losses"]
    assert [step for step, loss in enumerate(losses, 1) if loss is None] == [3, 20]
    assert (
        result["models"]["O2"]["validation_losses"][-1][1]
        is result["models"]["O2"]["validation_loss"]
        is None
    )
    assert report.rows({"O2": skipping})[4] == ["steps skipped", "2"]
    before = (tmp_path / "losses.png").read_bytes()
    skipping.curves.skipped.clear()
    assert figures.losses({"O2": skipping.curves}) != before


def test_a_command_line_that_is_not_utf_8(tmp_path):
    about = {**ABOUT, "command": "python train.py run-\udcff"}
    assert r"run-\udcff" in report.write(tmp_path, about, {"te": make_outcome(tensors=[])}).read_text()


def test_without_validation_the_end_of_training_is_told(tmp_path):
    outcome = make_outcome()._replace(unit="rows")
    outcome.curves.validation.clear()
    outcome.curves.loss[-3:] = [1.0, float("nan"), 2.0]
    table = report.rows({"te": outcome})
    assert table[1:3] == [["training loss, last tenth", "1.5000"], ["rows/s", "30,720"]]
    assert report.verdict({"te": outcome}) == "te reached a training loss of 1.5000."


def test_memory_of_arrays_and_of_the_program():
    plan = MemoryPlan("O2", 0, 1, weights=24, moments=4, master=0, inputs=8, temporaries=54, sent=0)
    found = memory_of(plan, arguments=36)
    rows = {part.part.split(":")[0]: part[1:] for part in found}
    assert rows["weights, with scales and statistics"] == (24, None)
    assert rows["moments"] == (4, None) and rows["batch and counters"] == (8, None)
    assert rows["arguments of a step"] == (36, 36)
    assert rows["gradients, activations and temporaries"] == (None, 54)
    assert rows["peak"] == (None, 90)
    table = page.memory_rows("O2", found)
    assert table[0] == ["O2: bytes on one device", "arrays", "compiled"]
    assert table[-1] == ["peak", "", "90"]


def test_a_file_of_the_report_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(
        OSError, match=r"report.html cannot be written \(Is a directory\); move it away and resume"
    ):
        report.write(tmp_path, ABOUT, {"te": make_outcome(tensors=[])})
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_table_on_the_terminal(capsys):
    report.show({"O2": make_outcome(1.2612), "bf16": make_outcome(1.25)})
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert ["validation", "loss", "1.2612", "1.2500"] in lines
    assert ["gap", "+0.0112"] in lines
    assert ["bytes", "per", "parameter:", "optimizer", "3.00", "3.00"] in lines


def test_smoothing_is_a_running_mean():
    np.testing.assert_allclose(figures._smooth(np.array([1.0, 4.0, 7.0, 4.0])), [2.5, 4.0, 5.0, 5.5])
    infinite = figures._smooth(np.array([1.0, np.inf, 7.0, np.nan, np.nan, np.nan]))
    np.testing.assert_allclose(infinite, [1.0, 4.0, 7.0, 7.0, np.nan, np.nan])


def test_the_worst_tensors_come_first(tmp_path):
    """Saturation over the columns of the map, with the step of the largest; NaN counts as none."""
    tensors = [ScaledTensor(f"h/{name}", "", "input") for name in "abcdefg"]
    outcome = make_outcome(tensors=tensors)
    steps = outcome.curves.scale_steps
    rows = [[0.1 * i for i in range(7)] for _ in steps]
    rows[1][2], rows[0][4], rows[0][0] = 3.0, 1.5, float("nan")
    outcome.curves.saturations[:] = rows
    heading, first, second, *others = page.saturation_rows(outcome)
    assert first == ["h/c input", "3.00", f"{steps[1]:,}", "33%", "0.20"]
    assert second == ["h/e input", "1.50", f"{steps[0]:,}", "33%", "0.40"]
    assert [row[0] for row in others] == ["h/g input", "h/f input", "h/d input"]
    text = report.write(tmp_path, ABOUT, {"te": outcome}).read_text()
    assert text.index("h/c input") < text.index("h/e input") < text.index("h/g input")


def test_underflow_that_was_counted(tmp_path):
    outcome = make_outcome()
    assert "Not measured" in report.write(tmp_path, ABOUT, {"te": outcome}).read_text()
    outcome.curves.underflow += [
        (10, {"a": 0.5, "b": 0.01, **dict.fromkeys("cdef", 0.0)}),
        (20, {"a": 0.25, "b": 0.75}),
    ]
    _, first, second, *others = page.underflow_rows(outcome)
    assert first == ["b", "1.0%", "75.0%", "20", "75.0%"]
    assert second == ["a", "50.0%", "50.0%", "10", "25.0%"]
    assert len(others) == 3
    assert outcome.curves.line(1, 1, "rows").keys() == {
        "loss",
        "skipped_steps",
        "rows_per_second",
        "largest_saturation",
        "validation_loss",
    }
    outcome.curves.underflow.append((30, {"a": 0.125}))
    assert outcome.curves.line(1, 1, "rows")["largest_underflow"] == 0.125
    kept = json.loads(json.dumps(outcome.curves.to_json()))
    assert metrics.Curves.from_json(kept).underflow == outcome.curves.underflow
    assert "75.0%" in report.write(tmp_path, ABOUT, {"te": outcome}).read_text()
