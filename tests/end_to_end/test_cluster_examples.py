"""The files of examples/cluster, with stand-ins for what only a cluster has."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

from megafsdp.training import Config, parse_config, train
from megafsdp.training.config.parse import to_yaml
from megafsdp.training.config.validate import validate
from tests.end_to_end.launchers import until
from tests.ranks import Ranks
from tests.training.runs import stored_tensors, tiny, write_corpus

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples/cluster"
NUM_NODES = 2

# Runs its command once a machine, and ends with the last code that is not 0.
SRUN = """
output=
while [[ $1 == --* ]]; do
  case $1 in --output=*) output=${1#--output=} ;; esac
  shift
done
rm -f "$FAKE/tasks"
for node in 0 1; do
  SLURM_NODEID=$node "$@" >"${output//%n/$node}" 2>&1 &
  echo $! >>"$FAKE/tasks"
done
status=0
for task in $(cat "$FAKE/tasks"); do wait "$task" || status=$?; done
exit "$status"
"""
SCONTROL = """
case $1 in
  show) echo 127.0.0.1; echo other ;;
  requeue) echo "$2" >>"$FAKE/requeued" ;;
esac
"""
SCANCEL = """
[ "$*" = "--signal=TERM 7.0" ]
kill -TERM $(cat "$FAKE/tasks")
"""
# A launcher with one rank, which saves on SIGTERM as a rank does, or fails if the test says so.
PYTHON = """
printf '%s\\n' "$@" >"$FAKE/words-$SLURM_NODEID"
env | grep -E '^(PET|TORCH|NCCL)_' >"$FAKE/environment-$SLURM_NODEID"
[ ! -e "$FAKE/fails" ] || exit 3
bash -c 'trap "touch $FAKE/saved-$SLURM_NODEID; exit 0" TERM
  touch $FAKE/ready-$SLURM_NODEID; while :; do sleep 0.05; done' &
trap 'exit 1' TERM
wait $!
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with Slurm's programs on the path, and the environment of a job."""
    folder = tmp_path / "fake"
    folder.mkdir()
    programs = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "launcher": PYTHON}
    for name, text in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\nset -e\n{text}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    values = {
        "FAKE": folder,
        "PYTHON": folder / "launcher",
        "LOGS": tmp_path / "logs",
        "SLURM_SUBMIT_DIR": ROOT,
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_ID": 7,
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": NUM_NODES,
        "SLURM_GPUS_ON_NODE": 1,
    }
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    yield folder


