"""Check experts against the ranks and the rest of the configuration. Torch-free."""

import math

from longshard.sharding.ranges import aligned
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs, experts_of
from trainer.families.feed_forward_args import ExpertArgs
from trainer.job.degrees import Degrees, divisors


def check_experts(config: JobConfig, args: ModelArgs, degrees: Degrees) -> None:
    """Check that `expert_parallel_degree` fits model and ranks. A model without experts is not checked.

    Args:
        config: The configuration of the run.
        args: The arguments of the model.
        degrees: The degrees of parallelism.

    Raises:
        ConfigError: The degree does not divide the experts, or the ranks of FSDP, CP and TP together.
    """
    ep = config.parallelism.expert_parallel_degree
    experts = experts_of(args)
    if experts is None:
        return
    ranks = degrees.dp_shard * degrees.cp * degrees.tp
    common = math.gcd(experts.number, ranks)
    if common % ep:
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {ep} must divide the {experts.number} experts of model.flavor = "
            f"{config.model.flavor!r} and the {ranks} ranks of the FSDP, CP and TP degrees together; degrees that fit: "
            f"{', '.join(map(str, divisors(common)))}"
        )


def note_of_router(args: ModelArgs) -> tuple[str, ...]:
    """Return one note if the loss of tokens never trains the routers of a model, else an empty tuple.

    Args:
        args: The arguments of the model.
    """
    experts = experts_of(args)
    if experts is None or experts.per_token > 1 or not experts.normalise:
        return ()
    trained = (
        "its balance loss alone trains it"
        if getattr(args, "router_aux_loss_coef", 0)
        else "it is never trained"
    )
    return (
        "each token chooses one expert, whose normalised weight is 1 whatever the router says: the router has no "
        f"gradient from the loss of tokens, and {trained}; weights that are not normalised (norm_topk_prob = false) "
        "train it",
    )


def dispatch_bytes(
    out: float, back: float, *, dim: int, itemsize: int, per_token: int, weight_itemsize: int
) -> dict[str, float]:
    """Return the bytes that a rank sends to other ranks in one layer, forward and backward, by kind of exchange.

    A row is sent with the weights and the indices (int32) of its experts. The receiving rank picks out its own experts.

    Args:
        out: Rows that the rank sends to experts of other ranks.
        back: Rows that its experts have received from other ranks.
        dim: Elements of a row.
        itemsize: Bytes of an element.
        per_token: Experts that a token chooses.
        weight_itemsize: Bytes of the weight of an expert.

    Returns:
        The bytes of "expert_dispatch" and "expert_combine", and of both with "_backward".
    """
    row = aligned(dim * itemsize)
    weights = aligned(per_token * weight_itemsize)
    return {
        "expert_dispatch": out * (row + weights + aligned(per_token * 4)),
        "expert_combine": back * row,
        "expert_combine_backward": out * row,
        "expert_dispatch_backward": back * (row + weights),
    }


def ranks_of_a_token(experts: ExpertArgs, ep: int) -> float:
    """Return the average number of other ranks to which a token is sent, if all experts are equally likely.

    Args:
        experts: The arguments of the experts.
        ep: The expert-parallel degree, a divisor of the number of experts.
    """
    elsewhere = experts.number - experts.number // ep
    none_there = math.comb(elsewhere, experts.per_token) / math.comb(
        experts.number, experts.per_token
    )
    return (ep - 1) * (1 - none_there)
