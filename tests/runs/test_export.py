"""A checkpoint, exported, is what torch.distributed.checkpoint loads on another number of ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accordion_bench import train
from accordion_bench.runs import checkpoint
from accordion_bench.runs.export import main
from accordion_bench.runs.saving import checkpoints
from tests.kit import composed, tiny
from tests.kit.processes import in_two


def trained(runs, *overrides: str):
    """The folder of a run that has left its last step."""
    train.run(composed.run(runs, "epochs=1", f"checkpoint.every={tiny.STEPS}", *overrides))
    return tiny.only(runs)


def load_in_shards(rank: int, folder: str, shared: dict, first: dict) -> None:
    """A model of FSDP2 and its optimizer, each rank with its half."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = fully_shard(tiny.Net(3, 10), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights, state = get_state_dict(model, optimizer)
    asked = {"model": weights, "optimizer": {"state": state["state"]}, "position": {"step": 0, "epoch": 9}}
    dcp.load(asked, checkpoint_id=f"{folder}/dcp")
    set_state_dict(model, optimizer, model_state_dict=asked["model"], optim_state_dict={**state, **asked["optimizer"]})
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), shared["parameters"][name])
        assert torch.equal(
            optimizer.state[param]["momentum_buffer"].full_tensor(), shared["optimizer"][name]["momentum_buffer"]
        )
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, first["buffers"][name])
    assert asked["position"] == {"step": tiny.STEPS, "epoch": shared["epoch"]}
    dist.destroy_process_group()


def test_one_process_writes_and_two_ranks_load_their_shards(tmp_path, capsys):
    run = trained(tmp_path / "runs", "compressor=topk")
    assert main([str(run), "--dcp", str(tmp_path / "dcp")]) == 0
    assert capsys.readouterr().out.endswith(f"\n{tmp_path / 'dcp'} holds step {tiny.STEPS} of {run}\n")
    shared, first = checkpoint.read(checkpoints(run)[0], range(1))
    in_two(load_in_shards, str(tmp_path), shared, first)


def test_a_local_methods_is_the_consensus_and_worker_0s_optimizer(tmp_path):
    run = trained(tmp_path / "runs", "sync=local_sgd", "sync.period=4")
    assert main([str(run), "--dcp", str(tmp_path / "dcp")]) == 0
    shared, first = checkpoint.read(checkpoints(run)[0], range(1))
    name, momentum = next((name, own["momentum_buffer"]) for name, own in first["replica"]["optimizer"].items())
    asked = {
        "model": {name: torch.zeros_like(momentum)},
        "optimizer": {"state": {name: {"momentum_buffer": momentum * 0}}},
    }
    dcp.load(asked, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(asked["model"][name], shared["parameters"][name])
    assert torch.equal(asked["optimizer"]["state"][name]["momentum_buffer"], momentum)


def test_what_cannot_be_exported_is_one_sentence(tmp_path, capsys):
    run = trained(tmp_path / "runs", "checkpoint.keep=2", "checkpoint.every=3")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()

    def refused(run, folder) -> str:
        assert main([str(run), "--dcp", str(folder)]) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        return printed

    assert "--dcp must be a new or empty folder, got" in refused(run, full)
    assert "must be the folder of a run with a checkpoint, got" in refused(tmp_path, tmp_path / "dcp")
    newest, *_ = checkpoints(run)
    (newest / "shared.pt").write_bytes(b"")
    if older := checkpoints(run)[1:]:
        assert main([str(run), "--dcp", str(tmp_path / "older")]) == 0
        assert f"{newest.name} is damaged: shared.pt" in capsys.readouterr().err
        (older[0] / "shared.pt").unlink()
    assert "must be a run with a checkpoint that can be read" in refused(run, tmp_path / "dcp")


def test_argparse_refuses_a_command_without_a_folder(tmp_path):
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
