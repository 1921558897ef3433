"""FP8 layers on torch over two processes: DDP and FSDP train as one process does on both batches.

The processes are real, with gloo; process 1's inputs are 100 times larger than those of process 0.
"""

import functools
import time
from typing import Any

import pytest
import torch
from fp8jax_torch import prepare, transform
from fp8jax_torch.backends import native
from fp8jax_torch.optim import skipping
from fp8jax_torch.scaling import ScalingState
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from fp8jax import Recipe

RATE, STEPS = 1e-7, 3
X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 100]).view(2, 1, 1)
# Adam in FP8, and what the refusal of FP8 gradients in several processes says.
O2 = "O2,comm=FP32,weight=FP32,weight_grad=FP32"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))


def sgd(model, rate=RATE):
    return torch.optim.SGD(model.parameters(), rate)


def prepared(wrap=lambda model: model, recipe="te", make=sgd):
    model = net()
    model, optimizer = prepare(model, make(model), recipe)
    return wrap(model), optimizer


def transformed(wrap):
    model = wrap(transform(net(), "te"))
    return model, skipping(sgd(model))


def sharded(model):
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def adam(model):
    return torch.optim.AdamW(model.parameters(), 1e-4)


def with_empty_group(model):
    return torch.optim.SGD([{"params": []}, {"params": list(model.parameters())}], RATE)


WAYS: dict[str, Any] = {
    "ddp": lambda: prepared(DistributedDataParallel),
    "ddp, empty group": lambda: prepared(DistributedDataParallel, make=with_empty_group),
    "ddp, transform": lambda: transformed(DistributedDataParallel),
    "ddp, accumulated": lambda: prepared(DistributedDataParallel),
    "ddp, no_sync": lambda: prepared(DistributedDataParallel),
    "ddp, Adam": lambda: prepared(DistributedDataParallel, O2, adam),
    "fsdp": lambda: transformed(functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))),
    "fully_shard": lambda: transformed(sharded),
}


def backward(model, x, way):
    """The gradients of a batch, in one or two microbatches."""
    if "accumulated" in way or "no_sync" in way:
        large, small = x.flip(0).chunk(2)  # the large microbatch first, then one that has small numbers
        if "no_sync" in way and isinstance(model, DistributedDataParallel):
            with model.no_sync():
                model(large).square().sum().backward()
        else:
            model(large).square().sum().backward()
        model(small / 50).square().sum().backward()
    else:
        model(x).square().sum().backward()


def train(model, optimizer: Any, x, way):
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model, x, way)
        optimizer.step()
        if way == "ddp, transform" and distributed.is_initialized() and distributed.get_rank() == 0:
            inner = model.module.eval()
            with torch.no_grad():  # process 0 evaluates alone
                inner(X[0])
            inner.train()
    if not hasattr(optimizer, "scaling_states"):
        model(x)  # ends the last step
    return model


def states_of(model):
    found = [module for module in model.modules() if isinstance(module, ScalingState)]
    return torch.stack([torch.cat([state.scale[:, None], state.amax_history], 1) for state in found])


def trained(way, rank):
    model, optimizer = WAYS[way]()
    return states_of(train(model, optimizer, X[rank], way))


def skips(rank):
    """Whether a step is skipped and changes nothing, and whether the next step is skipped."""
    model, optimizer = prepared()
    before = [parameter.clone() for parameter in model.parameters()]
    found = []
    for number in (torch.inf, 1.0):
        optimizer.zero_grad()
        model(X[rank]).square().sum().backward()
        if rank == 1:  # as in a shard of a gradient of FSDP
            model[2].bias.grad[0] = number
        optimizer.step()
        found += [optimizer.has_skipped, all(map(torch.equal, before, model.parameters()))]
    return found


def alone(rank):
    """A model that each process trains for itself."""
    groups = [distributed.new_group([i]) for i in range(2)]
    model = net()
    pair = prepare(model, sgd(model), "te", process_group=groups[rank])
    return states_of(train(*pair, X[rank], ""))


def tensor_parallel(recipe, rank):
    """The loss of a model whose layers are split over the processes, and the loss of the whole model."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(net(), init_device_mesh("cpu", (2,)), plan)
    models = transform(model, recipe, inplace=True), transform(net(), recipe)
    return torch.stack([model(X[0]).square().mean() for model in models]).detach()


def on_two(rank, folder):
    """One of the two processes: writes what each way gives, or its error."""
    torch.set_num_threads(1)
    _, early = prepared(recipe="O2", make=adam)  # before there are several processes
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    calls = {way: functools.partial(trained, way, rank) for way in WAYS}
    calls |= {"skips": lambda: skips(rank), "alone": lambda: alone(rank), "step": early.step}
    calls |= {
        name: functools.partial(tensor_parallel, name, rank) for name in ("te,scaling=current", "te", "block")
    }
    calls["prepare"] = lambda: prepared(recipe="O2", make=adam)
    for name, call in calls.items():
        try:
            found[name] = call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder, deadline = tmp_path_factory.mktemp("processes"), time.monotonic() + 300
    context: Any = spawn(on_two, (folder,), nprocs=2, join=False)
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the two processes wait for each other")
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def as_one_process(way):
    """The scaling states of one process with both batches; its gradients are sums and not means."""
    model, optimizer = prepared(recipe=O2 if "Adam" in way else "te", make=adam if "Adam" in way else sgd)
    for group in optimizer.param_groups:
        group["lr"] /= 1 if "Adam" in way else 2
    return states_of(train(model, optimizer, X.transpose(0, 1).reshape(16, 16), way))


@pytest.mark.parametrize("way", WAYS)
def test_amaxes_are_the_largest_of_all_processes(way, found):
    """Bit for bit the same in both processes, and those of one process, but for a code of E4M3 (1/16)."""
    first, second = (results[way] for results in found)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, as_one_process(way), rtol=1 / 16, atol=0)


def test_tensor_parallelism(found):
    """torch merges the amaxes of the processes' parts only where they are computed in the forward."""
    for results in found:
        part, whole = results["te,scaling=current"]
        torch.testing.assert_close(part, whole, rtol=0.02, atol=0)
        for recipe in ("te", "block"):
            assert "expected scaling=current with tensor parallelism" in results[recipe]


def test_processes_skip_a_step_together(found):
    assert [results["skips"] for results in found] == [[True, True, False, False]] * 2


def test_processes_of_a_group(found):
    """A process that trains for itself takes its own amaxes only."""
    for rank, results in enumerate(found):
        model, optimizer = prepared()
        assert torch.equal(results["alone"], states_of(train(model, optimizer, X[rank], "")))


def test_refused_recipes(found):
    """FP8 gradients are refused, also if `prepare` saw one process; "ddp, Adam" has the message's recipe."""
    for results in found:
        for name in ("prepare", "step"):
            assert "say comm=FP32,weight=FP32,weight_grad=FP32" in str(results[name])


@pytest.mark.parametrize("level", ["fp8", "O1", "O2", "O3", "O3,exclude=2"])
def test_the_refusal_has_a_recipe_that_is_taken(level, monkeypatch):
    """Weights in float32 allow neither master weights nor their remainders."""
    monkeypatch.setattr(native, "are_several", lambda: True)
    says = native.refuses(Recipe.parse(level))
    assert says is not None
    recipe = Recipe.parse(says.rpartition("the recipe ")[2].strip("'"))
    assert native.refuses(recipe) is None
    kept = "gemm", "scaling", "moments", "exclude"
    assert all(getattr(recipe, field) == getattr(Recipe.parse(level), field) for field in kept)
