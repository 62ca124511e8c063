"""Checkpoints on S3, as moto's server on this machine speaks it, through s3fs."""

from __future__ import annotations

import logging
import os
import re
import shlex
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import moto.settings
import pytest
import s3fs
import torch
from moto.server import ThreadedMotoServer
from torch import nn

from megafsdp.checkpoint import StorePath, async_save, latest_step, load, save
from megafsdp.checkpoint.storage import store_files
from megafsdp.checkpoint.tools.verify import verify
from megafsdp.errors import CheckpointError
from megafsdp.training.cli.main import main
from tests.checkpoint.sharding import (
    Toy,
    differences,
    fill,
    full_state,
    make_optimizer,
    shard,
    train,
    whole_mesh,
)
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]

ROOT = "s3://bucket/run"


def _environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        # Neither asks the network of a cloud for credentials, nor tries for long.
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Return the URL of a server that runs while the tests of this file do."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> s3fs.S3FileSystem:
    """Return a client of an empty bucket, which this process's environment names."""
    for name, value in _environment(server).items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(f"{server}/moto-api/reset", data=b"", timeout=10).close()
    client = s3fs.S3FileSystem(use_listings_cache=False)
    client.mkdir("bucket")
    return client


def _save_trained(server: str, in_background: bool) -> dict[str, torch.Tensor]:
    model = Toy()
    fill(model, salt=7)
    shard(model, whole_mesh())
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer)
    with mock.patch.dict(os.environ, _environment(server)):
        if in_background:
            async_save(ROOT, step=7, model=model, optimizer=optimizer).result()
        else:
            save(ROOT, step=7, model=model, optimizer=optimizer)
    return full_state(model, optimizer)


def _load_and_save(server: str, step: int) -> dict[str, torch.Tensor]:
    model = shard(Toy(), whole_mesh(), padding_rows=5)
    optimizer = make_optimizer("adamw", model)
    with mock.patch.dict(os.environ, _environment(server)):
        load(ROOT, model=model, optimizer=optimizer)
        save(ROOT, step=step, model=model, optimizer=optimizer, keep_last=1)
    return full_state(model, optimizer)


def test_listings_are_as_the_store_is(s3: s3fs.S3FileSystem) -> None:
    """Not as it was, and without the object that some programs make for a folder."""
    folder = StorePath(ROOT)
    s3.pipe_file("bucket/run/a", b"1")
    assert folder.list_names() == (["a"], [])
    s3.pipe_file("bucket/run/b", b"2")
    s3.pipe_file("bucket/run/steps/c", b"3")
    s3.call_s3("put_object", Bucket="bucket", Key="run/", Body=b"")
    assert folder.list_names() == (["a", "b"], ["steps"])


@pytest.mark.parametrize("in_background", [False, True])
def test_ranks_load_from_s3_what_others_saved_there(
    ranks: Ranks, server: str, s3: s3fs.S3FileSystem, in_background: bool
) -> None:
    """From 2 ranks over 1 to 3, bit by bit; retention leaves the newest step alone."""
    saved, *_ = ranks(2).run(_save_trained, server, in_background)
    for num_ranks, step in ((1, 8), (3, 9)):
        for loaded in ranks(num_ranks).run(_load_and_save, server, step):
            assert differences(saved, loaded) == []
    assert latest_step(ROOT) == 9
    assert verify(ROOT).is_sound
    names = s3.find("bucket")
    assert len(names) == 6
    assert all("/iter_0000009/" in name for name in names[:-1])


