"""float32 is float32 while measuring: TF32, torch's default on a GPU, would make the baseline incorrect."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from spikemark import kernels
from spikemark.kernels.definition import definition
from spikemark.kernels.types import ConvGeometry, Problem, SrmParams

PROBE = """
import json, torch
from spikemark.harness import environment, precision
torch.set_float32_matmul_precision("high")
torch.backends.cudnn.allow_tf32 = True
before = environment.switches()
precision.full_float32()
after = environment.switches()
print(json.dumps([[s["tf32"], s["matmul_precision"]] for s in (before, after)]))
"""


def test_the_switches_are_off_and_recorded() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert before == [{"matmul": True, "cudnn": True}, "high"]
    assert after == [{"matmul": False, "cudnn": False}, "highest"]


def tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to the 10 bits of mantissa that tensor cores read."""
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("phase", ["input", "weight"])
def test_why_the_gate_refuses_what_tf32_gives(phase: str) -> None:
    """The baseline on operands as TF32 reads them, summed in float32: what torch's default gives on a GPU."""
    operator = definition("conv_backward")
    shapes = (64, 16, 16), (64, 16, 16)
    problem = Problem("t", "conv", 2, 4, *shapes, SrmParams(7, 4, 3.5), ConvGeometry(padding=1), (3, 3), spike_rate=0.1)
    inputs = operator.make_inputs(problem, phase, torch.float32, "cpu", 0)
    reference, baseline = operator.reference(phase, inputs, problem), kernels.baseline("conv_backward")
    verdicts = []
    for change in (lambda t: t, tf32):
        inputs.tensors.update({name: change(tensor) for name, tensor in inputs.tensors.items()})
        bound = operator.bind(baseline, phase, inputs, problem)
        outputs = bound.outputs(bound.call(bound.prepare()))
        verdicts.append(operator.compare(phase, outputs, reference, inputs, problem))
    assert [v.ok for v in verdicts] == [True, False]
    assert verdicts[1].max_error > 100 * verdicts[0].max_error
