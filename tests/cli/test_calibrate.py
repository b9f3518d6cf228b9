"""Each way of sampling with its right price, against published and exact numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from discreet.planning.prices import Price, masked_sum, sampled_prices, secure_prices, turn_prices
from discreet.privacy.mechanisms import analytic_gaussian_noise_multiplier
from discreet.settings.privacy import SecureConfig
from tests.command import calibrate as main

REPOSITORY = Path(__file__).resolve().parents[2]

TFF = sampled_prices(3383, 120)  # REFERENCES: z = 1.2, 100 rounds, delta 1e-5


def test_the_price_of_each_sampling_is_the_reference() -> None:
    found = [price.epsilon(noise=1.2, rounds=100, delta=1e-5) for price in TFF]
    assert found == pytest.approx([1.707, 1.986, 14.09, 69.46], rel=1e-3)


def test_the_choices_stand_side_by_side_and_example_level_is_zero_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            ["example", "--population", "100", "--cohort", "8", "--rounds", "3000", "--noise", "4"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("poisson", "fixed size", "everyone", "replace one"))
    assert printed.count("zero-out") == 3 + 1
    assert "4.99" in printed
    assert "add or remove one" not in printed
    assert "--population is data.public_num_examples" in printed


def test_a_noise_multiplier_is_over_what_one_client_or_example_moves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sampled = ["--population", "100", "--cohort", "8"]
    for level, more, over in (
        ("local", [], "over twice the clip norm"),
        ("user", sampled, "over the clip norm"),
        ("example", sampled, "over the clip norm"),
    ):
        assert main([level, *more, "--rounds", "3", "--noise", "5"]) == 0
        assert over in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("user --rounds 5 --noise 1", "needs --population and --cohort"),
        ("local --rounds 5", "give two of"),
        (
            "user --population 0 --cohort 3 --rounds 5 --noise 1",
            "--population must be at least 1 (got 0)",
        ),
        (
            "example --population -5 --cohort 3 --rounds 5 --noise 1",
            "--population must be at least 1 (got -5)",
        ),
        (
            "user --population 10 --cohort 3 --rounds 5 --noise 1 --delta 0.5",
            "--delta must be below 1 / 10, the population",
        ),
        ("local --rounds 5 --epsilon inf", "--epsilon must be"),
        (
            "example --aggregation secure --clients 10 --rounds 5 --noise 1",
            "secure is for user, or for example with --examples",
        ),
        (
            "user --aggregation secure --clients 3 --rounds 5 --noise 1",
            "privacy.secure.threshold must be within",
        ),
        ("example --sampling cyclic --groups 3 --rounds 3 --epsilon 1", "cyclic is for user"),
        ("user --sampling cyclic --rounds 3 --epsilon 1", "--sampling cyclic needs --groups"),
        ("user --groups 3 --rounds 3 --epsilon 1", "--groups needs --sampling cyclic"),
    ],
)
def test_what_is_missing_or_wrong_is_said(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_secure_aggregation_costs_what_a_trusted_server_does_by_renyi_divergences() -> None:
    secure = SecureConfig(dropouts=2, colluding=1)
    prices = secure_prices(lambda noise: masked_sum(10, secure, noise, 10_000).event_of())
    masked, by_rdp, by_pld = (price.epsilon(4.0, 100, 1e-5) for price in prices)
    assert masked == pytest.approx(by_rdp, rel=1e-3)
    assert masked > by_pld


def test_the_worked_table_of_the_docs_is_what_is_computed() -> None:
    lines = (REPOSITORY / "docs" / "secure_aggregation.md").read_text().splitlines()
    rows = [
        line.strip("| ").split(" | ")
        for line in lines
        if line.startswith("| ") and line[2].isdigit()
    ]
    assert len(rows) == 6
    for n, d, c, t, h, rounds, epsilon, noise, own, *bits in rows:
        clients, secure = int(n), SecureConfig(int(d), int(c))
        price = secure_prices(
            lambda z, n=clients, secure=secure: masked_sum(n, secure, z, 1000).event_of()
        )[0]
        found = price.noise(float(epsilon), int(rounds), 1e-5)
        small, large = (
            masked_sum(clients, secure, found, parameters) for parameters in (1000, 10**6)
        )
        assert (f"{found:.4g}", f"{small.own_noise_stddev:.3g}") == (noise, own)
        assert (secure.threshold_of(clients), small.summands) == (int(t), int(h))
        assert [small.bits, large.bits] == [int(bit) for bit in bits]


def test_turns_have_the_price_of_one_gaussian_and_less_noise_on_the_running_sum(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "user",
                "--sampling",
                "cyclic",
                "--groups",
                "28",
                "--rounds",
                "100",
                "--epsilon",
                "1.71",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    found = [float(each) for each in re.findall(r"updates ([\d.]+) clip norms", printed)]
    noise = analytic_gaussian_noise_multiplier(1.71, delta=1e-5)
    # independent noise, four turns
    assert found[-1] == pytest.approx(noise * 2 * math.sqrt(101 / 2), rel=1e-3)
    assert found[0] / found[-1] <= 0.35
    assert "cyclic, bsr, bandwidth 28" in printed
    assert "compare the running sums, not the multipliers" in printed
    words = ["--population", "3383", "--cohort", "120", "--rounds", "100", "--noise", "1.2"]
    assert main(["user", "--sampling", "cyclic", "--groups", "28", *words]) == 0
    printed = capsys.readouterr().out
    assert all(
        name in printed
        for name in ("cyclic, bisr", "cyclic, independent", "poisson", "everyone", "1.7075")
    )


def test_noise_epsilon_and_rounds_of_turns_answer_each_other() -> None:
    price: Price = turn_prices(5, adjacency="add or remove one")[0]
    noise = price.noise(epsilon=8.0, rounds=50, delta=1e-5)
    assert price.epsilon(noise, 50, 1e-5) == pytest.approx(8.0, rel=1e-3)
    assert price.rounds(noise, 8.0, 1e-5) >= 50
    assert price.epsilon(noise, price.rounds(noise, 8.0, 1e-5) + 1, 1e-5) > 8.0
