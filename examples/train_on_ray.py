"""The run of train_with_restarts.py carried by Ray Train: a worker is killed, all are restarted and resume.

    pip install 'ray[train]>=2.60'
    python examples/train_on_ray.py --dir runs/ray --kill
    python examples/train_on_ray.py --dir runs/ray-whole
    optckpt diff runs/ray/checkpoints/step-000000012 runs/ray-whole/checkpoints/step-000000012

Ray starts the workers, makes their process group and restarts them (`FailureConfig`); what they resume from is the
newest good one of our own checkpoints, in a folder that all nodes see.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def worker(config: dict[str, Any]) -> None:
    """Train on one worker; Ray has joined the ranks."""
    from train_with_restarts import train

    train(config["dir"], steps=config["steps"], kill=config["kill"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="where checkpoints and Ray's records are")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill", action="store_true", help="kill the last worker once")
    args = parser.parse_args()
    directory = args.dir.resolve()
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # One machine. On a cluster that runs already: ray.init(address="auto", runtime_env=...).
    ray.init(num_cpus=args.workers, include_dashboard=False, runtime_env={"env_vars": variables})
    trainer = TorchTrainer(
        worker,
        train_loop_config={"dir": str(directory / "checkpoints"), "steps": args.steps, "kill": args.kill},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(name="run", storage_path=str(directory), failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()  # raises TrainingFailedError if it fails more often
    ray.shutdown()


if __name__ == "__main__":
    main()
