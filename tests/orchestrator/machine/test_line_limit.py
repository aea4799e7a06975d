"""Law of lines that others cause in a log."""

from orchestrator.machine.line_limit import LineLimit


def test_the_first_lines_of_a_minute_pass_and_say_how_many_did_not_before():
    limit = LineLimit(2)

    assert [limit.take(now) for now in (0, 1, 2, 59, 60, 61, 62, 130)] == [0, 0, None, None, 2, 0, None, 1]
