"""Which settings of secure aggregation are refused, by name and with the way out."""

from __future__ import annotations

import pytest

from discreet.protocol.messages import TrainRequest, request_items, request_of
from discreet.server.plan import planned
from discreet.settings.compose import load_config
from discreet.settings.privacy import SecureConfig
from discreet.settings.rules import ConfigError
from discreet.settings.settings import client_settings

SECURE = (
    *("privacy.user.aggregation=secure", "sampling.kind=everyone", "privacy.accountant=rdp", "data.num_clients=20"),
    *("privacy.user.noise_multiplier=1", "privacy.secure.dropouts=2"),
)

REFUSED = {
    "sampling.kind must be everyone": ["sampling.kind=poisson"],
    "privacy.accountant must be rdp": ["privacy.accountant=pld"],
    "privacy.noise must be grid": ["privacy.noise=float"],
    "data.normalise=private needs privacy.user.aggregation=plain": ["data.normalise=private"],
    "sampling.population_size with secure aggregation must be within": ["data.num_clients=2"],
    "privacy.secure.dropouts must be at most 18": ["privacy.secure.dropouts=19"],
    "privacy.secure.threshold must be within .11, 18.": ["privacy.secure.threshold=10"],
    "it is empty": ["privacy.secure.dropouts=10"],
    "privacy.user.aggregation must be plain": ["privacy.user.enabled=false"],
}


@pytest.mark.parametrize(("message", "words"), REFUSED.items())
def test_what_does_not_fit_is_refused(message: str, words: list[str]) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([*SECURE, *words])


def test_no_two_disjoint_sets_open_two_sums_and_the_losses_that_are_allowed_leave_enough() -> None:
    every = ((nodes, lost, bad) for nodes in range(3, 101) for lost in range(nodes) for bad in range(nodes - lost))
    for nodes, dropouts, colluding in every:
        secure = SecureConfig(dropouts, colluding)
        threshold, safe = secure.threshold_of(nodes), nodes > 2 * dropouts + colluding
        assert 2 * threshold > nodes + colluding
        assert (threshold <= nodes - dropouts) == safe
        if safe:
            secure.check_fits(nodes)


def test_a_node_is_told_all_that_its_share_of_the_noise_follows_from() -> None:
    told = client_settings(load_config([*SECURE, "privacy.secure.colluding=3", "privacy.user.clip.count_stddev=7"]))
    read = request_of(request_items(TrainRequest(1, 0.5, told))).run
    assert (read.secure, read.user) == (SecureConfig(2, 3), told.user)
    assert (read.user.aggregation, read.user.adaptive, read.user.count_stddev) == ("secure", True, 7.0)


def test_a_resumed_run_keeps_what_decides_who_can_read_what() -> None:
    facts, plain = (planned(load_config(words)).deciding for words in (SECURE, SECURE[1:]))
    added = {"privacy.user.aggregation": "secure", "privacy.secure.dropouts": 2, "privacy.secure.colluding": 1}
    assert facts == plain | added | {"privacy.secure.threshold": 11, "privacy.example.aggregation": "plain"}
