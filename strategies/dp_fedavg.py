"""DP-FedAvg with adaptive clipping: start reading here. The steps of a round, and the settings of
conf/ that decide them.

    drawn     each connected client joins with probability q
              conf: sampling.{kind,probability,population_size}
    clipped   each update to L2 norm C_t, by the server once more; its bit b is 1 if its norm was
              within C_t before
              conf: privacy.user.clip.{kind,norm}
    summed    total = sum of updates, below = sum of (b - 1/2), in floats or exactly on a grid
              conf: privacy.noise
    charged   one Gaussian for update and bits together, to the ledger on disk, before anything
              is noised or released; a round that would pass the budget is not begun
              conf: privacy.user.{noise_multiplier,target_epsilon,max_epsilon}
    noised    total by z_update * C_t, below by count_stddev; neither depends on who replied
              conf: privacy.user.{noise_multiplier,clip.count_stddev}
    released  params += learning_rate * velocity, where velocity = momentum * velocity + total /
              (q * population_size); or a step of Adam or Yogi on that same mean update
              conf: server.{optimizer,learning_rate,momentum,shrink_with_noise,beta_1,beta_2,tau}
    adapted   C_{t+1} = C_t * exp(-learning_rate * (share - target_quantile)); the share of
              norms within C_t is below / (q * population_size) + 1/2. The first rounds may
              take longer steps towards the median
              conf: privacy.user.clip.{learning_rate,max,target_quantile,search_rate}

`discreet.server.round` does this as a pure function, with constants from the plan, and
`training_run` repeats it. Source: McMahan et al. 2018 (arXiv 1710.06963), Algorithm 1; Andrew et
al. 2021 (arXiv 1905.03871), Algorithm 1.
"""

from __future__ import annotations

from discreet.server.session import Session, training_run
from discreet.server.training_run import TrainingRun
from discreet.server.transport import Transport


def dp_fedavg(session: Session, transport: Transport) -> TrainingRun:
    """The rounds of a run that is ready to start, with the clients that `transport` asks."""
    return training_run(session, transport)
