"""Implements `TrainerEngine` on megatron-core."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from servicekit.errors import ConfigError, InvalidRequest
from tandem_config.schema import RunConfig
from tandem_files.exports import noted_template
from tandem_files.run_folder import run_id_of
from trainer_service.checkpoints.files import (
    EXTRA,
    OPTIMIZER,
    RUN_ID,
    has_extra,
    has_optimizer,
    read_meta,
    weights_only,
)
from trainer_service.checkpoints.parts import Held
from trainer_service.engine import Saving, StepResult, learning_rate_at
from trainer_service.identity import identity
from trainer_service.measure.flops import FlopCosts
from trainer_service.measure.meter import StepMeter
from trainer_service.measure.profiler import StepProfiler
from trainer_service.megatron_engine import build, checkpoint
from trainer_service.megatron_engine.adam_state import AdamState
from trainer_service.megatron_engine.backend import MegatronBackend
from trainer_service.megatron_engine.layer_spec import chosen_modules
from trainer_service.micro_batches.checks import Limits
from trainer_service.micro_batches.plan import RankShare
from trainer_service.micro_batches.samples import FloatArray, Samples
from trainer_service.step.agreement import RankAgreement
from trainer_service.step.offload import CHECKPOINT, STEP, EngineState
from trainer_service.step.reference import ReferencePolicy, check_reference
from trainer_service.step.runner import StepRunner
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.registry import TRAINER_ENGINE
from weightsync.model.spec import ModelSpec
from weightsync.transfer.hf_files import gather_tensors, load_shards, write_folder


class MegatronEngine:
    """A rank of the policy; see `TrainerEngine` for its methods. Needs an initialised torch.distributed.

    Args:
        run_dir: folder of the run, where the coordinator records its chat template; None: there is none.
    """

    def __init__(self, config: RunConfig, device: torch.device, run_dir: Path | None = None) -> None:
        trainer, self._config, self._run_dir, self._device = config.trainer, config, run_dir, device
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        # steps are fewer than the version if a restarted run has skipped numbers; updates left out are over the run
        self.policy_version = self._steps_done = self._skipped_updates = 0
        self.on_gpus = device.type == "cuda"
        self.spec = ModelSpec.from_folder(config.model.path)
        self.parallel = Parallel(engine=TRAINER_ENGINE, **trainer.parallel_sizes)
        # reports every problem of models and sizes before anything is built
        self._layout = megatron_layout(self.spec, self.parallel)
        check_reference(config, self.spec)
        modules = chosen_modules(trainer)
        build.initialize_parallel(self.parallel, config.run.seed, trainer.collective_timeout_s)
        self._agreement = RankAgreement(build.outcome_group())
        self._reader = checkpoint.Reader(
            spec=self.spec,
            parallel=self.parallel,
            layout=self._layout,
            rank=dist.get_rank(),
            meta=identity(config, self.spec),
            device=device,
            agreement=self._agreement,
        )
        self._saver = checkpoint.BackgroundSaver(self._agreement)
        sequence_parallel = trainer.sequence_parallel and trainer.tensor_parallel > 1
        options = build.layer_options(trainer, self.spec.num_layers)
        mcore_config = build.transformer_config(self.spec, self.parallel, self._dtype, sequence_parallel, **options)
        chunks = build.build_chunks(self.spec, mcore_config, config.grpo.temperature, device, modules)
        self._parameters = build.named_parameters(chunks, self.spec)
        wrapped = build.wrap(chunks, mcore_config, trainer)
        optimizer = build.build_optimizer(wrapped, mcore_config, trainer)
        self._adam = AdamState(self._parameters, optimizer)
        self._ranks = RankShare.of(
            self.parallel,
            self.spec,
            sequence_parallel=sequence_parallel,
            max_tokens=trainer.max_tokens_per_micro_batch,
            data_rank=parallel_state.get_data_parallel_rank(),
            context_rank=parallel_state.get_context_parallel_rank(),
            share_prompts=trainer.share_prompts,
        )
        self._profiler = StepProfiler(config.profile, run_dir, device)
        micro_batch, clip_grad = self._profiler.micro_batch, trainer.clip_grad
        self._backend = MegatronBackend(wrapped, optimizer, self._adam, device, clip_grad, micro_batch)
        self._offload = build.build_offload(trainer.offload, wrapped, optimizer, device, run_dir, self._agreement)
        self._reference = ReferencePolicy(self._parameters, self._offload) if config.grpo.kl_coefficient != 0 else None
        # then checkpoints have it too
        self._refreshes = self._reference is not None and config.grpo.reference_refresh_every is not None
        self._runner = StepRunner(
            backend=self._backend,
            grpo=config.grpo,
            ranks=self._ranks,
            device=device,
            meter=StepMeter(device, self._dtype, trainer.peak_tflops, self._agreement.group),
            agreement=self._agreement,
            costs=FlopCosts.of(self.spec),
            around=self._profiler.part,
            reference=self._reference if config.grpo.kl_in_loss else None,
        )

    @property
    def limits(self) -> Limits:
        """The limits of samples."""
        grpo = self._config.grpo
        return Limits(
            vocab_size=self.spec.vocab_size,
            max_positions=self.spec.max_positions,
            max_tokens=self._ranks.max_tokens,
            needs_engine_logprobs=grpo.old_logprobs == "rollout" and grpo.on_non_finite == "fail",
        )

    def load(self, folder: Path) -> None:
        """Load this rank's slices of a Hugging Face folder's weights."""
        initial = self._config.trainer.initial_checkpoint
        with self._offload.use(*CHECKPOINT):
            with torch.no_grad():
                for parameter in self._parameters.values():
                    # padding of the vocabulary is in no file; it stays zero
                    parameter.zero_()
            if initial is None or folder != self._config.model.path:
                load_shards(folder, self.spec, self._layout, dist.get_rank(), self.tensors())
            else:
                self._reader.load(initial, weights_only(self._adam.tensors()))
            self._adam.masters_from_weights()
            self._adam.forget()
            self._agreement.meet()  # ranks have read for as long as each needed
            self._adam.gather()
            self.policy_version = self._steps_done = self._skipped_updates = 0
            self._load_reference(present=folder if initial is None else None)

    def _load_reference(self, present: Path | None = None) -> None:
        """Load the reference policy that a run starts with.

        Args:
            present: the folder whose weights the policy has; None: it has others.
        """
        source = self._config.grpo.reference_path
        source = self._config.model.path if source is None else source
        if self._reference is None:
            return
        if source == present:
            self._reference.take()
        else:
            self._reference.load(source, self.spec, self._layout)

    def train_step(self, samples: Samples, num_updates: int) -> StepResult:
        """Run one GRPO step."""
        with self._profiler.around(self._steps_done + 1) as parts:
            result = self._step(samples, num_updates)
            parts |= result.seconds
        return result

    def _step(self, samples: Samples, num_updates: int) -> StepResult:
        config = self._config
        left = config.grpo.non_finite_budget - self._skipped_updates if config.grpo.on_non_finite == "skip" else 0
        key = (config.run.seed, self._steps_done)
        with self._offload.use(*STEP) as seconds:
            try:
                result = self._runner.run(samples, num_updates, self._learning_rate(), order_key=key, skips_left=left)
            finally:
                if EngineState.OPTIMIZER in self._offload and self._device.type == "cpu":
                    self._adam.release_copies()
            self.policy_version += 1
            self._steps_done += 1
            self._skipped_updates += int(result.metrics["skipped_updates"])
            self._refresh_reference()
        return replace(result, seconds={**result.seconds, **seconds})

    def _refresh_reference(self) -> None:
        every = self._config.grpo.reference_refresh_every
        if self._reference is not None and every is not None and self._steps_done % every == 0:
            self._reference.take()

    def _learning_rate(self) -> float:
        return learning_rate_at(self._steps_done, self._config.run.iterations, self._config.trainer)

    def logprobs(self, samples: Samples, *, reference: bool = False) -> tuple[FloatArray, FloatArray]:
        """Compute log-probs and entropies, by a forward pass only."""
        if reference and self._reference is None:
            raise InvalidRequest("this trainer has no reference policy: grpo.kl_coefficient is 0 in its configuration")
        with self.weights() if self._reference is None or not reference else self._reference.in_place():
            return self._runner.logprobs(samples)

    def save(self, folder: Path) -> int:
        """Save weights, a reference policy that is not as it began, and what is configured to be kept besides them."""
        meta = self._meta()
        with self._offload.use(*CHECKPOINT, changes=False):
            return checkpoint.save(folder, self._tensors_in(meta), meta, self._device, self._agreement)

    def begin_save(self, folder: Path) -> int:
        """Begin to save the same, from a copy in host memory."""
        meta = self._meta()
        with self._offload.use(*CHECKPOINT, changes=False):
            return self._saver.begin(folder, self._tensors_in(meta), meta, self._device)

    @property
    def saving(self) -> Saving | None:
        """On rank 0: what `begin_save` began last."""
        return self._saver.saving

    def _meta(self) -> dict[str, Any]:
        """Return the entries of the meta.json of a checkpoint; every rank must call this."""
        settings = self._config.trainer
        about: dict[str, Any] = {"policy_version": self.policy_version, "reference": self._refreshes}
        about |= {OPTIMIZER: settings.checkpoint_optimizer, EXTRA: settings.checkpoint_extra}
        if has_extra(about):
            about |= {"steps_done": self._steps_done, "skipped_updates": self._skipped_updates}
        # The id of one rank: all must write the same.
        about[RUN_ID] = self._agreement.first_text(run_id_of(self._run_dir))
        return {**self._reader.meta, "parallel": self.parallel.sizes(), **about}

    def _tensors_in(self, about: Mapping[str, Any]) -> dict[str, Held]:
        """Return the tensors of a checkpoint. about: the entries of its meta.json."""
        tensors = self._adam.tensors()
        if not has_optimizer(about):
            tensors = weights_only(tensors)
        if self._reference is not None and self._refreshes and about.get("reference"):
            tensors |= self._reference.tensors()
        return tensors

    def check_checkpoint(self, folder: Path) -> None:
        """Check a checkpoint as load_checkpoint does before it changes anything."""
        with self._offload.use(*CHECKPOINT, changes=False):
            self._reader.check(folder, self._tensors_in(_about(folder)), self._adam.check_counts)

    def load_checkpoint(self, folder: Path) -> None:
        """Load what `save` has saved, at this or any other layout.

        A reference that is never refreshed is that of its folder, so that a checkpoint need not have it.
        """
        with self._offload.use(*CHECKPOINT):
            saved = self._reader.load(folder, self._tensors_in(_about(folder)), self._adam.check_counts)
            if has_optimizer(saved):
                self._adam.written()
            else:
                self._adam.masters_from_weights()
                self._adam.forget()
            self._agreement.meet()
            self._adam.gather()
            self.policy_version = int(saved["policy_version"])
            self._steps_done = int(saved.get("steps_done", self.policy_version)) if has_extra(saved) else 0
            self._skipped_updates = int(saved.get("skipped_updates", 0))
            if not (self._refreshes and saved.get("reference")):
                self._load_reference()

    def renumber(self, policy_version: int) -> None:
        """Give the same policy another version."""
        self.policy_version = policy_version

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the live parameters, by megatron-core's local names; their bytes are there inside of `weights`."""
        return {name: parameter.data for name, parameter in self._parameters.items()}

    def weights(self) -> AbstractContextManager[Mapping[str, float]]:
        """Have the parameters in memory inside of a `with` block, which does not change them."""
        return self._offload.use(EngineState.PARAMETERS, changes=False)

    def export(self, folder: Path) -> int:
        """Gather the weights on rank 0, which writes the Hugging Face folder."""
        with self.weights():
            gathered = gather_tensors(self.spec, self.parallel, dist.get_rank(), self.tensors(), self._agreement.group)

        def write() -> int:
            if gathered is None:
                return 0
            model, about = self._config.model, {"policy_version": self.policy_version}
            template = noted_template(self._run_dir)
            write_folder(gathered, model.path, folder, tokenizer=model.tokenizer_path, about=about, template=template)
            return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

        return self._agreement.together(f"write {folder}", write)

    def finish_profiles(self, timeout_s: float) -> None:
        """Wait for the files of profiled steps."""
        self._profiler.wait(timeout_s)

    def close(self) -> None:
        """Destroy Megatron's process groups, so that another engine can be made in this process."""
        self._profiler.wait()
        dist.destroy_process_group(self._agreement.group)
        build.destroy_parallel()


def _about(folder: Path) -> dict[str, Any]:
    """Return the entries of a checkpoint's meta.json; {}: it cannot be read, which loading reports."""
    try:
        return read_meta(folder)
    except ConfigError:
        return {}
