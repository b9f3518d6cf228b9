"""Five questions, and where to start: which guarantee, which experiment, how much noise, what to
expect.

--clients        people or devices with data of their own, organisations, or the people in one table
--rows           of all of them together
--rows-a-person  of the person with most; 1 if each row is another person
--trusted        with the updates of clients: server; most (of the clients, not the server); nobody
--code           whose code trains: command (Discreet's), app (your Flower app), loop (your PyTorch
                 loop, in one place)

What is not given is asked for. Nothing is read but the answers.

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
    """Asks, and answers in some lines."""
    print(*advice(Situation(clients, rows, rows_a_person, trusted, code)), sep="\n")