def test_large_files_go_in_parts(s3: s3fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of three parts comes back; one that fails in its second leaves no part there."""
    monkeypatch.setattr(store_files, "_PART_NBYTES", 5 << 20)
    model, loaded = (nn.Linear(1024, 3 << 10, bias=False) for _ in range(2))
    save(ROOT, step=1, model=model)
    load(ROOT, model=loaded)
    assert torch.equal(model.weight, loaded.weight)
    whole = s3.find("bucket/run/iter_0000001")

    upload, sent = s3fs.core.S3File._upload_chunk, []

    def fail(file: s3fs.core.S3File, final: bool = False) -> bool:
        sent.append(file.buffer.tell())
        if len(sent) == 2:
            raise ConnectionError("the line is cut")
        return upload(file, final)

    with (
        mock.patch.object(s3fs.core.S3File, "_upload_chunk", fail),
        pytest.raises(CheckpointError, match=r"the line is cut.*what was published before"),
    ):
        save(ROOT, step=2, model=model)
    assert max(sent) < (5 << 20) + (8 << 20) + 1
    assert not s3.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")
    assert s3.find("bucket/run") == sorted([*whole, "bucket/run/latest_checkpointed_iteration.txt"])
    load(ROOT, model=loaded)


def test_without_rights_every_call_says_so(
    s3: s3fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save, a load and a tool; none takes it for a store without checkpoints."""
    model = nn.Linear(2, 2)
    save(ROOT, step=1, model=model)
    # From here on the server, a thread of this process, asks for keys that it has given out.
    monkeypatch.setattr(moto.settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)
    hint = "Give this user the rights to list, read, write and remove objects there"
    for call in (
        lambda: save(ROOT, step=2, model=model),
        lambda: load(ROOT, model=model),
        lambda: latest_step(ROOT),
        lambda: verify(ROOT),
    ):
        with pytest.raises(CheckpointError, match=hint) as failure:
            call()
        assert "PermissionError" in str(failure.value)
        assert f"In '{ROOT}/" in str(failure.value)


def test_a_bucket_that_is_not_there_is_named(s3: s3fs.S3FileSystem) -> None:
    """It has no latest step, and cannot be saved to."""
    assert latest_step("s3://other/run") is None
    with pytest.raises(CheckpointError, match=r"In 's3://other/run.*Make the bucket first"):
        save("s3://other/run", step=1, model=nn.Linear(2, 2))


def test_the_page_works_as_written(
    s3: s3fs.S3FileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The program and the commands of docs/object-stores.md."""
    page = (Path(__file__).parents[2] / "docs" / "object-stores.md").read_text()
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(program, "object-stores.md", "exec"), {})
    commands = [line for line in page.splitlines() if line.startswith("megafsdp ckpt")]
    assert len(commands) == 4
    for command in commands:
        assert main(shlex.split(command)[1:]) == (1 if " diff " in command else 0)
    assert "iter_0000100: sound" in capsys.readouterr().out
    assert torch.load(tmp_path / "model.pt", weights_only=True)["model"]["weight"].shape == (16, 16)


def test_the_tools_take_urls(
    s3: s3fs.S3FileSystem, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """inspect, verify, diff and convert, from the command line."""
    model = Toy()
    fill(model)
    save(ROOT, step=1, model=model)
    fill(model, salt=1)
    save(ROOT, step=2, model=model)
    assert main(["ckpt", "inspect", ROOT, "--keys", "model.norm.*"]) == 0
    assert f"{ROOT}/iter_0000002: step 2, saved by 1 rank(s)" in capsys.readouterr().out
    assert main(["ckpt", "verify", ROOT, "--step", "1", "--no-progress"]) == 0
    assert f"{ROOT}/iter_0000001: sound" in capsys.readouterr().out
    assert main(["ckpt", "diff", f"{ROOT}/iter_0000001", ROOT, "--no-progress"]) == 1
    assert "model.embed.weight" in capsys.readouterr().out
    file, copied = str(tmp_path / "model.pt"), "s3://bucket/copied"
    assert main(["ckpt", "convert", ROOT, file, "--to", "torch", "--no-progress"]) == 0
    back = ["ckpt", "convert", file, copied, "--to", "megafsdp", "--fused-like", ROOT]
    assert main([*back, "--no-progress"]) == 0
    capsys.readouterr()
    assert main(["ckpt", "diff", ROOT, copied, "--no-progress", "--json"]) == 0
    assert str(StorePath(copied) / "iter_0000002") in capsys.readouterr().out
    s3.rm("bucket/copied/iter_0000002/manifest.json")
    assert main(["ckpt", "verify", copied, "--no-progress"]) != 0
