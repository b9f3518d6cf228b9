"""Each way of sampling with its right price, against published and exact numbers."""

from __future__ import annotations

import pytest

from discreet.cli.calibrate import LOCAL_CHOICES, Question, answer, main, sampled_choices

TFF = sampled_choices(3383, 120)  # REFERENCES: z = 1.2, 100 rounds, delta 1e-5
PRICES = {0: 1.707, 1: 1.986, 2: 14.09, 3: 69.46}


@pytest.mark.parametrize(("index", "epsilon"), PRICES.items())
def test_the_price_of_each_sampling_is_the_reference(index: int, epsilon: float) -> None:
    asked = Question(1e-5, noise=1.2, epsilon=None, rounds=100)
    assert answer(TFF[index], asked) == pytest.approx(epsilon, rel=1e-3)


@pytest.mark.parametrize("wrong", [("--noise", "nan"), ("--noise", "-1"), ("--epsilon", "inf"), ("--delta", "1")])
def test_a_number_out_of_its_range_ends_with_code_2(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--rounds": "10", "--noise": "1"} if wrong[0] != "--epsilon" else {"--rounds": "10"}
    assert main(["local", *(word for pair in (given | dict([wrong])).items() for word in pair)]) == 2
    assert capsys.readouterr().err.startswith(f"discreet: {wrong[0]} must be ")


@pytest.mark.parametrize("index", [0, 1, 3])
def test_noise_epsilon_and_rounds_answer_each_other(index: int) -> None:
    noise = answer(TFF[index], Question(1e-5, None, 8.0, 50))
    assert answer(TFF[index], Question(1e-5, noise, None, 50)) == pytest.approx(8.0, rel=1e-3)
    assert answer(TFF[index], Question(1e-5, noise, 8.0, None)) >= 50


def test_pure_laplace_adds_up() -> None:
    pure = LOCAL_CHOICES[2]
    assert answer(pure, Question(1e-5, 4.0, None, 10)) == pytest.approx(2.5)
    assert answer(pure, Question(1e-5, None, 2.5, 10)) == pytest.approx(4.0)
    assert answer(pure, Question(1e-5, 4.0, 2.5, None)) == 10


def test_the_command_prints_the_choices_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["user", "--population", "100", "--cohort", "10", "--rounds", "5", "--noise", "1"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("poisson", "fixed size", "everyone", "replace one"))


def test_example_level_is_said_to_be_zero_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["example", "--population", "100", "--cohort", "8", "--rounds", "3000", "--noise", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("zero-out") == 3 + 1
    assert "4.99" in printed
    assert "add or remove one" not in printed
    assert "hold for adding or removing one if --population is data.public_num_examples" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("user --rounds 5 --noise 1", "needs --population and --cohort"),
        ("user --population 10 --cohort 11 --rounds 5 --noise 1", "--cohort must be within"),
        ("local --rounds 5", "give two of"),
        ("local --rounds 5 --noise 1 --delta 2", "delta"),
    ],
)
def test_what_is_missing_is_said(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(words.split())
    captured = capsys.readouterr()
    assert message in captured.err + captured.out
    assert code == 2 or "delta" in message