def _submit(*options: str) -> subprocess.Popen[str]:
    words = ["bash", str(CLUSTER / "slurm.sbatch"), *options]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_slurm_job_saves_and_is_queued_again_on_sigterm(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes to the batch script alone, and the ranks of both machines save."""
    job = _submit("--train.steps=5")
    until(lambda: len(list(fake.glob("ready-*"))) == NUM_NODES, "both launchers")
    job.send_signal(signal.SIGTERM)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    assert len(list(fake.glob("saved-*"))) == NUM_NODES
    assert (fake / "requeued").read_text().split() == ["7"]
    logs = tmp_path / "logs/job-7/start-0"
    assert {path.name for path in logs.iterdir()} == {"machine-0.log", "machine-1.log"}
    # torchrun reads what the script has set, each word with a meaning for it.
    for node in range(NUM_NODES):
        lines = (fake / f"environment-{node}").read_text().splitlines()
        environment = dict(line.split("=", 1) for line in lines)
        assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        words = (fake / f"words-{node}").read_text().splitlines()
        assert words[:2] == ["-m", "torch.distributed.run"]
        read = get_args_parser().parse_args(words[2:])
        assert (read.nnodes, read.nproc_per_node, read.max_restarts) == ("2", "1", 3)
        assert (read.rdzv_backend, read.rdzv_endpoint) == ("c10d", "127.0.0.1:29507")
        assert (read.rdzv_id, read.log_dir, read.tee) == ("7-0", f"{logs}/ranks", "3")
        assert (read.module, read.training_script) == (True, "megafsdp")
        assert read.training_script_args == ["train", "--train.steps=5"]


def test_slurm_job_that_fails_is_not_queued_again(fake: Path) -> None:
    """Its code is the ranks': an error in the options would come again and again."""
    (fake / "fails").touch()
    job = _submit()
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 3, output
    assert not (fake / "requeued").exists()


def test_slurm_options_leave_time_to_save() -> None:
    """Slurm is asked for a signal before the limit, to the script, and for a place in the queue."""
    text = (CLUSTER / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    receiver, _, seconds = options["signal"].partition("@")
    assert receiver == "B:TERM"
    shutdown = re.search(r"SHUTDOWN_TIMEOUT:-(\d+)", (CLUSTER / "node.sh").read_text())
    assert shutdown is not None and int(seconds) > int(shutdown[1])
    assert {"requeue", "nodes", "gpus-per-node"} <= options.keys()
    assert options["ntasks-per-node"] == "1", "torchrun starts the ranks of a machine"
    for name in ("slurm.sbatch", "node.sh"):
        subprocess.run(["bash", "-n", str(CLUSTER / name)], check=True)


def test_pytorchjob_names_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers agree, every path lies on a mounted volume, and the options are a configuration."""
    monkeypatch.chdir(ROOT)
    job: dict[str, Any] = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec, (worker,) = job["spec"], job["spec"]["pytorchReplicaSpecs"].values()
    elastic, pod = spec["elasticPolicy"], worker["template"]["spec"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == worker["replicas"]
    assert elastic["rdzvBackend"] == "c10d" and elastic["maxRestarts"] > 0
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    num_gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert spec["nprocPerNode"] == str(num_gpus)
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    shell, script = container["command"]
    assert shell == "bash" and (ROOT / script).is_file()
    shutdown = re.search(r"SHUTDOWN_TIMEOUT:-(\d+)", (ROOT / script).read_text())
    assert shutdown is not None and pod["terminationGracePeriodSeconds"] > int(shutdown[1])
    config = parse_config(container["args"])
    validate(config.with_filled_model(), world_size=num_gpus * worker["replicas"])
    paths = [config.run.directory, *config.data.train, *config.data.validation]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert all(any(path.startswith(f"{mount}/") for mount in mounts) for path in paths)


def _train(config: Config) -> None:
    train(config)


def _slurm_config(folder: Path, name: str) -> Config:
    return tiny(
        folder,
        run={"directory": str(folder / name)},
        model={"num_layers": 1},
        train={"steps": 150, "micro_batch_size": 2},
        evaluation={"batches": 1},
    )


@pytest.mark.matrix("restarts")
def test_slurm_job_goes_on_after_it_was_queued_again(
    ranks: Ranks, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launchers by torchrun's own command; weights are those of a run without a signal."""
    write_corpus(tmp_path)
    whole, broken = _slurm_config(tmp_path, "whole"), _slurm_config(tmp_path, "run")
    ranks(2).run(_train, whole)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(broken))
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    metrics = tmp_path / "run/metrics.jsonl"
    job = _submit("--config", str(path))
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, "five steps")
    job.send_signal(signal.SIGTERM)
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 0, output
    assert (fake / "requeued").exists()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = _submit("--config", str(path))
    output = again.communicate(timeout=120)[0]
    assert again.returncode == 0, output
    log = "".join(p.read_text() for p in (tmp_path / "logs/job-7/start-1").glob("machine-*"))
    assert "resumed from step" in log
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 151))
    ours = stored_tensors(broken.checkpoint_directory, 150)
    theirs = stored_tensors(whole.checkpoint_directory, 150)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_page_names_what_there_is() -> None:
    """Links, files of examples, options and phrases of docs/cluster.md exist."""
    page = ROOT / "docs/cluster.md"
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    files = re.findall(r"`(examples/cluster/[^`]+)`", text)
    assert links and len(set(files)) == 4
    assert all((page.parent / link).exists() for link in links)
    assert all((ROOT / file).is_file() for file in files)
    sections = Config().to_dict()
    named = set(re.findall(r"`(?:--)?(\w+)\.(\w+)[` ]", text)) - {("events", "jsonl")}
    assert {section for section, _ in named} >= {"run", "checkpoint", "parallel", "train", "data"}
    options = [(s, f) for s, f in named if (s, f) not in {("slurm", "sbatch"), ("node", "sh")}]
    for section, field in options:
        assert field in sections[section], f"{section}.{field}"
    sources = "".join(path.read_text() for path in (ROOT / "megafsdp/training").rglob("*.py"))
    for phrase in ("no sign of rank", "while the ranks met", "does not answer", "the end of one"):
        assert phrase in text and phrase in sources
