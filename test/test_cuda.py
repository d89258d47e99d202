# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Inference and training on a GPU, on any machine: every tensor where it belongs, and the CPU's numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from box_room import CAMERA, look, render
from fake_cuda import CUDA, fake_cuda, on_gpu
from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.cloud.pyramid import PyramidShape, build_pyramid
from lepard_ros.encoded_cloud import EncodedCloud
from lepard_ros.evaluation import ablation
from lepard_ros.geometry.rigid_motion import exponential
from lepard_ros.matcher import Matcher, MatcherSettings
from lepard_ros.network.config import PAPER_RIGID, SMALL_RIGID, LepardConfig
from lepard_ros.network.convolution import KernelPointConvolution
from lepard_ros.network.lepard import Lepard
from lepard_ros.network.onnx_graphs import pyramid_tensors
from lepard_ros.network.weights import Card
from lepard_ros.registration.rigid import estimate
from lepard_ros.registration.rigid.device_icp import equations_for, on_device
from lepard_ros.registration.rigid.icp import IcpSettings, align
from lepard_ros.training.objective import ObjectiveSettings
from lepard_ros.training.paper import RawPair, prepared
from lepard_ros.training.samples import Pair, make_sample
from lepard_ros.training.training import Trainer, TrainingSettings, own_device, validate
from registration_scene import two_views

SMALL = {"width": 16, "feature_dim": 48, "grid": 0.1, "confidence_threshold": 0.0}
CONFIGS = {
    "paper": LepardConfig.from_dict({**PAPER_RIGID.to_dict(), **SMALL}),
    "ours": LepardConfig.from_dict({**SMALL_RIGID.to_dict(), **SMALL, "fine_dim": 16}),
}


def clouds() -> list[np.ndarray]:
    poses = (look(-0.5, -0.6, -10.0), look(-0.2, -0.6, 0.0))
    points = [depth_to_points(render(pose), CAMERA).reshape(-1, 3) for pose in poses]
    return [cloud[np.isfinite(cloud).all(axis=1)][::3] for cloud in points]


def network_of(name: str) -> Lepard:
    torch.manual_seed(0)
    return Lepard(CONFIGS[name])


def matcher_of(name: str, device: str, guided: bool) -> Matcher:
    settings = MatcherSettings(guided=guided, grid=None if name == "paper" else 0.1)
    if name == "ours":
        return Matcher.from_pretrained("rigid", device, settings)
    return Matcher(network_of(name), Card("tiny", CONFIGS[name], sha256="0"), device, settings)


def test_the_rules_are_those_of_a_gpu() -> None:
    with fake_cuda():
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        assert there.device == CUDA and there.is_cuda and (there + there).is_cuda
        assert not there.cpu().is_cuda
        assert (there * 2).cpu().numpy().sum() == 6
        assert float(there.sum()) == 3
        for forbidden in (lambda: here + there, lambda: torch.cat([here, there]), lambda: torch.stack([there, here])):
            with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
                forbidden()
        for forbidden in (there.numpy, lambda: np.asarray(there)):
            with pytest.raises(TypeError, match="numpy"):
                forbidden()
        layer = torch.nn.Linear(3, 2).to("cuda")
        layer(there).sum().backward()
        assert layer.weight.is_cuda and layer.weight.grad.is_cuda
        with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
            layer(here)


@pytest.mark.parametrize(("name", "guided"), [("paper", True), ("ours", True), ("ours", False)])
def test_matches_are_those_of_the_cpu(name: str, guided: bool) -> None:
    source, target = clouds()
    expected = matcher_of(name, "cpu", guided).match(source, target)
    with fake_cuda():
        matcher = matcher_of(name, "cuda", guided)
        found = matcher.match(source, target)
        first, second = matcher.encode(source), matcher.encode(target)
        assert first.points.is_cuda and first.features.is_cuda
        again = EncodedCloud.from_arrays(first.to_arrays(), matcher.device)  # a saved map
        kept = matcher.match(again, second)
        if name == "ours":
            matcher.register_many(again, [second])
    assert len(expected.confidence) > 20
    for matches in (found, kept):  # ties of neighbours may be broken otherwise
        np.testing.assert_allclose(np.sort(matches.confidence)[-20:], np.sort(expected.confidence)[-20:], atol=2e-3)


