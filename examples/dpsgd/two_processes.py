"""Two processes, each with its part of every batch, and one noise: python
examples/dpsgd/two_processes.py

On several machines start train() by torchrun. The processes send each other sums without noise, so
their network must be as private as the data.
"""

from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import distributed, multiprocessing, nn
from torch.utils.data import TensorDataset

from discreet import DPSGD, LoopPrivacy


def train(rank: int, count: int, meeting: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count
    )
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)

    # not DistributedDataParallel(model)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    private = DPSGD(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        # The whole data set in each process, as a batch is drawn from all of it.
        TensorDataset(images[:1500], labels[:1500]),
        batch_size=256,  # of all processes together
        epochs=10,
        target_epsilon=3.0,
        delta=1e-4,
        privacy=LoopPrivacy(distributed=True),
    )
    for inputs, targets in private:
        private.step(inputs, targets)

    if rank == 0:
        with torch.no_grad():
            right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        print(
            f"epsilon {private.epsilon():.3f} at delta 1e-4, accuracy on {len(images) - 1500} "
            f"other images {right:.3f}",
            flush=True,
        )
    distributed.barrier()  # no process leaves while another still needs it
    distributed.destroy_process_group()


def main() -> None:
    with TemporaryDirectory() as folder:
        multiprocessing.spawn(train, args=(2, f"{folder}/meeting"), nprocs=2)


if __name__ == "__main__":
    main()
