from driver.accounting.accuracy import Accuracy
from driver.reports.run_summary import RunSummary, machine_line, summary_lines

DEMO = {
    0: Accuracy(correct=62, total=200),
    40: Accuracy(correct=1, total=200),
    60: Accuracy(correct=172, total=200),
}


def summary(**changes):
    values = {
        "name": "demo",
        "rewards": [0.30, 0.33, 0.35, 0.37, 0.40] + [0.6] * 50 + [0.90, 0.91, 0.92, 0.91, 0.91],
        "accuracy": {"": DEMO},
        "seconds": 213.6,
        "outputs": {"logs": "runs/demo", "policy": "runs/demo/export"},
    }
    return RunSummary(**(values | changes))


def test_machine_line_is_exact():
    assert machine_line(summary()) == (
        "demo: accuracy 0.31 -> 0.86, reward 0.35 -> 0.91, steps 60, seconds 214"
    )


def test_machine_line_says_what_is_unknown():
    line = machine_line(summary(rewards=[], accuracy={}))
    assert line == "demo: accuracy n/a -> n/a, reward n/a -> n/a, steps 0, seconds 214"


def test_summary_has_both_intervals_and_ends_with_the_machine_line():
    lines = summary_lines(summary())
    assert "0.350" in lines[0] and "first 5" in lines[0]
    assert "0.910" in lines[1] and "last 5" in lines[1]
    # Wilson, z = 1.96: (p + z2/2n +- z sqrt(p(1-p)/n + z2/4n2)) / (1 + z2/n)
    assert "0.310 (62 of 200 with a reward of at least 1; 95 % interval 0.250 to 0.377)" in lines[2]
    assert (
        "0.860 (172 of 200 with a reward of at least 1; 95 % interval 0.805 to 0.901)" in lines[3]
    )
    assert "logs: runs/demo" in lines and "policy: runs/demo/export" in lines
    assert lines[-1] == machine_line(summary())


def test_an_accuracy_that_is_not_there_has_its_reason():
    lines = summary_lines(summary(accuracy={"": {20: None}}))
    assert lines[2].endswith("not evaluated")
    assert lines[3].endswith("not known: set eval.correct_from to the least reward that is right")


def test_a_short_run_is_halved_so_that_no_step_is_on_both_sides():
    lines = summary_lines(summary(rewards=[0.1, 0.2]))
    assert lines[0].startswith("reward of the first step ") and lines[0].endswith("0.100")
    assert lines[1].endswith("0.200")


def test_a_resume_that_trained_nothing_says_whose_figures_it_shows():
    lines = summary_lines(summary(rewards=[0.1, 0.2], resumed_at=2))
    assert (
        lines[0] == "no step was trained since --resume: these are the figures of 2 earlier steps"
    )
    assert lines[1].startswith("reward of the first step") and lines[-1].startswith("demo: ")
    assert summary_lines(summary(rewards=[], resumed_at=0))[0] == (
        "no step was trained since --resume"
    )


def test_a_resume_that_trained_shows_the_figures_alone():
    assert summary_lines(summary(rewards=[0.1, 0.2], resumed_at=1))[0].startswith("reward of")
    assert summary_lines(summary(rewards=[0.1, 0.2]))[0].startswith("reward of")


def test_of_several_held_out_sets_each_has_its_lines_and_the_first_is_for_machines():
    both = summary(accuracy={"sums": DEMO, "words": {60: Accuracy(correct=1, total=4)}})
    lines = summary_lines(both)
    assert lines[2].startswith("held-out accuracy of sums before   0.310")
    assert lines[4] == "held-out accuracy of words before   not evaluated"
    assert lines[5].startswith("held-out accuracy of words after    0.250 (1 of 4")
    assert machine_line(both) == machine_line(summary())
