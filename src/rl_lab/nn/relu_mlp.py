"""A multilayer perceptron whose derivative is written out: small networks cost their operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Backward = Callable[[Tensor], None]  # takes the derivative by the outputs and gives the parameters their gradients


class ReluMLP(nn.Module):
    """`hidden` layers of Linear → ReLU, then a linear output; torch's own initial weights.

    The same function as an nn.Sequential of these layers, and autograd works as with that.
    """

    def __init__(self, in_features: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        layers = [nn.Linear(*sizes) for sizes in pairwise([in_features, *hidden, outputs])]
        self.layers = nn.ModuleList(layers)
        self._pairs = [(layer.weight, layer.bias) for layer in layers]  # a module looks its parts up slowly

    def forward(self, x: Float[Tensor, "*lead in_features"]) -> Float[Tensor, "*lead outputs"]:
        *hidden, output = self._pairs
        for weight, bias in hidden:
            x = F.linear(x, weight, bias).relu_()
        return F.linear(x, *output)

    @torch.no_grad()
    def with_backward(self, x: Float[Tensor, "batch in_features"]) -> tuple[Float[Tensor, "batch outputs"], Backward]:
        """The outputs, and the backward pass without autograd, whose engine costs several times what it computes.

        It sets the gradients: what was there before is overwritten.
        """
        *hidden, output = self._pairs
        inputs = [x]
        for weight, bias in hidden:
            inputs.append(F.linear(inputs[-1], weight, bias).relu_())
        return F.linear(inputs[-1], *output), lambda slope: self._backward(inputs, slope)

    @torch.no_grad()
    def _backward(self, inputs: list[Tensor], slope: Tensor) -> None:
        for number in range(len(inputs) - 1, -1, -1):
            (weight, bias), seen = self._pairs[number], inputs[number]
            if weight.grad is None or bias.grad is None:
                weight.grad, bias.grad = torch.empty_like(weight), torch.empty_like(bias)
            torch.mm(slope.t(), seen, out=weight.grad)
            torch.sum(slope, 0, out=bias.grad)
            if number:
                slope = torch.ops.aten.threshold_backward(slope.mm(weight), seen, 0.0)
