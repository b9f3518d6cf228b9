"""Secure aggregation for the ClientApp of any Flower app: `app =
ClientApp(mods=[secure_sum_mod])`."""

from __future__ import annotations

from functools import partial

import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor

from discreet.flower.app_behind import App, noised_from
from discreet.flower.array_layout import ArrayLayout, layout_of, only_arrays
from discreet.flower.tested_flower import MOD_PLACES, refusal
from discreet.masking.node import Release
from discreet.node.account import Refused, accounts_of
from discreet.node.admission import admit_one
from discreet.node.app import answered
from discreet.node.client import ExactReply, noised_vector
from discreet.node.masked_work import MaskedWork
from discreet.node.policy import ClientPolicy
from discreet.node.secure_aggregation import answer_masking
from discreet.node.work import check_names, work_of
from discreet.privacy.clipping import clip_updates
from discreet.privacy.randomness import secure_source
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.masked_messages import read_masking, split_content
from discreet.protocol.messages import MASKING, request_of
from discreet.settings.adjacency import USER


def secure_sum_mod(message: Message, context: Context, call_next: App) -> Message:
    """Lets a ClientApp take part in secure aggregation, for
    `DPFedAvg(mechanism=MaskedGaussian(...))`.

    The app trains as usual. The difference between its result and the received arrays leaves the
    node clipped, on a grid, noised with this node's share, and masked; metrics and numbers of
    examples do not leave. An app that raises anything, or takes longer than the node's max-seconds,
    counts as no change; SIGINT, SIGTERM and SIGQUIT end the node. Every other message is refused,
    whatever its type, without calling the app, which would answer in the clear.

    The node's owner sets in `--node-config` (docs/deployment.md): `name`, `identity-key`, `peers`,
    `masking-state` and `ledger`, and optionally `policy`. In Flower's simulation they are made for
    the run.

    Example:
      >>> from flwr.clientapp import ClientApp
      >>> import discreet
      >>> app = ClientApp(mods=[discreet.secure_sum_mod])
    """
    node = context.node_config
    if MASKING in message.content:
        return answered(message, partial(_answer, message, context, call_next), node)
    return answered(message, _refuse, node)


def _answer(message: Message, context: Context, call_next: App, policy: ClientPolicy) -> RecordDict:
    """A stage of a masked sum."""
    if reason := refusal(MOD_PLACES, "that no answer leaves in the clear"):
        raise Refused(reason)
    work = partial(_read_work, message, context, call_next, policy)
    return answer_masking(message.content, context.node_config, work=work)


def _refuse(_: ClientPolicy) -> RecordDict:
    raise Refused(
        "this app answers only under secure aggregation, and this message asks for an answer in "
        "the clear"
    )


def _read_work(
    message: Message, context: Context, call_next: App, policy: ClientPolicy
) -> MaskedWork:
    content = RecordDict(dict(message.content))
    _, virtual = read_masking(content)
    items, frozen = split_content(content)
    request = request_of(items, allowed=partial(check_names, node_config=context.node_config))
    arrays = only_arrays(content, "the message")
    layout = layout_of(arrays, frozen=frozen)
    params = layout.vector(arrays)
    if virtual is None:
        data_owner = ""
    else:
        data_owner = str(virtual.client_id)
    asked = work_of(request).sized(layout.num_params)
    accounts = accounts_of(request.run, virtual, context.node_config)
    message.content = content

    def work(sums: SecureSum, begin: Release) -> Tensor:
        """The clipped difference between the app's result and the sent arrays, and its bit."""
        if asked.terms.promise.sums is None or USER not in asked.mechanisms:
            raise Refused(
                "this app adds up updates of whole clients: the run needs "
                "privacy.user.aggregation=secure"
            )
        admit_one(asked, data_owner, 0, accounts=accounts, policy=policy)
        begin()

        def noised(update: Tensor | None) -> Tensor:
            if update is None:
                update = torch.zeros(layout.num_params, dtype=torch.float32)
            updates, below = clip_updates(update.unsqueeze(0), request.clip_norm)
            values = ExactReply(updates[0], bool(below[0]))
            return noised_vector(sums, values, request, secure_source())

        read = partial(_difference, layout, params)
        return noised_from(call_next, message, context, read, noised)

    return MaskedWork(asked, accounts, policy, data_owner, work)


def _difference(layout: ArrayLayout, params: Tensor, content: RecordDict) -> Tensor:
    """The difference between the app's result and the sent arrays (num_params,)."""
    trained = only_arrays(content, "the app's reply")
    return layout.difference(trained, params.numpy())
