"""Asks five questions and tells where to start: guarantee, experiment, amount of noise, expected
result.

--clients        people or devices with their own data, organisations, or the people in one table
--rows           the number of rows of all of them together
--rows-a-person  the largest number of rows of one person; 1 if each row is another person
--trusted        with the updates of clients: server; most (of the clients, not the server); nobody
--code           whose code trains: command (Discreet's), app (your Flower app), loop (your PyTorch
                 loop, in one place)

Missing options are asked for. Only the answers are read, no data.

examples:
  discreet advise --clients 897 --rows 2400 --rows-a-person 20 --trusted server --code command
  discreet advise --clients 3 --rows 3000 --rows-a-person 1 --trusted nobody --code command
"""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Option

from discreet.planning.advice import Situation, advice


def command(
    clients: Annotated[int, Option(prompt="How many clients (people, organisations)?")],
    rows: Annotated[int, Option(prompt="How many rows do they have in total?")],
    rows_a_person: Annotated[
        int, Option(prompt="What is the largest number of rows of one person?")
    ],
    trusted: Annotated[
        Literal["server", "most", "nobody"],
        Option(prompt="Who is trusted with updates (server, most, nobody)?"),
    ],
    code: Annotated[
        Literal["command", "app", "loop"], Option(prompt="Whose code trains (command, app, loop)?")
    ],
) -> None:
    """Asks, and prints a few lines of advice."""
    print(*advice(Situation(clients, rows, rows_a_person, trusted, code)), sep="\n")
