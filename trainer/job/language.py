"""The task of language models: predict the next token of each token. Torch-free.

`resolution.py` calls `Language` before ranks start; `trainer/tasks/language.py` is its part in a rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from longshard.context.planning.capabilities import runs_fla
from trainer.config.data import CONVERSATIONS
from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig
from trainer.data.tokenizers.template_files import find_template
from trainer.data.tokenizers.tokenizer import vocab_size_of
from trainer.families.args import (
    DecoderArgs,
    experts_of,
    mtp_layers_of,
    windows_of,
)
from trainer.families.feed_forward_args import has_grouped_product
from trainer.job.attention import check_qk_clip, faster_packages, kernel_of, resolve_attention
from trainer.job.data import (
    check_chat,
    check_mixture,
    check_training_data,
    check_validation,
    check_validation_data,
)
from trainer.job.degrees import Degrees
from trainer.job.experts import dispatch_bytes, ranks_of_a_token
from trainer.job.lora import check_lora
from trainer.job.memory import host_memory, memory_of_stage
from trainer.job.pipeline_stages import layers_of_stages, resolve_pipeline
from trainer.job.record import (
    ITEMSIZE,
    RankMemory,
    ResolvedJob,
    TaskDecisions,
    TaskSpec,
    size_words,
)
from trainer.job.sparse_attention import is_sparse, trains_indexers_alone
from trainer.job.training import check_chunks
from trainer.job.transforms import check_float8


class Language(TaskSpec):
    """The task of text, as tokens."""

    name, module = "tokens", "trainer.tasks.language:LanguageTask"
    data = "text"
    positions = "tokens"
    position = "tok"
    sample = "sequence"
    copies_batches = True
    command = "lct generate {} --prompt '...'"
    validates, fixed_shapes = True, False

    def next_command(self, config: JobConfig) -> str:
        """Return `lct chat {}` after training on conversations with a template, else `command`.

        {} stands for the folder of the run.

        Args:
            config: The configuration of the run.

        Raises:
            ConfigError: The template is damaged or missing, see `find_template`.
        """
        has_template = (
            find_template(config.model.tokenizer_file, config.model.chat_template, config.chat)
            is not None
        )
        return (
            "lct chat {}"
            if config.training.dataset in CONVERSATIONS and has_template
            else self.command
        )

    def model(
        self, config: JobConfig, flavor: DecoderArgs, missing: list[str] | None
    ) -> DecoderArgs:
        """Return the arguments of the model with the size of its vocabulary.

        A Hugging Face folder has its own vocabulary, which must have room for the tokenizer's. If the tokenizer is on
        another machine, the vocabulary is the flavor's.

        Args:
            config: The configuration of the run.
            flavor: The arguments of the configured flavor.
            missing: Collects messages about files that this machine lacks; None: they are errors.

        Raises:
            ConfigError: The vocabulary is too small, or the model lacks a configured layer.
            MissingFile: The tokenizer is missing, and `missing` is None.
        """
        args = flavor.configured(
            config.model, vocab_size=1, max_seq_len=config.training.seq_len
        )
        if (further := config.model.mtp_layers) != mtp_layers_of(args):
            raise ConfigError(
                f"model.mtp_layers = {further}: model.name = {config.model.name!r} has no layers for further tokens; "
                "leave it out"
            )
        if config.model.tokenizer_path == "":
            raise ConfigError(
                "model.tokenizer_path = '' must name a file; leave it out for the shipped tokenizer"
            )
        try:
            tokens = vocab_size_of(config.model.tokenizer_file)
        except MissingFile as error:
            if missing is None:
                raise
            missing.append(str(error))
            tokens = flavor.vocab_size
        if config.model.folder is None:
            return replace(args, vocab_size=tokens)
        # Embeddings may have more rows than the tokenizer has tokens.
        if tokens > flavor.vocab_size:
            raise ConfigError(
                f"the tokenizer {config.model.tokenizer_file} has {tokens:,} tokens, and model.flavor = "
                f"{config.model.flavor!r} has embeddings for {flavor.vocab_size:,}; set model.tokenizer_path "
                f"to the model's own"
            )
        return replace(args, vocab_size=flavor.vocab_size)

    def decide(
        self, config: JobConfig, model: DecoderArgs, device_type: str, *, node: int
    ) -> TaskDecisions:
        """Return pipeline, attention, the reason of its method, kernel and head degree.

        If attention is plain and causal on one rank, only the pipeline is set.

        Args:
            config: The configuration of the run.
            model: The arguments of the model.
            device_type: "cuda" or "cpu".
            node: Ranks on one node.

        Raises:
            ConfigError: A setting does not fit the model.
        """
        pipeline = resolve_pipeline(config, model)
        check_lora(config, model, pipeline)
        attention, reason = resolve_attention(config, model, device_type, node=node)
        if attention is None:
            return TaskDecisions(pipeline)
        cp = config.parallelism.context_parallel_degree
        head_degree = attention.head_degree(cp) if attention.spread.two_level else 1
        kernel = kernel_of(config, model, device_type, attention)
        return TaskDecisions(pipeline, attention, reason, kernel, head_degree)

    def check(self, config: JobConfig, model: DecoderArgs, degrees: Degrees) -> Sequence[str]:
        """Check float8, chunks, QK-clip, the mixture and the validation against the model and the degrees.

        Data are not read.

        Args:
            config: The configuration of the run.
            model: The arguments of the model.
            degrees: The degrees of parallelism.

        Returns:
            Notes for the log.

        Raises:
            ConfigError: A setting does not fit.
        """
        check_float8(config, model, degrees)
        check_chunks(config, degrees)
        check_qk_clip(config, model)
        check_mixture(config)
        return check_validation(config, degrees)

    def data_checks(self, config: JobConfig) -> Sequence[Callable[[JobConfig], None]]:
        """Return the checks of training data, validation data and chat templates.

        Args:
            config: The configuration of the run.
        """
        return (check_training_data, check_validation_data, check_chat)

    def positions_of(self, job: ResolvedJob) -> int:
        """Return the number of tokens of a sequence.

        Args:
            job: The resolved job.
        """
        return job.config.training.seq_len

    def memory(self, job: ResolvedJob, copies: int = 1) -> RankMemory:
        """Return the memory, in bytes, of the pipeline rank with the largest total.

        Args:
            job: The resolved job.
            copies: How many copies of the weights a rank holds.
        """
        stages = map(partial(memory_of_stage, job), range(job.degrees.pp))
        ranks = (replace(stage, weights=copies * stage.weights) for stage in stages)
        return max(ranks, key=lambda memory: memory.total)

    def describe(self, job: ResolvedJob) -> Mapping[str, str]:
        """Return the paragraphs of the summary by topic.

        The topics are "data", "experts", "pipeline", "attention", "linear", "loss" and "offloaded". The paragraph of a
        topic that the job lacks is empty.

        Args:
            job: The resolved job.
        """
        return {
            "data": _data(job),
            "experts": _experts(job),
            "pipeline": _pipeline(job),
            "attention": _attention(job),
            "linear": _linear(job),
            "loss": _loss(job),
            "offloaded": _offloaded(job),
        }


def _data(job: ResolvedJob) -> str:
    training = job.config.training
    source = training.dataset + (f" {training.dataset_path}" if training.dataset_path else "")
    mixture = job.config.mixture
    if mixture.names:
        shares = zip(mixture.names, mixture.weights, strict=True)
        source += ": " + ", ".join(
            f"{name} {weight / sum(mixture.weights):.1%}" for name, weight in shares
        )
    streams = f", in {training.data_streams} streams" if training.data_streams else ""
    vocabulary = "; embeddings for" if job.config.model.folder else " with"
    return (
        f"{source}{streams}; tokenizer {Path(job.config.model.tokenizer_file).name}"
        f"{vocabulary} {job.model.vocab_size:,} tokens"
    )


def _offloaded(job: ResolvedJob) -> str:
    if not (size := host_memory(job)):
        return ""
    settings = job.config.activation_checkpoint
    stages = layers_of_stages(job.pipeline, job.model)
    offloaded = sum(len(settings.offloaded(layers)) for layers in stages)
    checkpointed = sum(len(settings.checkpointed(layers)) for layers in stages)
    return (
        f"inputs of {offloaded} of {checkpointed} checkpointed layers, {size_words(size)} of "
        "page-locked host memory a rank"
    )


def _experts(job: ResolvedJob) -> str:
    model = job.model
    degrees = job.degrees
    if (experts := experts_of(model)) is None:
        return ""
    balancing = {
        "auxiliary loss": model.router_aux_loss_coef,
        "bias": model.router_bias_update_rate,
    }
    ways = [f"by {name} ({rate:g})" for name, rate in balancing.items() if rate]
    lora = job.config.lora
    ranks = [lora.rank] if lora.rank and {"w13", "w2"}.intersection(lora.modules) else []
    grouped = has_grouped_product(job.compute_dtype, model.dim, experts.hidden_dim, *ranks)
    parts = [
        "one grouped product for all experts of a rank"
        if grouped
        else "one product for each expert"
    ]
    parts += [
        f"balanced {' and '.join(ways)}"
        if ways
        else "not balanced (model.router_aux_loss_coef = 0)"
    ]
    shards = (
        f"{degrees.efsdp} ranks shard each one's weights"
        if degrees.efsdp > 1
        else "each one whole on its rank"
    )
    if degrees.ep == 1:
        return "; ".join(
            [
                f"all on every rank, {shards}" if degrees.efsdp > 1 else "all on every rank",
                *parts,
            ]
        )
    away = ranks_of_a_token(experts, degrees.ep)
    itemsize = ITEMSIZE[job.compute_dtype]
    shape = {"dim": model.dim, "itemsize": itemsize, "per_token": experts.per_token}
    rows = job.tokens_of_a_pass / degrees.tp * away
    sent = sum(dispatch_bytes(rows, rows, **shape, weight_itemsize=max(itemsize, 4)).values())
    return "; ".join(
        [
            f"{experts.number // degrees.ep} of {experts.number} on each of ep {degrees.ep} ranks, {shards}",
            f"a token is sent to {away:.2f} other ranks if it chooses among all alike: about {size_words(sent)} a "
            "layer, forward and backward, from each rank",
            *parts,
        ]
    )


def _pipeline(job: ResolvedJob) -> str:
    plan = job.pipeline
    if plan is None:
        return ""
    return (
        f"{plan.schedule}: {len(plan.stages)} stages of "
        f"{', '.join(str(len(stage)) for stage in plan.stages)} modules, "
        f"{plan.micro_batches} micro-batches in a pass"
    )


def _attention(job: ResolvedJob) -> str:
    config = job.config
    options = job.attention
    warm_up = ""
    if trains_indexers_alone(config, job.model):
        warm_up = ", all keys that a query sees: optimizer.groups trains indexers alone"
    if options is None:
        how = "in plain PyTorch" if is_sparse(job.model) else "by PyTorch itself"
        return f"causal{warm_up}, {how}: one rank has the whole sequence"
    mask = "causal mask within packed documents" if config.masks_documents else "causal mask"
    if job.chunks > 1:
        where = "host" if config.training.sequence_chunks_offload else "device"
        mask += f", in {job.chunks} chunks, one after another, whose keys and values are kept on the {where}"
    layers = job.model.n_layers
    if widths := [window for window in windows_of(job.model) if window is not None]:
        where = "" if len(widths) == layers else f" in {len(widths)} of {layers} layers"
        mask += f", a window of {widths[0]:,} tokens{where}"
    parts = [mask + warm_up]
    if job.degrees.cp > 1:
        chosen = f" (auto: {job.attention_reason})" if job.attention_reason else ""
        parts.append(f"{options.method} over {job.degrees.cp} ranks{chosen}")
        parts.append(
            {
                "head_tail": "head_tail: a piece from the head and one from the tail a rank, for equal causal work",
                "contiguous": "contiguous: one piece a rank, for windows",
                "balanced": "balanced: documents assigned by work and traffic, for each batch",
            }[options.balancer]
        )
    how = "auto: by device, type and tiles" if options.kernel == "auto" else "as set"
    if is_sparse(job.model):
        how = "the only one for chosen keys"
    parts.append(f"kernel {job.kernel} ({how})")
    if faster := faster_packages(job.kernel, config):
        parts.append(faster)
    return "; ".join(parts)


def _linear(job: ResolvedJob) -> str:
    if (linear := getattr(job.model, "linear", None)) is None:
        return ""
    kind = job.device_type, job.compute_dtype, linear.states[1]
    if runs_fla(*kind, deterministic=job.config.training.deterministic):
        return "attention by the kernels of flash-linear-attention if fla-core is installed, else by PyTorch in chunks"
    return "attention by PyTorch in chunks"


def _loss(job: ResolvedJob) -> str:
    tokens, reason = job.loss_chunk
    how = (
        f"in chunks of {tokens:,} tokens"
        if tokens
        else "from all logits of a micro-batch at once"
    )
    words = f"{how} ({reason or 'as set'})"
    further = mtp_layers_of(job.model)
    if not further:
        return words
    return f"{words}; also {further} further tokens, weight {job.config.training.mtp_loss_weight:g} of their mean"
