"""Continue a text with the model of a run: from its latest checkpoint, on any number of ranks.

The model is built and sharded anew, however its run was sharded; every token is one forward over
the whole context (``megafsdp.models.sampling``). This is for looking at a model, not for serving
one: for that, export the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megafsdp import checkpoint
from megafsdp.buffer.comm.agreement import attempt, on_rank_zero, raise_together
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.data import Tokenizer, load_tokenizer
from megafsdp.errors import ConfigError, expected
from megafsdp.mesh.parallel_dims import ParallelDims
from megafsdp.training.config.sections import Config
from megafsdp.training.process.world import find_world, process_group
from megafsdp.training.run_folder import checkpoints_of, config_in
from megafsdp.training.sharded_model import build_sharded
from megafsdp.training.step.evaluation import TextRequest, prompt_tokens, sample_text


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of ``megafsdp generate``.

    Attributes:
        run: A run's folder, its save root, or one of its checkpoints.
        prompt: What the text begins with.
        step: Step of the checkpoint; None for the latest.
        tokens: Length of what follows; an end of a document ends it earlier.
        temperature: 0 takes the likeliest token.
        top_k: Draw from so many of the likeliest tokens; None for all.
        seed: Seed of the draws.
        tokenizer: Replaces the run's own; given as for ``data.tokenizer``.
        device: cpu, cuda, or auto for CUDA where there is a GPU.
    """

    run: str
    prompt: str
    step: int | None = None
    tokens: int = 100
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    tokenizer: str | None = None
    device: str = "auto"


def generate(options: GenerateOptions) -> str:
    """Return a prompt and its continuation by the model of a run.

    Collective over the ranks that torchrun has started; also runs in one process.

    Raises:
        ConfigError: A number is out of its range, no run saved the checkpoint, or there is no
            tokenizer for its text.
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    _check(options)
    world = find_world(options.device)
    with process_group(world, timeout_s=Config().run.timeout_s):
        # The first rank decides: others may not see yet what it sees on a shared file system.
        directory, config = on_rank_zero(lambda: _read(options))
        if config is None:
            raise ConfigError(
                expected(
                    "a checkpoint of a training run, which says what its model is",
                    "one without",
                    where=f"'{directory}'",
                    hint="Give the folder of a run of megafsdp train",
                )
            )
        tokenizer, error = attempt(lambda: _tokenizer(options, config))
        raise_together(error)
        assert tokenizer is not None, "ranks without a tokenizer have raised"
        precision = config.precision
        if config.optimizer.store_param_remainders:
            # Checkpoints have bf16 weights and their remainders in one fp32 tensor.
            precision = replace(precision, main_params_dtype="fp32")
        meshes = ParallelDims().build(world.device.type)
        # The config found has only what the weights mean, not the run's degrees or compilation.
        as_stored = replace(config, precision=precision)
        model = build_sharded(as_stored, config.model.resolve(), world.device, meshes)
        checkpoint.load(directory, model=model)
        # A run has seen positions up to its sequence length; an imported model may have seen all.
        is_saved = config.model.from_hf is not None
        longest = config.model.resolve().max_sequence_length
        request = TextRequest(
            prompt=options.prompt,
            num_tokens=options.tokens,
            max_context=longest if is_saved else config.data.sequence_length,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
            ends_early=True,
        )
        return sample_text(model, tokenizer, request, device=world.device)


def _check(options: GenerateOptions) -> None:
    for name, value, is_sound, what in (
        ("tokens", options.tokens, options.tokens >= 0, "a number of at least 0"),
        (
            "temperature",
            options.temperature,
            0 <= options.temperature < math.inf,
            "a finite number of at least 0",
        ),
        ("top-k", options.top_k, options.top_k is None or options.top_k > 0, "at least 1"),
        ("seed", options.seed, 0 <= options.seed < 2**64, "a number from 0 to 2**64 - 1"),
    ):
        if not is_sound:
            where, hint = f"the option --{name}", "Choose a number in this range"
            raise ConfigError(expected(what, value, where=where, hint=hint))


def _read(options: GenerateOptions) -> tuple[Location, Config | None]:
    """Return where the checkpoint is, and the configuration in it."""
    with CheckpointReader(checkpoints_of(options.run), options.step) as reader:
        has_extra = "extra" in reader.manifest.objects
        return reader.directory, config_in(reader.object("extra")) if has_extra else None


def _tokenizer(options: GenerateOptions, config: Config) -> Tokenizer:
    """Load the tokenizer and check the prompt."""
    spec = options.tokenizer or config.tokenizer
    where = f"the run '{options.run}'"
    if spec is None:
        what = "a tokenizer, where data.tokenizer is null"
        hint = "Name the one of the run's data by --tokenizer"
        raise ConfigError(expected(what, "none", where=where, hint=hint))
    tokenizer, vocab_size = load_tokenizer(spec), config.model.resolve().vocab_size
    largest = max(prompt_tokens(tokenizer, options.prompt))
    if largest >= vocab_size:
        what = f"a prompt of tokens below the model's vocab_size {vocab_size}"
        hint = "Name the tokenizer of the run's data by --tokenizer"
        raise ConfigError(expected(what, f"token {largest}", where=where, hint=hint))
    return tokenizer
