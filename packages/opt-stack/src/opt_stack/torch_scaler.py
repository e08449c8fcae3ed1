"""torch's `GradScaler` around a step of several ranks."""

from torch.amp import GradScaler

from opt_config import ConfigError, NoScale, OptimizerConfig
from opt_distributed.comm import mesh_of
from opt_distributed.pieces import DTensorGrads, ParamGrads, Source
from opt_distributed.step import Stepper


def check_scaler(scaler: object, config: OptimizerConfig, stepper: Stepper, num_ranks: int) -> None:
    """Raise ConfigError if `scaler` is torch's, and would skip steps on some of the ranks only, or if the step divides
    gradients by a loss scale as well.

    A `GradScaler` searches `param.grad` of its rank for overflows, before the step. Gradients that the step itself
    reduces differ between ranks then. Scalers with an `unscale_` of their own are accepted: torch's `ShardedGradScaler`
    shares overflows between ranks.
    """
    if not isinstance(scaler, GradScaler):
        return
    if not isinstance(config.loss_scaling, NoScale):
        raise ConfigError(
            f"torch's GradScaler with fp16={config.fp16}, loss_scale={config.loss_scale}: gradients would be divided "
            "by both loss scales; leave fp16=False and loss_scale=None, or use optimizer.scale_loss(loss) in place of "
            "torch's scaler"
        )
    if type(scaler).unscale_ is not GradScaler.unscale_:
        return
    if num_ranks == 1 or all(_is_equal_on(source, num_ranks) for source in stepper.sources):
        return
    raise ConfigError(
        f"torch.amp.GradScaler with {num_ranks} ranks: it would skip step() on the rank that overflows only, because "
        "the gradients of ranks are reduced in step(), and gradients of different iterations would be averaged. Use "
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, which shares overflows between ranks, or wrap "
        "the model in torch.nn.parallel.DistributedDataParallel, or train fp16 parameters with "
        "OptimizerConfig(fp16=True) and optimizer.scale_loss(loss)"
    )


def _is_equal_on(source: Source, num_ranks: int) -> bool:
    """Return whether an overflow in the gradients of `source` is found on all ranks: torch's wrapper has averaged
    them, or they are DTensors, for which torch shares it over the mesh."""
    if isinstance(source, ParamGrads):
        return source.comm.size == num_ranks
    if isinstance(source, DTensorGrads):
        covers_all = all(mesh_of(param).size() == num_ranks for param in source.params.values())
        return covers_all and not source.averages
    return False
