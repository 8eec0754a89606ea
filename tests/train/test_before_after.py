"""What the report of a fine-tuning run shows: answers from before and after, and what became of pairs."""

import html
import re

from forge_mlx.train.before_after import Answers, before_and_after, shown_answer
from forge_mlx.train.figures import headline_figures
from forge_mlx.train.metrics import MetricsLog
from forge_mlx.train.report import load_run, write_loss_plot, write_report
import pytest


def write_run(folder, samples, *, steps=20, final=True, pairs=False):
    """A run that logged samples, each a step, a prompt, a text and what the data have there (or None)."""
    folder.mkdir()
    with MetricsLog(folder / "metrics.jsonl") as log:
        corpus = {"format": "preference" if pairs else "chat", "train_examples": 40}
        log.log("setup", 0, time=0.0, corpus=corpus, parameters=136_957_248, trained_parameters=2_442_240)
        for step in range(0, steps + 1, 10):
            for _, prompt, text, expected in (each for each in samples if each[0] == step):
                more = {} if expected is None else {"expected": expected}
                log.log("sample", step, time=0.0, prompt=prompt, text=text, **more)
            measured = {"bits_per_byte": 0.5}
            if pairs:
                rewards = {"chosen_reward": 0.25 * step, "rejected_reward": -0.5 * step, "margin": 0.75 * step}
                measured = {"pairs": 8, "accuracy": 0.875, **rewards}
            if step:
                log.log("train", step, time=0.0, loss=1.0, tokens=step, **measured)
                log.log("eval", step, time=0.0, loss=0.5, final=final and step == steps, **measured)
    return load_run(folder)


def page(run):
    """The report's text, tags taken out and white space folded."""
    text = write_report(run).read_text(encoding="utf-8")
    body = re.sub(r"<(script|style).*?</\1>", " ", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


ASKED = [(0, "hi?", "Hello.", "yes!"), (0, "who?", "me", None), (20, "hi?", "yes!", "yes!"), (20, "who?", "you", None)]


def test_each_prompt_has_its_answers_of_the_first_and_the_last_step(tmp_path):
    middle = [(10, "hi?", "between", "yes!"), (10, "who?", "between", None)]
    run = write_run(tmp_path / "run", [*ASKED, *middle])
    assert before_and_after(run) == [Answers("hi?", "yes!", "Hello.", "yes!", 20), Answers("who?", "", "me", "you", 20)]
    text = page(run)
    first, second = (
        "hi? before training Hello. after training yes! in the data yes!",
        "who? before training me after training you",
    )
    assert f"Before and after {first} {second} Curves" in text
    assert text.count("in the data") == 1


def test_while_the_run_goes_on_the_later_answer_has_its_step(tmp_path):
    run = write_run(tmp_path / "run", [ASKED[0], (10, "hi?", "yes", "yes!")], steps=10, final=False)
    assert "hi? before training Hello. at step 10 yes in the data yes!" in page(run)


@pytest.mark.parametrize(
    "samples",
    [[], ASKED[:2], [(10, "hi?", "yes!", None), (20, "hi?", "yes!", None)], [ASKED[0], (20, "another", "x", None)]],
    ids=["no sample", "the first alone", "none of the first step", "another prompt"],
)
def test_with_nothing_to_compare_there_is_no_such_part(samples, tmp_path):
    run = write_run(tmp_path / "run", samples)
    assert before_and_after(run) == []
    assert "Before and after" not in page(run)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "(nothing)"),
        ("\n", "(1 blank character)"),
        (" \n" * 600, "(1,200 blank characters)"),
        ("\n\n  a\nb\n", "  a\nb"),
        ("<b>", "<b>"),
    ],
)
def test_an_answer_without_a_visible_character_is_said_in_words(text, shown, tmp_path):
    assert shown_answer(text) == shown
    run = write_run(tmp_path / "run", [(0, "hi?", text, None), (20, "hi?", "yes!", None)])
    assert f"before training {' '.join(shown.split())} after training yes!" in page(run)


def test_pairs_have_their_share_their_margin_and_their_rewards(tmp_path):
    run = write_run(tmp_path / "run", [], pairs=True)
    assert ("preferred", "87.5 %", "of 8 pairs, margin +15.00") in headline_figures(run)
    text = page(run)
    titles = (
        "loss a pair",
        "share of pairs preferred",
        "reward margin, chosen less rejected",
        "rewards in train",
    )
    assert [text.index(title) for title in titles] == sorted(text.index(title) for title in titles)
    assert "chosen rejected" in text
    assert "bits per byte" not in text
    charts = write_report(run).read_text(encoding="utf-8").split('<figure class="chart card">')
    (margins,) = [chart for chart in charts if "reward margin" in chart]
    assert "15.000" in margins
    assert "7.500" in margins
    write_loss_plot(run)


def test_texts_have_no_such_charts(tmp_path):
    run = write_run(tmp_path / "run", ASKED)
    text = page(run)
    assert "reward" not in text
    assert ("bits per byte", "0.500", "of what is learnt") in headline_figures(run)
    assert ("parameters", "137M", "2.44M trained") in headline_figures(run)
