"""The faults that `tests.mutants` plants, and the tests that notice each of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault, `name` says which: `old`, which stands once in `file`, becomes `new`, and one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    # The first ten survived the first version of the tests.
    Mutant(
        "all clients of a chunk get the same noise",
        "discreet/simulation/draws.py",
        "return mechanisms[0].add_noise(totals, sensitivity, self.source) if len(totals) else totals",
        "return totals + mechanisms[0].add_noise(0 * totals[:1], sensitivity, self.source) if len(totals) else totals",
        ("tests/simulation/test_draws.py::test_secure_noise_of_one_client_says_nothing_of_anothers",),
    ),
    Mutant(
        "a Poisson cohort is drawn again until it is not empty",
        "discreet/federated/round.py",
        "return poisson_cohort(members, self.probability, source)",
        "return poisson_cohort(members, self.probability, source) or self.draw(members, source)",
        ("tests/federated/test_cohort_sampling.py::test_a_poisson_cohort_is_empty_as_often_as_it_should_be",),
    ),
    Mutant(
        "a charge may still be in memory when it returns",
        "discreet/federated/durable_ledger.py",
        '"pragma synchronous = full"',
        '"pragma synchronous = normal"',
        ("tests/federated/test_durable_ledger.py::test_a_charge_has_reached_the_disk_when_it_returns",),
    ),
    Mutant(
        "the PLD keeps the sum of other counts than those that are asked for",
        "discreet/privacy/loss_distribution.py",
        "total = _settled_sum(items[:-_GROWING], frame, length)",
        "total = _settled_sum(tuple((event, 3) for event, _ in items[:-_GROWING]), frame, length)",
        ("tests/privacy/test_loss_distribution.py::test_what_is_kept_of_events_that_do_not_change_is_of_these_events",),
    ),
    Mutant(
        "the PLD forgets the direction in which a member is added",
        "discreet/privacy/loss_distribution.py",
        "directions = (0, 1) if",
        "directions = (0,) if",
        ("tests/privacy/test_pld_oracle.py::test_where_adding_a_member_costs_more_that_is_the_epsilon",),
    ),
    Mutant(
        "a sum on the grid lets norms pass that are too large by 5e-5",
        "discreet/privacy/clipping.py",
        "_power_sums(whole, self.order) <= self._largest",
        "_power_sums(whole, self.order) <= self._largest * (1 + 1e-4)",
        ("tests/privacy/test_clipping.py::test_an_update_over_the_clip_by_one_step_on_the_grid_is_clipped",),
    ),
    Mutant(
        "an update that is to be clipped in L1 on the grid is clipped in L2",
        "discreet/privacy/clipping.py",
        "GridSum(len(update), norm_clip, grid=grid, order=order)",
        "GridSum(len(update), norm_clip, grid=grid)",
        ("tests/privacy/test_clipping.py::test_a_held_norm_is_at_most_the_clip_in_exact_arithmetic",),
    ),
    Mutant(
        "batched DP-SGD draws no noise if no client of the chunk has a batch",
        "discreet/simulation/chunk.py",
        "return self.draws.add_noise(sums, self._mechanisms, l2_norm_clip, step=step)",
        "return self.draws.add_noise(sums, self._mechanisms, l2_norm_clip, step=step) if sums.any() else sums",
        ("tests/simulation/test_chunk.py::test_where_no_client_has_a_batch_each_still_draws_the_noise_of_every_step",),
    ),
    Mutant(
        "privacy.json counts the rounds and not the ledger",
        "discreet/federated/privacy_statement.py",
        "    spent = ledger.spent(USER)\n",
        "    spent = PrivacyLedger(tuple((event, checkpoint.round) for event, _ in ledger.spent(USER).entries))\n",
        (
            "tests/simulation/test_resume.py"
            "::test_what_a_run_says_it_has_spent_is_what_the_ledger_says_not_what_its_rounds_would_cost",
        ),
    ),
    Mutant(
        "a fixed-size cohort is drawn from who is connected",
        "discreet/federated/round.py",
        "places = range(self.population_size)",
        "return fixed_size_cohort(members, round(self.probability * len(members)), source)",
        (
            "tests/federated/test_cohort_sampling.py"
            "::test_a_fixed_size_cohort_is_drawn_from_the_population_not_from_who_is_connected",
        ),
    ),
    Mutant(
        "tune runs a poor trial again",
        "discreet/cli/tune.py",
        "    tally = run_all(jobs, at_a_time=at_a_time, shared=folder)\n",
        "    tally = run_all(jobs, at_a_time=at_a_time, shared=folder)\n"
        "    for job in (job for job in jobs if _score(job.folder.path) < 0.6):\n"
        '        simulate(replace(job.config, output_dir=f"{job.folder.path}_"))\n',
        ("tests/cli/test_tune.py::test_as_many_trials_run_as_were_drawn_however_poor_they_are",),
    ),
    Mutant(
        "a Poisson batch is cut at batch_size + 2",
        "discreet/training/local_training.py",
        "return step_batch(self.source, step, len(self.examples), probability=probabilities[0])",
        "drawn = step_batch(self.source, step, len(self.examples), probability=probabilities[0])\n"
        "        return drawn[: self.settings.batch_size + 2]",
        ("tests/training/test_local_training.py::test_a_poisson_batch_counts_whole_however_large_it_is",),
    ),
    Mutant(
        "a Poisson batch of the batched engine is cut at batch_size + 2",
        "discreet/simulation/chunk.py",
        "return poisson_batch(self.table, clients, positions, active=active)",
        "batch = poisson_batch(self.table, clients, positions, active=active)\n"
        "        batch.counts.clip(max=self.settings[0].batch_size + 2, out=batch.counts)\n"
        "        return batch",
        ("tests/simulation/test_chunk.py::test_a_poisson_batch_counts_whole_however_large_it_is",),
    ),
    # Clipping.
    Mutant(
        "a float sum lets norms pass that are too large by 1e-4",
        "discreet/privacy/clipped_sum.py",
        "factors = clip_factors(torch.from_numpy(norms), self.clip_norm)",
        "factors = clip_factors(torch.from_numpy(norms), self.clip_norm * (1 + 1e-4))",
        ("tests/privacy/test_clipping.py::test_an_update_over_the_clip_by_little_is_clipped_in_a_float_sum",),
    ),
    Mutant(
        "float32 is sure of a norm that is a little too large",
        "discreet/privacy/clipped_sum.py",
        "squares <= clip_norm**2 * (1 - 2.0**-9)",
        "squares <= clip_norm**2 * (1 + 2.0**-9)",
        ("tests/privacy/test_clipping.py::test_float32_is_not_sure_of_a_norm_that_is_over_the_clip_by_little",),
    ),
    Mutant(
        "clipped rows are rounded up in float32",
        "discreet/privacy/clipping.py",
        "min(norm_clip * (1 - CLIP_MARGIN), ",
        "min(norm_clip, ",
        ("tests/privacy/test_clipping.py::test_no_row_leaves_with_more_than_the_clip_norm",),
    ),
    Mutant(
        "gradients that are to be clipped in L1 are clipped in L2",
        "discreet/privacy/per_example.py",
        "norms = _norms(terms, objective.order)",
        "norms = _norms(terms, 2)",
        ("tests/privacy/test_per_example.py::test_gradients_are_clipped_in_l1_where_that_is_asked_for",),
    ),
    Mutant(
        "if an example is lost, the others' masks are drawn again",
        "discreet/privacy/per_example.py",
        "return [without(term, lost) for term in terms], ",
        "return [without(term, lost) for term in one_pass(objective, way, *batch)], ",
        ("tests/privacy/test_per_example_dropout.py::test_an_example_that_is_lost_leaves_the_masks_of_the_others",),
    ),
    Mutant(
        "what one example draws shifts the next one's masks",
        "discreet/privacy/rules/any_model.py",
        "            torch.manual_seed(seed)\n",
        "",
        ("tests/privacy/test_per_example_dropout.py::test_an_example_that_is_lost_leaves_the_masks_of_the_others",),
    ),
    Mutant(
        "tensors of the examples of different dimensions meet in an operation",
        "discreet/privacy/rules/operations.py",
        "_require(len(dims) == 1)\n    (dim,) = dims",
        "_require(len(dims) >= 1)\n    dim = max(dims)",
        ("tests/privacy/test_per_example_graph.py::test_no_rule_serves_what_may_mix_examples",),
    ),
    Mutant(
        "a tensor that is not of the examples has a row for each of them",
        "discreet/privacy/rules/operations.py",
        "and len(given) == 1))",
        "and len(given) >= 1))",
        ("tests/privacy/test_per_example_graph.py::test_no_rule_serves_what_may_mix_examples",),
    ),
    Mutant(
        "the number of examples is a number like any other",
        "discreet/privacy/rules/graph.py",
        "(Count(len(tensor)), *tensor.shape[1:])",
        "(len(tensor), *tensor.shape[1:])",
        ("tests/privacy/test_per_example_graph.py::test_no_rule_serves_what_may_mix_examples",),
    ),
    Mutant(
        "an operation in a forward runs over the examples",
        "discreet/privacy/rules/operations.py",
        "all(_whole(dim) and dim % count for dim in found)",
        "all(_whole(dim) for dim in found)",
        ("tests/privacy/test_per_example_graph.py::test_no_rule_serves_what_may_mix_examples",),
    ),
    Mutant(
        "an operation in a forward may give another number of rows",
        "discreet/privacy/rules/graph.py",
        "value.dim() == 0 or len(value) != self.tape.count",
        "value.dim() == 0",
        ("tests/privacy/test_per_example_graph.py::test_no_rule_serves_what_may_mix_examples",),
    ),
    Mutant(
        "a parameter of as many rows as examples gives each its own",
        "discreet/privacy/rules/operations.py",
        "_require(own < dim or (own == dim and self.copies.shape[1] == 1))\n        if own == dim:",
        "if own == dim:\n            return self.copies.diagonal(0, 0, 1).movedim(-1, 0)\n        if own == dim:",
        ("tests/privacy/test_per_example_graph.py::test_no_rule_serves_what_may_mix_examples",),
    ),
    Mutant(
        "a parameter that a layer and an operation read has two norms",
        "discreet/privacy/rules/graph.py",
        "for value in (*used, *others) if",
        "for value in used if",
        ("tests/privacy/test_per_example_graph.py::test_no_rule_serves_what_is_not_known",),
    ),
    Mutant(
        "a model that has changed keeps its program",
        "discreet/privacy/rules/graph.py",
        "if held and held[0] == state:",
        "if held:",
        ("tests/privacy/test_per_example_graph.py::test_a_model_that_changes_is_traced_anew",),
    ),
    Mutant(
        "a program is trusted without a look at the gradients of the model",
        "discreet/privacy/rules/graph.py",
        "trusted = program if program is not None and agrees(program) else None",
        "trusted = program",
        ("tests/privacy/test_per_example_graph.py::test_no_rule_serves_what_is_not_known",),
    ),
    Mutant(
        "padding counts as examples",
        "discreet/simulation/batches.py",
        "if present is not None:",
        "if present is None:",
        ("tests/simulation/test_batches.py::test_weights_make_means_and_sums_of_what_counts",),
    ),
    Mutant(
        "the batched engine leaves the bias out of a gradient's norm",
        "discreet/simulation/layer_sequence.py",
        "added = 0 if use.bias is None else 1",
        "added = 0",
        ("tests/simulation/test_chunk.py::test_a_poisson_batch_counts_whole_however_large_it_is",),
    ),
    # Noise.
    Mutant(
        "the key of a secure source is known",
        "discreet/privacy/randomness.py",
        "os.urandom(32)",
        "bytes(32)",
        ("tests/privacy/test_randomness.py::test_secure_sources_and_their_children_never_repeat",),
    ),
    Mutant(
        "a value of the secure mode is a mean of draws",
        "discreet/privacy/randomness.py",
        "stddev / math.sqrt(draws)",
        "stddev / draws",
        ("tests/privacy/test_randomness.py::test_normal_has_stddev_one_and_not_a_tenth_more_or_less",),
    ),
    Mutant(
        "a server without a seed draws from a known one",
        "discreet/privacy/randomness.py",
        "return secure_source() if seed is None else seeded_source(seed)",
        "return seeded_source(seed or 0)",
        (
            "tests/federated/test_robustness.py"
            "::test_without_a_seed_the_servers_draws_are_secure_and_those_of_no_other_run",
        ),
    ),
    Mutant(
        "without a seed the chunks of a simulation repeat each other's draws",
        "discreet/simulation/cohort.py",
        "return SecureDraws(secure_source())",
        "return SecureDraws(type(secure_source())(bytes(32), is_secure=True))",
        ("tests/simulation/test_cohort.py::test_without_a_seed_no_chunk_repeats_the_draws_of_another",),
    ),
    Mutant(
        "the count of norms has half its noise",
        "discreet/federated/round.py",
        "mechanism = Gaussian(user.count_stddev / BIT_SENSITIVITY, draws=user.draws)",
        "mechanism = Gaussian(user.count_stddev, draws=user.draws)",
        ("tests/federated/test_round.py::test_the_count_has_noise_of_its_standard_deviation",),
    ),
    Mutant(
        "every client noises the first step of DP-SGD only",
        "discreet/training/local_training.py",
        "return clients.add_noise(clients.clipped_sums(params, batch, clip), clip, step=step)",
        "noised = clients.clipped_sums(params, batch, clip)\n"
        "    return (noised if step else clients.add_noise(noised, clip, step=step))",
        ("tests/training/test_local_training.py::test_dp_sgd_draws_poisson_batches_and_noise_for_every_step",),
    ),
    # Sampling and denominators.
    Mutant(
        "clients of equal size draw the same batches",
        "discreet/simulation/draws.py",
        "chosen = poisson_sample((stop - start) * size, probability=probabilities[start], source=self.source).numpy()",
        "drawn = poisson_sample(size, probability=probabilities[start], source=self.source).numpy()\n"
        "            chosen = (size * np.arange(stop - start)[:, None] + drawn).ravel()",
        ("tests/simulation/test_draws.py::test_secure_batches_of_one_client_say_nothing_of_anothers",),
    ),
    Mutant(
        "DP-SGD divides by the batch that was drawn",
        "discreet/training/local_training.py",
        ".div_(settings.batch_size)",
        ".div_(max(1, len(batch)))",
        ("tests/training/test_local_training.py::test_the_denominator_is_the_batch_size_whatever_the_client_has",),
    ),
    # A loop of one's own.
    Mutant(
        "DPSGD samples with another chance than it charges",
        "discreet/central/poisson_batches.py",
        "len(self.dataset), probability=self.probability)",
        "len(self.dataset), probability=min(1.0, 1.3 * self.probability))",
        ("tests/central/test_dpsgd.py::test_each_example_joins_a_batch_with_batch_size_over_n_and_no_other_chance",),
    ),
    Mutant(
        "DPSGD draws its noise before it charges",
        "discreet/central/private_gradients.py",
        "        self.account.charge()\n"
        "        return self.mechanism.add_noise(sums, l2_norm_clip, step_noise(self.source, step))",
        "        noised = self.mechanism.add_noise(sums, l2_norm_clip, step_noise(self.source, step))\n"
        "        self.account.charge()\n"
        "        return noised",
        (
            "tests/central/test_step_account.py"
            "::test_a_step_that_ends_between_its_charge_and_its_noise_is_charged_and_not_taken_up_again",
        ),
    ),
    Mutant(
        "dropout in DPSGD follows a seed that anybody may know",
        "discreet/tasks/dropout.py",
        "        torch.default_generator.manual_seed(seed)\n",
        "",
        ("tests/central/test_dpsgd.py::test_a_seed_of_torch_that_others_know_does_not_tell_the_masks",),
    ),
    Mutant(
        "DPSGD lets a batch be skipped",
        "discreet/central/dpsgd.py",
        "            if self.steps_taken == step:\n",
        "            if False:\n",
        ("tests/central/test_dpsgd.py::test_a_batch_cannot_be_skipped_and_waits_for_the_next_loop",),
    ),
    Mutant(
        "DPSGD takes one step beyond its budget",
        "discreet/central/step_account.py",
        "if self.taken - self._first >= self._room:",
        "if self.taken - self._first > self._room:",
        ("tests/central/test_dpsgd.py::test_a_step_that_would_pass_the_budget_is_refused_and_costs_nothing",),
    ),
    # Accounts and budgets.
    Mutant(
        "a client charges one step a round",
        "discreet/client/admission.py",
        "((example_event(num_examples, training), steps),)",
        "((example_event(num_examples, training), 1),)",
        (
            "tests/client/test_client.py::test_what_is_reported_is_what_dp_sgd_cost_over_all_rounds",
            "tests/client/test_admission.py::test_charges_are_on_disk_before_anybody_works",
        ),
    ),
    Mutant(
        "a charge goes through although another was made since the budget was looked at",
        "discreet/federated/durable_ledger.py",
        "_charged_since(connection, since) & {charge.holder for charge in charges}:",
        "False:",
        ("tests/client/test_account.py::test_a_charge_made_meanwhile_is_seen_before_the_budget_is_passed",),
    ),
    Mutant(
        "a ledger that is missing is begun anew",
        "discreet/federated/durable_ledger.py",
        "        if not path.is_file():\n            raise LedgerError(",
        "        if not path.is_file():\n            DurableLedger.create(path, facts=facts)\n            str(",
        ("tests/federated/test_lost_ledgers.py::test_a_node_does_not_work_without_all_that_it_spent",),
    ),
    Mutant(
        "a run is resumed with a ledger that is older than its checkpoint",
        "discreet/federated/run_folder.py",
        "not ledger.contains(mark)",
        "False",
        ("tests/federated/test_lost_ledgers.py::test_on_another_machine_the_checkpoint_tells",),
    ),
    Mutant(
        "a second copy of a ledger is charged too",
        "discreet/federated/durable_ledger.py",
        "if _head_at(connection, known.rows) != known.head:",
        "if False:",
        ("tests/federated/test_lost_ledgers.py::test_a_run_folder_that_was_copied_is_not_resumed_twice",),
    ),
    Mutant(
        "the same charge to two copies gives them one digest",
        "discreet/federated/durable_ledger.py",
        "secrets.token_hex(8), []",
        '"", []',
        (
            "tests/federated/test_lost_ledgers.py::test_two_copies_that_are_charged_at_the_same_moment_do_not_both_go_on",
        ),
    ),
    Mutant(
        "a resumed run takes another noise multiplier",
        "discreet/federated/resuming.py",
        "CHANGEABLE = (\n",
        'CHANGEABLE = (\n    "privacy.user.noise_multiplier",\n',
        ("tests/federated/test_resuming.py::test_what_decides_privacy_is_refused_by_the_name_that_was_typed",),
    ),
    Mutant(
        "a run forgets to charge its population's account",
        "discreet/federated/durable_ledger.py",
        "                self.account.charge(charges)\n",
        "                self.account.require_room(charges)\n",
        (
            "tests/federated/test_population_account.py::test_every_run_charges_it_and_its_own_ledger_says_what_it_cost_itself",
        ),
    ),
    Mutant(
        "the budget of all runs is looked at outside of the transaction that charges",
        "discreet/federated/population_account.py",
        "self.ledger.charge_if(lambda sums: self._look(mine, sums), mine)",
        "self.ledger.charge(mine)",
        (
            "tests/federated/test_population_account.py"
            "::test_what_another_run_charged_since_the_look_ahead_is_seen_by_the_charge",
        ),
    ),
    Mutant(
        "a run's own ledger is charged before the account",
        "discreet/federated/durable_ledger.py",
        "        if charges:\n            if self.account is not None:\n",
        "        if charges:\n            self._charge(charges)\n"
        "            charges = charges if self.account else ()\n            if self.account is not None:\n",
        ("tests/federated/test_population_account.py::test_a_round_whose_room_was_taken_meanwhile_releases_nothing",),
    ),
    Mutant(
        "a run with another delta charges the account",
        "discreet/federated/population_account.py",
        "if facts[name] != getattr(population, name):",
        'if name != "delta" and facts[name] != getattr(population, name):',
        ("tests/federated/test_population_account.py::test_another_population_is_refused_by_the_setting_that_differs",),
    ),
    Mutant(
        "a run goes on with an account that lacks what it has spent",
        "discreet/federated/population_account.py",
        "if lacking or (",
        "if (",
        ("tests/federated/test_population_account.py::test_a_run_that_has_no_checkpoint_keeps_its_account_too",),
    ),
    Mutant(
        "a trial of a tune that was ended early by the account is published",
        "discreet/federated/chosen_trial.py",
        'ended = said["stopped"] is not None',
        "ended = False",
        ("tests/cli/test_tune.py::test_a_trial_that_the_account_ended_early_is_not_published",),
    ),
    Mutant(
        "the ledger adds up rows and not releases",
        "discreet/federated/durable_ledger.py",
        '"select event, sum(count) from releases',
        '"select event, count(*) from releases',
        ("tests/federated/test_durable_ledger.py::test_what_was_charged_is_there_for_the_next_process",),
    ),
    Mutant(
        "a run stops after the round that passed its budget",
        "discreet/federated/budget.py",
        "            after = after.record(charge.event, charge.count)",
        "            after = spent",
        ("tests/federated/test_training_run.py::test_the_budget_ends_the_run_before_the_round_that_would_pass_it",),
    ),
    Mutant(
        "a fixed-size cohort is accounted for adding and not for replacing",
        "discreet/privacy/events.py",
        "GaussianDpEvent(noise_multiplier / 2))",
        "GaussianDpEvent(noise_multiplier))",
        ("tests/privacy/test_events.py::test_a_fixed_size_round_counts_the_sensitivity_of_replacing",),
    ),
    Mutant(
        "noise for a target is rounded down",
        "discreet/privacy/calibration.py",
        "            return noise\n",
        "            return math.exp(root - step * _PRECISION / 5)\n",
        ("tests/privacy/test_calibration.py::test_the_noise_for_an_epsilon_is_the_smallest_to_a_ten_thousandth",),
    ),
    Mutant(
        "the loss that is infinite is left out",
        "discreet/privacy/loss_distribution.py",
        "infinite = _TAIL_MASS * float(untilt[-1]) + _infinite_mass(counts, frame)",
        "infinite = _TAIL_MASS * float(untilt[-1])",
        ("tests/privacy/test_loss_distribution.py::test_a_delta_below_the_mass_at_infinity_has_no_epsilon",),
    ),
    # What a node holds its server to, and what a server takes from a node.
    Mutant(
        "an owner's budget counts at the delta that the server names",
        "discreet/client/policy.py",
        "Budget(policy.max_epsilon, policy.max_delta)",
        "Budget(policy.max_epsilon, run.delta)",
        ("tests/client/test_policy.py::test_the_runs_budget_and_the_owners_hold_each_at_its_own_delta",),
    ),
    Mutant(
        "a declared budget hides what one round costs",
        "discreet/client/policy.py",
        "max(epsilon(1), min(epsilon(run.rounds), budget))",
        "min(epsilon(run.rounds), budget)",
        ("tests/client/test_policy.py::test_a_declared_budget_counts_only_as_far_as_a_round_fits_into_it",),
    ),
    Mutant(
        "a SuperNode that was configured like a simulation's is taken for one",
        "discreet/federated/simulation_ticket.py",
        "return node_config.keys() <= SIMULATION_KEYS and finds_ticket(folder, ticket)",
        "return node_config.keys() <= SIMULATION_KEYS",
        ("tests/client/test_nodes.py::test_outside_a_simulation_a_request_for_a_virtual_client_is_refused",),
    ),
    Mutant(
        "a client follows a request that holds more than it knows",
        "discreet/federated/messages.py",
        "    if left:\n",
        "    if False:\n",
        ("tests/federated/test_messages.py::test_a_request_that_a_client_can_not_follow_is_refused_in_one_line",),
    ),
    Mutant(
        "a reply of another round is taken",
        "discreet/federated/server_messages.py",
        'if numbers.get("round") != round_number:',
        'if numbers.get("round") is None:',
        ("tests/federated/test_messages.py::test_a_malformed_reply_is_refused",),
    ),
    Mutant(
        "a bit may be any number",
        "discreet/federated/server_messages.py",
        "if not isinstance(below, int) or below not in (0, 1):",
        "if not isinstance(below, int):",
        ("tests/federated/test_messages.py::test_a_malformed_reply_is_refused",),
    ),
    # Ratings by clients.
    Mutant(
        "answers are not clipped at the server",
        "discreet/federated/answer_sum.py",
        "self.add(part.answer.unsqueeze(0))\n        if part.answers:\n            values = self._values",
        "self._values.add_(part.answer.double().nan_to_num().to(self._values.dtype))\n"
        "        if part.answers:\n            values = self._values",
        ("tests/federated/test_answer_sum.py::test_one_client_more_or_less_moves_the_sum_of_answers_by_at_most_one",),
    ),
    Mutant(
        "a rating is noised before it is charged",
        "discreet/federated/answer_sum.py",
        "    charge(event)\n    return total.released(source)",
        "    sums = total.released(source)\n    charge(event)\n    return sums",
        ("tests/federated/test_answer_sum.py::test_the_ledger_is_charged_before_anything_is_noised",),
    ),
    Mutant(
        "the answers have half their noise",
        "discreet/federated/answer_sum.py",
        "mechanism = Gaussian(self.how.noise_multiplier, draws=self.how.draws)",
        "mechanism = Gaussian(self.how.noise_multiplier / 2, draws=self.how.draws)",
        ("tests/federated/test_answer_sum.py::test_the_noise_on_the_sum_has_its_standard_deviation",),
    ),
    Mutant(
        "a round that also rates the model is charged as if it did not",
        "discreet/federated/run_plan.py",
        "event = user_event(config, settings.user.noise_multiplier, joined=True, sizes=sizes)",
        "event = user_event(config, settings.user.noise_multiplier, sizes=sizes)",
        (
            "tests/simulation/test_private_evaluation.py"
            "::test_the_ledger_holds_what_was_planned_and_the_last_row_what_is_spent",
        ),
    ),
    Mutant(
        "a client noises its own answer for half an example",
        "discreet/client/answering.py",
        "sensitivity = 1 / held_out",
        "sensitivity = 0.5 / held_out",
        ("tests/client/test_own_noise.py::test_the_noise_is_for_one_of_the_held_out_examples",),
    ),
    Mutant(
        "local noise on an answer is for half of what other data can move",
        "discreet/client/answering.py",
        "return LocalNoise(LocalPrivacy(kind, norm, noise_multiplier, run.noise))",
        "return LocalNoise(LocalPrivacy(kind, norm, noise_multiplier / 2, run.noise))",
        ("tests/client/test_local_answers.py::test_the_noise_is_for_twice_the_norm_of_an_answer",),
    ),
    Mutant(
        "a client charges no answer to its local account",
        "discreet/client/admission.py",
        'return updated + (answer_events(request) if request.run.local.kind != "none" else ())',
        "return updated",
        ("tests/client/test_local_answers.py::test_what_is_reported_is_what_updates_and_answers_cost",),
    ),
    Mutant(
        "a client does not charge its own answer",
        "discreet/client/admission.py",
        "return steps_taken + answered",
        "return steps_taken",
        ("tests/client/test_own_noise.py::test_an_answer_that_would_pass_the_budget_is_refused_and_leaves_no_trace",),
    ),
    Mutant(
        "a budget holds for the steps of a round and not for its answer",
        "discreet/client/account.py",
        "for each in (charge, *more):",
        "for each in (charge,):",
        ("tests/client/test_own_noise.py::test_a_budget_that_steps_or_answer_alone_would_keep_is_held_against_both",),
    ),
    Mutant(
        "what the last rating cost is not published",
        "discreet/federated/training_run.py",
        "return replace(outcome, checkpoint=self.rate(outcome.checkpoint, is_last=True))",
        "self.rate(outcome.checkpoint, is_last=True); return outcome",
        ("tests/simulation/test_own_ratings.py::test_what_is_published_is_what_the_ledger_holds_with_the_last_rating",),
    ),
    Mutant(
        "clients train on what they hold out",
        "discreet/client/nodes.py",
        "return examples.subset(trained), examples.subset(held)",
        "return examples, examples.subset(held)",
        ("tests/simulation/test_private_evaluation.py::test_no_client_trains_on_what_it_holds_out",),
    ),
    Mutant(
        "an owner's policy does not count ratings",
        "discreet/client/policy.py",
        "PrivacyLedger(run.user_releases(noise_multiplier, rounds))",
        "PrivacyLedger(((run.user_event(noise_multiplier), rounds),))",
        ("tests/client/test_policy.py::test_a_policy_counts_the_ratings_of_a_run",),
    ),
    # Masked sums.
    Mutant(
        "a node that is named in both lists goes unnoticed",
        "discreet/masking/node_stages.py",
        "if both := set(alive) & set(gone):",
        "if both := set[str]():",
        ("tests/masking/test_attacks.py::test_a_node_in_both_lists_is_refused",),
    ),
    Mutant(
        "a node signs a list of any length",
        "discreet/masking/node_stages.py",
        "if len(alive) < party.terms.survivors:",
        "if not alive:",
        ("tests/masking/test_attacks.py::test_a_list_of_fewer_than_n_minus_d_survivors_is_refused",),
    ),
    Mutant(
        "a node signs a list that leaves it out",
        "discreet/masking/node_stages.py",
        "if party.identity.name not in alive:",
        "if not alive:",
        ("tests/masking/test_attacks.py::test_a_list_that_leaves_the_node_itself_out_is_refused",),
    ),
    Mutant(
        "a node masks its vector among any number of others",
        "discreet/masking/node_stages.py",
        "if len(shares) < party.terms.survivors:",
        "if not shares:",
        ("tests/masking/test_attacks.py::test_fewer_than_n_minus_d_nodes_get_no_masked_vector",),
    ),
    Mutant(
        "a node takes keys that nobody signed",
        "discreet/masking/node_stages.py",
        "if not is_signed(signed[name], name, place=place, directory=party.directory):",
        "if not signed[name].signature:",
        ("tests/masking/test_attacks.py::test_a_key_that_was_swapped_under_a_true_signature_is_found_out",),
    ),
    Mutant(
        "a node takes the keys that the server says are its own",
        "discreet/masking/node_stages.py",
        "if keys.get(me) != attempt.keys[me]:",
        "if me not in keys:",
        ("tests/masking/test_attacks.py::test_a_node_knows_its_own_keys",),
    ),
    Mutant(
        "a node opens a sum whose lists others did not sign",
        "discreet/masking/node_stages.py",
        "if not party.directory.verify(name, signature, message):",
        "if not signature:",
        ("tests/masking/test_attacks.py::test_the_signatures_of_an_earlier_attempt_are_no_signatures_of_this_one",),
    ),
    Mutant(
        "a node opens a sum with fewer signatures than the threshold",
        "discreet/masking/node_stages.py",
        "if len(signatures) < party.terms.threshold:",
        "if not signatures:",
        ("tests/masking/test_attacks.py::test_fewer_signatures_than_the_threshold_open_nothing",),
    ),
    Mutant(
        "a node that has given its shares does not close the round",
        "discreet/masking/node_stages.py",
        "return state.closed_until(part.round), join_named(given)",
        "return state, join_named(given)",
        ("tests/masking/test_attacks.py::test_a_round_that_was_opened_can_not_be_tried_again",),
    ),
    Mutant(
        "a node's secrets stay in its state after it has masked its vector",
        "discreet/masking/node_stages.py",
        'stage=Stage.MASKED, secrets=b"", shares=shares',
        "stage=Stage.MASKED, shares=shares",
        ("tests/masking/test_store.py::test_its_own_secrets_are_gone_once_its_vector_is_masked",),
    ),
    Mutant(
        "a node pays for its first round alone",
        "discreet/masking/node_stages.py",
        "if (part.round, price) != (state.charged, state.price):",
        "if state.charged < 0:",
        ("tests/masking/test_sums.py::test_each_round_is_paid_by_each_node_once",),
    ),
    Mutant(
        "a node's seed is the same in every attempt",
        "discreet/masking/node_stages.py",
        "X25519PrivateKey.generate(), os.urandom(SEED_BYTES)",
        "X25519PrivateKey.generate(), bytes(SEED_BYTES)",
        ("tests/masking/test_sums.py::test_every_attempt_has_fresh_keys_and_a_fresh_seed",),
    ),
    Mutant(
        "a node does not keep that it has answered",
        "discreet/masking/node.py",
        "self._store.save(run, state.encode())  # before",
        "self._store.load(run)  # before",
        ("tests/masking/test_attacks.py::test_no_stage_is_answered_twice",),
    ),
    Mutant(
        "a node forgets which rounds of a killed run are over",
        "discreet/client/membership.py",
        "store.save(path.stem, OVER)",
        "path.unlink()",
        (
            "tests/client/test_membership.py"
            "::test_a_round_that_was_opened_without_a_node_can_not_be_opened_again_after_the_others_forgot_the_run",
        ),
    ),
    Mutant(
        "a node follows the server's terms",
        "discreet/masking/node.py",
        "if difference := self._party.terms.difference(terms):",
        "if difference := terms.difference(terms):",
        ("tests/masking/test_attacks.py::test_other_terms_than_the_nodes_own_are_refused",),
    ),
    Mutant(
        "an attempt is not bound to the keys that are in it",
        "discreet/masking/signed_keys.py",
        "self.encode(), join_named(keys))",
        "self.encode(), join_named({}))",
        ("tests/masking/test_attacks.py::test_nodes_that_were_told_different_keys_can_not_open_each_others_shares",),
    ),
    Mutant(
        "a node's state may still be in memory when its reply leaves",
        "discreet/masking/store.py",
        "os.fsync(file.fileno())",
        "file.fileno()",
        ("tests/masking/test_store.py::test_the_state_is_synced_before_the_reply_leaves",),
    ),
    Mutant(
        "a mask comes from the XOR of its secret's words, as Flower's",
        "discreet/masking/masks.py",
        'return _derived(seed, join(TAG + b" own", context), KEY_BYTES)',
        "folded = bytes(a ^ b ^ c ^ d for a, b, c, d in zip(seed[:4], seed[4:8], seed[8:12], seed[12:], strict=True))\n"
        '    return _derived(folded, join(TAG + b" own", context), KEY_BYTES)',
        ("tests/masking/test_uniform.py::test_masks_of_two_secrets_have_nothing_in_common",),
    ),
    Mutant(
        "the server takes a seed that wrong shares gave",
        "discreet/masking/collecting.py",
        "if seed_check(seed) == signed.check:",
        "if seed:",
        ("tests/masking/test_shares.py::test_one_node_that_gives_wrong_shares_is_left_out",),
    ),
    Mutant(
        "the server opens a sum that lost more than d nodes",
        "discreet/masking/collecting.py",
        "if self.stage <= Stage.MASKED else",
        "if self.stage <= Stage.KEYS else",
        (
            "tests/masking/test_dropouts.py::test_one_dropout_too_many_before_the_lists_abandons_the_round_without_a_share_given",
        ),
    ),
    Mutant(
        "a node gives a dear sum for the price of a cheap one",
        "discreet/masking/node_stages.py",
        "if (part.round, price) != (state.charged, state.price):",
        "if part.round > state.charged:",
        ("tests/masking/test_attacks.py::test_another_attempt_at_another_price_is_paid_anew",),
    ),
    Mutant(
        "nodes do not sign how much noise they add",
        "discreet/masking/agreement.py",
        "str(value) for value in astuple(self)).encode()",
        "str(value) for value in (*astuple(self)[:-1], 0)).encode()",
        (
            "tests/masking/test_attacks.py::test_a_node_that_was_told_of_another_noise_signs_keys_that_the_others_refuse",
        ),
    ),
    # Resume.
    Mutant(
        "a run may be resumed with another sampling probability",
        "discreet/federated/deciding_settings.py",
        '    facts["sampling.probability"] = config.sampling_probability\n',
        "",
        ("tests/simulation/test_resume.py::test_resuming_under_other_privacy_settings_is_refused",),
    ),
    Mutant(
        "the arrays of another app are taken for the change that they hold",
        "discreet/federated/flower_messages.py",
        "self.layout.difference(records[0], self.sent.numpy())",
        "self.layout.vector(records[0])",
        ("tests/federated/test_strategy.py::test_without_noise_the_model_moves_by_the_mean_of_the_differences",),
    ),
    Mutant(
        "the bit of another app's client says what it is after clipping",
        "discreet/federated/flower_messages.py",
        "float(row_norms(update.unsqueeze(0))[0]) <= self.clip_norm",
        "float(row_norms(update.unsqueeze(0))[0].clamp(max=self.clip_norm)) <= self.clip_norm",
        ("tests/federated/test_strategy.py::test_a_bit_says_whether_the_difference_was_within_the_clip_norm",),
    ),
    Mutant(
        "a client of another app counts as often as it says to have examples",
        "discreet/federated/flower_messages.py",
        "return TrainReply(self.number, update, below)",
        "count = content['metrics']['num-examples'] if 'metrics' in content else 1\n"
        "        return TrainReply(self.number, update * count, below)",
        ("tests/federated/test_strategy.py::test_what_clients_report_beside_their_arrays_changes_nothing",),
    ),
    Mutant(
        "an array that was declared frozen is learned all the same",
        "discreet/federated/array_layout.py",
        "and not any(fnmatchcase(name, pattern) for pattern in frozen)",
        "or any(fnmatchcase(name, pattern) for pattern in frozen)",
        ("tests/federated/test_strategy_refusals.py::test_frozen_arrays_are_no_part_of_the_vector",),
    ),
    Mutant(
        "AdamW adds weight decay to the gradient as Adam does",
        "discreet/training/local_optimizer.py",
        'if optimizer.weight_decay and optimizer.name != "adamw":',
        "if optimizer.weight_decay:",
        ("tests/training/test_local_optimizer.py::test_steps_are_those_of_torch_optim",),
    ),
    Mutant(
        "a client that pauses is corrected for steps that it did not take",
        "discreet/training/local_optimizer.py",
        "    taken.add_(1)\n",
        "    state.taken.add_(1)\n",
        ("tests/training/test_local_optimizer.py::test_a_row_that_pauses_and_ends_early_is_moved_as_if_it_were_alone",),
    ),
    Mutant(
        "frozen parameters are noised and sent like the others",
        "discreet/tasks/models.py",
        "return [parameter for parameter in model.parameters() if parameter.requires_grad]",
        "return list(model.parameters())",
        ("tests/tasks/test_frozen.py::test_dp_sgd_is_that_of_a_loop_over_single_examples",),
    ),
    Mutant(
        "the statistics of a frozen BatchNorm follow the clients' data",
        "discreet/tasks/models.py",
        "        layer.eval()\n",
        "        layer.train()\n",
        ("tests/tasks/test_frozen.py::test_frozen_values_stay_and_are_no_part_of_what_travels",),
    ),
    Mutant(
        "a client trains on other frozen values than the server's",
        "discreet/client/client.py",
        "if request.frozen is not None and request.frozen != frozen_digest(self.model):",
        "if request.frozen is not None and not frozen_digest(self.model):",
        ("tests/tasks/test_frozen.py::test_a_client_refuses_to_train_on_other_frozen_values_than_the_servers",),
    ),
    Mutant(
        "frozen values that server and clients do not share are taken",
        "discreet/tasks/model_check.py",
        "parameter not in one or parameter not in other or not torch.equal(one[parameter], other[parameter])",
        "parameter not in one or parameter not in other",
        ("tests/tasks/test_frozen.py::test_frozen_values_that_server_and_clients_would_not_share_are_refused",),
    ),
    Mutant(
        "a run of another app that goes on may take other settings",
        "discreet/federated/resuming.py",
        "and not _is_changeable(name) and value != was[name]",
        "and _is_changeable(name) and value != was[name]",
        ("tests/federated/test_strategy_resume.py::test_a_run_that_goes_on_keeps_what_decides_privacy",),
    ),
    Mutant(
        "a node answers about its data what its run does not pay for",
        "discreet/client/answering.py",
        "if not asked or request.work.trains or shape is None:",
        "if shape is None:",
        ("tests/client/test_nodes.py::test_a_node_does_not_answer_what_its_run_does_not_ask_and_pay_for",),
    ),
    Mutant(
        "an owner's policy overlooks what is asked of the data",
        "discreet/client_settings.py",
        "return min(noise, self.statistics.noise_multiplier) if self.asks_of_data else noise",
        "return noise",
        ("tests/client/test_nodes.py::test_a_policy_counts_what_is_asked_of_the_data",),
    ),
    Mutant(
        "a sequence's loss divides by the positions of the whole batch",
        "discreet/privacy/rules/objective.py",
        "(targets != PADDING).flatten(1).sum(1).clamp(min=1)",
        "(targets != PADDING).sum().clamp(min=1)",
        ("tests/test_neighbour_replay.py::test_a_sequence_of_padding_alone_instead_moves_each_step_within_the_clip",),
    ),
    Mutant(
        "padding counts in the mean over a sequence",
        "discreet/privacy/rules/objective.py",
        "values.flatten(1).sum(1) / ",
        "values.flatten(1).sum(1) / targets.flatten(1).shape[1] + 0 * ",
        ("tests/training/test_sequences.py::test_clipped_sums_are_those_of_single_examples_without_their_padding",),
    ),
    Mutant(
        "padding in a folder is the first class",
        "discreet/tasks/targets.py",
        "torch.from_numpy(np.where(padded, PADDING, whole))",
        "torch.from_numpy(np.where(padded, 0, whole))",
        ("tests/simulation/test_sequences.py::test_with_next_token_inputs_are_their_own_targets",),
    ),
    Mutant(
        "a client's rating of sequences divides by the positions of all its examples",
        "discreet/tasks/metric_answers.py",
        "right.sum(dim=1) / (targets != PADDING).sum(dim=1).clamp(min=1)",
        "right.sum(dim=1) * len(targets) / (targets != PADDING).sum().clamp(min=1)",
        ("tests/tasks/test_metric_answers.py::test_a_sequence_adds_its_own_share_and_moves_no_others",),
    ),
    Mutant(
        "a cohort's linear layer at each step takes another client's positions",
        "discreet/simulation/layers.py",
        "use = Use(self.weight, self.weight + 1, saved.transpose(1, 2), grads.transpose(1, 2))",
        "use = Use(self.weight, self.weight + 1, saved.roll(1, 0).transpose(1, 2), grads.transpose(1, 2))",
        ("tests/simulation/test_sequences.py::test_both_engines_give_the_same_numbers",),
    ),
    Mutant(
        "a secure sum's variance of a client's noise is rounded down",
        "discreet/privacy/secure_grid.py",
        "variance=math.ceil(noise**2 / summands)",
        "variance=math.floor(noise**2 / summands)",
        (
            "tests/privacy/test_secure_grid.py::test_the_noise_of_the_accounted_clients_has_at_least_the_variance_that_was_asked_for",
        ),
    ),
    Mutant(
        "a secure sum's noise is shared among all nodes, not among the honest survivors",
        "discreet/privacy/secure_grid.py",
        "variance=math.ceil(noise**2 / summands)",
        "variance=math.ceil(noise**2 / wanted.cohort.nodes)",
        (
            "tests/privacy/test_secure_grid.py::test_the_noise_of_the_accounted_clients_has_at_least_the_variance_that_was_asked_for",
        ),
    ),
    Mutant(
        "a secure sum's updates are rounded to the nearest step, past the norm",
        "discreet/privacy/secure_grid.py",
        "    total.add(rows.detach().double() * (steps / norm))\n    return total.steps",
        "    return (rows.detach().double() * (steps / norm)).round().sum(0).long()",
        ("tests/privacy/test_secure_grid.py::test_an_update_that_was_not_clipped_is_within_the_norm_as_well",),
    ),
    Mutant(
        "a secure sum is accounted without its bit",
        "discreet/privacy/secure_grid.py",
        "+ self.bit_steps**2 + self.answer_steps**2",
        "+ self.answer_steps**2",
        ("tests/privacy/test_secure_grid.py::test_zeroing_out_a_client_moves_the_sum_by_at_most_the_sensitivity",),
    ),
    Mutant(
        "a secure sum has a bit too few",
        "discreet/privacy/secure_grid.py",
        "_range(found).bit_length() + 1",
        "_range(found).bit_length()",
        (
            "tests/privacy/test_secure_grid.py::test_the_sum_of_all_clients_at_the_bound_and_twelve_deviations_of_noise_come_back_from_the_modulus",
        ),
    ),
    Mutant(
        "a sum of discrete Gaussians is taken for one",
        "discreet/privacy/distributed_gaussian.py",
        "return 10 * math.fsum(",
        "return 0 * math.fsum(",
        (
            "tests/privacy/test_distributed_gaussian.py::test_the_bound_holds_against_the_exact_divergence_and_is_loose_by_less_than_half_a_per_cent",
        ),
    ),
    Mutant(
        "a discrete Gaussian may be a negative zero, which counts zero twice",
        "discreet/privacy/discrete_gaussian.py",
        "logical_and_((sizes > 0).logical_or_(words >= 0))",
        "logical_and_(sizes >= 0)",
        ("tests/privacy/test_discrete_gaussian.py::test_counts_are_those_of_the_discrete_gaussian",),
    ),
    Mutant(
        "a discrete Gaussian's first look decides even at the edge",
        "discreet/privacy/discrete_gaussian.py",
        "(above <= margin).logical_or_(above >= 1 - margin).logical_or_(near_end)",
        "near_end.logical_and(above < 0)",
        ("tests/privacy/test_discrete_gaussian.py::test_a_size_is_the_floor_that_mpmath_finds_of_all_the_bits",),
    ),
    Mutant(
        "the rounding of a sum of gradients is not counted in the sensitivity",
        "discreet/privacy/secure_grid.py",
        "return (self.clip_steps + self.gradient_slack) ** 2",
        "return self.clip_steps**2",
        (
            "tests/privacy/test_secure_grid.py"
            "::test_truncating_a_sum_can_move_it_by_more_than_the_clip_norm_which_the_sensitivity_counts",
        ),
    ),
    Mutant(
        "a client divides its part of a shared step by its own number of examples",
        "discreet/training/shared_step.py",
        "(-settings.learning_rate / settings.batch_size)",
        "(-settings.learning_rate / max(1, len(examples)))",
        ("tests/training/test_shared_step.py::test_one_example_moves_it_by_at_most_its_norm_and_none_give_zeros",),
    ),
    Mutant(
        "the gradients of a shared step are not clipped",
        "discreet/training/shared_step.py",
        "l2_norm_clip=l2_norm_clip, loss",
        "l2_norm_clip=1e9, loss",
        ("tests/training/test_shared_step.py::test_one_example_moves_it_by_at_most_its_norm_and_none_give_zeros",),
    ),
    Mutant(
        "among many clients at once an example counts twice in a shared step",
        "discreet/simulation/cohort.py",
        "sums.mul_(-settings.learning_rate",
        "sums.mul_(-2 * settings.learning_rate",
        (
            "tests/test_shared_step_replay.py::test_a_huge_example_costs_all_that_the_event_of_a_shared_step_says",
            "tests/test_shared_step_replay.py::test_of_a_model_with_hidden_units_too",
        ),
    ),
    Mutant(
        "a node charges a shared step to the guarantee of whole clients",
        "discreet/client/masked_work.py",
        "return EXAMPLE if self.request.run.example.secure else USER",
        "return USER",
        (
            "tests/federated/test_masked_transport.py"
            "::test_a_step_that_clients_share_is_the_run_without_masks_and_each_node_charges_its_own_ledger",
        ),
    ),
)