def test_hypotheses_are_sought_on_the_gpu_and_give_the_cpu_s_motion(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = clouds()
    expected = matcher_of("ours", "cpu", False).register(source, target)
    seen = []

    def watched(*arguments: Any) -> estimate.Hypotheses:
        seen.append(arguments[0].is_cuda)
        return find_hypotheses(*arguments)

    find_hypotheses = estimate.find_hypotheses
    monkeypatch.setattr(estimate, "find_hypotheses", watched)
    with fake_cuda():
        found = matcher_of("ours", "cuda", False).register(source, target)
    assert seen and all(seen)
    assert expected.transform is not None and found.transform is not None
    np.testing.assert_allclose(found.transform, expected.transform, atol=5e-3)


class Uploads(TorchFunctionMode):
    """Counts what goes from the host to the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.as_tensor, torch.tensor):
            self.count += on_gpu(result) and not on_gpu(args[0])
        return result


def test_matching_encoded_clouds_uploads_nothing() -> None:
    with fake_cuda():
        matcher = matcher_of("ours", "cuda", guided=False)
        with Uploads() as encoding:
            source, target = (matcher.encode(cloud) for cloud in clouds())
        with Uploads() as matching:
            (matches,) = matcher.match_many(source, [target])
    assert encoding.count >= 2, "the clouds themselves"
    assert len(matches.source) > 20 and matching.count == 0


def test_pieces_that_suit_a_cache_are_whole_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU waits for each of many small operations."""
    calls = []
    piece = KernelPointConvolution._piece
    monkeypatch.setattr(KernelPointConvolution, "_piece", lambda *args: calls.append(1) or piece(*args))
    points = torch.from_numpy(clouds()[0].astype(np.float32))
    network = network_of("paper").eval()
    counts = []
    with torch.no_grad():
        network.encode(build_pyramid(points, network.config.pyramid))
        counts.append(len(calls))
        with fake_cuda():
            network = network.to("cuda")
            network.encode(build_pyramid(points.to("cuda"), network.config.pyramid))
    convolutions = sum(isinstance(part, KernelPointConvolution) for part in network.modules())
    assert len(calls) - counts[0] == convolutions < counts[0] / 2


def test_an_alignment_on_the_gpu_is_the_cpu_s() -> None:
    source, target, motion = two_views(0)
    starts = exponential(np.random.default_rng(0).normal(size=(3, 6)) * 0.025) @ motion
    expected, settled = align(source, target, starts, 8, IcpSettings())
    with fake_cuda():
        make = equations_for("cuda")
        assert isinstance(make(source, target, starts, 0.1, IcpSettings()).hessian, np.ndarray)
        assert all(tensor.is_cuda for tensor in on_device(target, "cuda"))
        found, also = align(source, target, starts, 8, IcpSettings(), make)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_array_equal(also, settled)
    on_device.cache_clear()


@pytest.mark.parametrize("smooth", [False, True])
def test_a_pyramid_made_on_the_gpu_is_the_cpu_s(smooth: bool) -> None:
    shape = PyramidShape(grid=0.1, radius=2.5, limits=(20, 20, 20), normals=True, smooth=smooth)
    points = torch.from_numpy(clouds()[0].astype(np.float32))
    points += 0.003 * torch.randn(points.shape, generator=torch.Generator().manual_seed(0))
    expected = pyramid_tensors(build_pyramid(points, shape))
    with fake_cuda():
        made = build_pyramid(points.to("cuda"), shape)
        assert all(tensor.is_cuda for tensor in pyramid_tensors(made).values())
        found = {name: tensor.cpu() for name, tensor in pyramid_tensors(made).items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # The mean of two points is equally far from both: the CPU's tree breaks such ties as it likes.
        assert tensor.shape == found[name].shape
        assert ((found[name] - tensor).abs() < 1e-4).float().mean() > 0.995, name


@pytest.mark.parametrize(
    "variant", ["no repositioning", "random rotation", "oracle rigid fitting", "robust procrustes"]
)
def test_variants_of_the_ablation_stay_on_the_gpu(variant: str) -> None:
    from lepard_ros.data.readers import RigidPair

    source, target = clouds()
    with fake_cuda():
        matcher = matcher_of("ours", "cuda", guided=True)
        ablation.apply_settings(matcher, ablation.VARIANTS[variant].settings)
        with ablation.repositioned(variant, matcher, RigidPair("a", "b", "s", np.eye(4), 1.0)):
            assert len(matcher.match(source, target).source)


def training_pair(name: str, network: Lepard) -> Pair:
    source, target = (cloud[::3].astype(np.float64) for cloud in clouds())
    if name == "paper":
        raw = RawPair(source, target, np.eye(3), np.zeros(3), np.full_like(source, 0.01), 1.0)
        return prepared(raw, network.config)
    samples = [make_sample(torch.from_numpy(cloud).float(), torch.zeros(3), network) for cloud in (source, target)]
    return Pair(*samples, torch.eye(4))


@pytest.mark.parametrize("name", ["paper", "ours"])
def test_a_training_step_gives_the_losses_of_the_cpu(name: str) -> None:
    settings = TrainingSettings(
        optimiser="sgd", rate=1e-3, clip=0.0, together=name == "paper", objective=ObjectiveSettings(warping_weight=0.1)
    )
    pair = training_pair(name, network_of(name))
    on_cpu = Trainer(network_of(name), settings)
    expected = [on_cpu.step([pair, pair])["loss"] for _ in range(2)]
    with fake_cuda():
        network = network_of(name)
        pair = training_pair(name, network)
        trainer = Trainer(network, settings, "cuda")
        found = [trainer.step([pair, pair])["loss"] for _ in range(2)]
        assert all(parameter.is_cuda for parameter in trainer.network.parameters())
        table = validate(trainer.averaged_network().to("cuda"), [(pair, 0.5)], settings.objective)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    assert np.isfinite(table["val_loss"])


def test_a_checkpoint_of_a_gpu_goes_on() -> None:
    with fake_cuda():
        network = network_of("paper")
        trainer = Trainer(network, TrainingSettings(together=True), "cuda")
        trainer.step([training_pair("paper", network)])
        state = trainer.state()
        again = Trainer(network_of("paper"), TrainingSettings(together=True), "cuda")
        again.load_state(state)
        assert again.step_number == 1


def test_every_process_of_torchrun_has_its_own_gpu(monkeypatch) -> None:
    assert own_device("cuda") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device("cuda") == "cuda:3"
    assert own_device("cuda:1") == "cuda:1"
    assert own_device("cpu") == "cpu"
