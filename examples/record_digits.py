"""Train a small spiking network on scikit-learn's digits and record its first layer's spikes for ``--spikes``.

    python examples/record_digits.py digits.npz
    spikemark run --spikes digits.npz

Shows the layers in use (``SrmConv2d``, ``AdjustedAvgPool2d``, ``SrmLinear``, ``spike_count``) and leaves a recording of
trained activity: array ``spikes``, bool, [B, T, C, H, W]. Takes a few seconds; needs ``pip install spikemark[digits]``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from spikemark import kernels
from torch import Tensor, nn

PARAMS = kernels.SrmParams(tau_m=7, tau_s=4, tau_g=3.5)
BATCH = 64
TRAINED = 1024  # images; the rest of the 1797 tell how well it generalises


def spike_trains(images: Tensor, steps: int, generator: torch.Generator) -> Tensor:
    """Images [N, 1, 8, 8] of brightness 0..1 as 0/1 spikes [N, steps, 1, 8, 8]: a pixel fires at 0.8 its brightness."""
    noise = torch.rand((images.shape[0], steps, *images.shape[1:]), generator=generator)
    return (noise < 0.8 * images[:, None]).float()


def make_network(neuron: str, channels: int = 16) -> nn.Sequential:
    """Convolution, pool, linear layer; the first module is what is recorded."""
    network = nn.Sequential(
        kernels.SrmConv2d(1, channels, 3, padding=1, params=PARAMS, neuron=neuron, conv_backward="aten"),
        kernels.AdjustedAvgPool2d(2),
        nn.Flatten(2),
        kernels.SrmLinear(channels * 16, 10, params=PARAMS, neuron=neuron),
    )
    with torch.no_grad():
        # An output that never fires has no spike whose time could be learnt, so let all of them fire at first.
        network[3].weight += 0.5 * network[3].weight.std()
    return network


def train(network: nn.Sequential, images: Tensor, labels: Tensor, steps: int, epochs: int, seed: int) -> None:
    """Cross entropy on spike counts, Adam, new random spike trains in every batch."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=0.03)
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=generator).split(BATCH):
            count = kernels.spike_count(network(spike_trains(images[batch], steps, generator)))
            optimiser.zero_grad()
            nn.functional.cross_entropy(count, labels[batch]).backward()
            optimiser.step()


def accuracy(network: nn.Sequential, images: Tensor, labels: Tensor, steps: int, seed: int) -> float:
    """Fraction of images whose own class fires most."""
    with torch.no_grad():
        count = network(spike_trains(images, steps, torch.Generator().manual_seed(seed))).sum(1)
    return float((count.argmax(1) == labels).float().mean())


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 if the file was written, 2 with one line on stderr if something is missing or wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="the .npz file to write")
    parser.add_argument("--images", type=int, default=32, help="images to record (default 32)")
    parser.add_argument("--steps", type=int, default=12, help="time steps (default 12)")
    parser.add_argument("--epochs", type=int, default=6, help="times to see the training images (default 6)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if min(options.images, options.steps) < 1 or options.epochs < 0:
        parser.error("--images and --steps must be at least 1, --epochs at least 0")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        print("scikit-learn is not installed: pip install spikemark[digits]", file=sys.stderr)
        return 2
    if not options.out.parent.is_dir():
        print(f"{options.out.parent} is no folder to write {options.out.name} into", file=sys.stderr)
        return 2
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    native = kernels.get("srm_neuron", "native")
    neuron = "native" if native.available else "torch_eager"
    torch.manual_seed(options.seed)
    network = make_network(neuron)
    train(network, images[:TRAINED], labels[:TRAINED], options.steps, options.epochs, options.seed)
    right = accuracy(network, images[TRAINED:], labels[TRAINED:], options.steps, options.seed)
    held_out = spike_trains(
        images[TRAINED : TRAINED + options.images], options.steps, torch.Generator().manual_seed(options.seed)
    )
    with torch.no_grad():
        spikes = network[0](held_out).bool().numpy()
    try:
        with options.out.open("wb") as file:
            np.savez_compressed(file, spikes=spikes)
    except OSError as error:
        print(f"cannot write {options.out}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"trained with the {neuron} neuron: {right:.0%} of {len(images) - TRAINED} unseen digits right")
    print(f"wrote {options.out}: spikes {list(spikes.shape)} [B, T, C, H, W], {spikes.mean():.1%} of them 1")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are tiny: more threads would only wait for each other
    sys.exit(main())
