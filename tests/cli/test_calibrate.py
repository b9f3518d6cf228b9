"""Each way of sampling with its right price, against published and exact numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from discreet.cli.calibrate import LOCAL_CHOICES, Question, SecurePrice, answer, sampled_choices, secure_choices
from discreet.settings.privacy import SecureConfig
from tests.command import calibrate as main

REPOSITORY = Path(__file__).resolve().parents[2]

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
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


SECURE = "user --aggregation secure --clients 10 --dropouts 2 --colluding 1"


def test_secure_aggregation_costs_what_a_trusted_server_does_by_renyi_divergences() -> None:
    choices = secure_choices(SecurePrice(10, SecureConfig(dropouts=2, colluding=1), 10_000))
    asked = Question(1e-5, noise=4.0, epsilon=None, rounds=100)
    assert answer(choices[0], asked) == pytest.approx(answer(choices[1], asked), rel=1e-3)
    assert answer(choices[0], asked) > answer(choices[2], asked)


def test_the_command_says_what_a_client_adds_and_sends(capsys: pytest.CaptureFixture[str]) -> None:
    """z = 4 shared by 7 clients: 4 / sqrt(7) = 1.512 clip norms each."""
    assert main([*SECURE.split(), "--rounds", "100", "--noise", "4"]) == 0
    printed = capsys.readouterr().out
    assert "each of 10 clients adds a discrete Gaussian of standard deviation 1.512 clip norms" in printed
    assert "that of 7 is accounted" in printed
    assert "24 bits a value, 3,000,000 bytes a client and round; 6 nodes must agree" in printed


def test_at_example_level_the_bits_hold_all_examples_of_all_clients(capsys: pytest.CaptureFixture[str]) -> None:
    """4 * 303 * 4096 steps are 2^22.2 and 4 * 30,000 * 4096 are 2^28.9: a sign and the noise come on top."""
    words = "example --aggregation secure --clients 4 --parameters 14 --rounds 100 --epsilon 2 --delta 1e-3 --examples"
    assert main([*words.split(), "303"]) == 0
    assert "24 bits" in capsys.readouterr().out
    assert main([*words.split(), "30000"]) == 0
    assert "30 bits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("local --aggregation secure --clients 10", "--aggregation secure is for"),
        ("user --aggregation secure", "--aggregation secure is for"),
        ("example --aggregation secure --clients 10", "--aggregation secure is for"),
        ("user --aggregation secure --clients 3", "privacy.secure.threshold must be within"),
        ("user --aggregation secure --clients 10 --parameters 0", "num_params must be in"),
    ],
)
def test_secure_aggregation_that_does_not_exist_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "--rounds", "5", "--noise", "1"]) == 2
    assert message in capsys.readouterr().err


def test_the_worked_table_of_the_docs_is_what_is_computed() -> None:
    lines = (REPOSITORY / "docs" / "secure_aggregation.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and line[2].isdigit()]
    assert len(rows) == 10
    for n, d, c, t, h, rounds, epsilon, noise, own, *bits in rows:
        price = SecurePrice(int(n), SecureConfig(int(d), int(c)), 1000)
        found = answer(secure_choices(price)[0], Question(1e-5, None, float(epsilon), int(rounds)))
        assert (f"{found:.4g}", f"{price.sum(found).own_noise_stddev:.3g}") == (noise, own)
        assert (price.secure.threshold_of(int(n)), price.sum(found).summands) == (int(t), int(h))
        assert [price.sum(found).bits, replace(price, parameters=10**6).sum(found).bits] == [int(bit) for bit in bits]
