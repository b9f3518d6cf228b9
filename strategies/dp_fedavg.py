"""DP-FedAvg with adaptive clipping: start reading here. What a round does, and what of conf decides it.

    drawn     each connected client joins with probability q           sampling.{kind,probability,population_size}
    clipped   each update to L2 norm C_t, by the server once more;     privacy.user.clip.{kind,norm}
              its bit b says whether it was within C_t before
    summed    total = sum of updates, below = sum of (b - 1/2)         privacy.noise: in floats, or exactly on a grid
    charged   one Gaussian for update and bits together, to the        privacy.user.{noise_multiplier,target_epsilon}
              ledger on disk, before anything is noised or released;
              a round that would pass the budget is not begun          privacy.user.max_epsilon
    noised    total by z_update * C_t, below by count_stddev;          privacy.user.{noise_multiplier,clip.count_stddev}
              neither depends on who replied
    released  params += learning_rate * velocity, where velocity =     server.{optimizer,learning_rate,momentum}
              momentum * velocity + total / (q * population_size);     server.shrink_with_noise
              or a step of Adam or Yogi on that same mean update       server.{beta_1,beta_2,tau}
    adapted   C_{t+1} = C_t * exp(-learning_rate * (share -            privacy.user.clip.{learning_rate,max}
              target_quantile)); share, of the norms within C_t, is    privacy.user.clip.target_quantile
              below / (q * population_size) + 1/2. The first rounds    privacy.user.clip.search_rate
              may take longer steps towards the median

`discreet.server.round` does this, pure, with constants that it makes of the plan, and `training_run` repeats it.
Source: McMahan et al. 2018 (arXiv 1710.06963), Algorithm 1; Andrew et al. 2021 (arXiv 1905.03871), Algorithm 1.
"""

from __future__ import annotations

from discreet.server.session import Session, training_run
from discreet.server.training_run import TrainingRun
from discreet.server.transport import Transport


def dp_fedavg(session: Session, transport: Transport) -> TrainingRun:
    """The rounds of a run that is ready to start, with the clients that `transport` asks."""
    return training_run(session, transport)
