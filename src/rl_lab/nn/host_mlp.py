"""Small networks on the CPU, run by NumPy: there the number of calls is the cost, and NumPy's are the cheaper ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

HostActivation = Literal["tanh", "relu"]
HOST_ACTIVATIONS: tuple[HostActivation, ...] = get_args(HostActivation)
# Multiplications up to which NumPy's BLAS takes one thread. It spreads larger products over threads of its own, which
# torch's do not know of, so those are left to torch.
ONE_THREAD = 1 << 18
# Outputs of a layer from which torch's dearer calls pay: it adds and cuts off in fewer passes. NumPy's tanh is faster.
WIDE = 1 << 12

Array = np.ndarray


class Layer(NamedTuple):
    """Views of a layer's parameters, for NumPy and for torch."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"]
    transposed: Float[Tensor, "in out"]
    bias_tensor: Float[Tensor, " out"]


class HostMLP:
    """Linear → activation → … → Linear, forwards and backwards, on the memory of torch parameters.

    The parameters are a network's own, in host memory and float32: whatever changes their numbers is seen here.
    """

    def __init__(self, parameters: Sequence[Tensor], activation: HostActivation) -> None:
        self.parameters, self._is_tanh = tuple(parameters), activation == "tanh"
        self._places: list[int] = []
        self._layers: list[Layer] = []
        self._gradients: list[tuple[Tensor, Array]] = []

    def layers(self) -> list[Layer]:
        """Views of the parameters, made anew where an optimiser or a move gave these other memory."""
        places = [value.data_ptr() for value in self.parameters]
        if places != self._places:
            tensors = [value.detach() for value in self.parameters]
            pairs = zip(tensors[::2], tensors[1::2], strict=True)
            self._layers = [Layer(weight.numpy(), bias.numpy(), weight.t(), bias) for weight, bias in pairs]
            self._places = places
        return self._layers

    def forward(self, x: Float[Array, "batch in"]) -> tuple[Float[Array, "batch out"], list[Array]]:
        """The outputs, and the inputs of every layer, which `backward` needs."""
        *hidden, last = self.layers()
        inputs = [x]
        with np.errstate(all="ignore"):  # what is not finite is found, and named, where the loss is looked at
            for weight, bias, transposed, bias_tensor in hidden:
                if len(x) * len(bias) >= WIDE and not self._is_tanh:
                    x = torch.addmm(bias_tensor, torch.from_numpy(x), transposed).relu_().numpy()
                else:
                    x = _multiply(x, weight.T)
                    x += bias
                    x = np.tanh(x, out=x) if self._is_tanh else np.maximum(x, 0.0, out=x)
                inputs.append(x)
            out = _multiply(x, last.weight.T)
            out += last.bias
        return out, inputs

    def backward(self, slope: Float[Array, "batch out"], inputs: Sequence[Array]) -> None:
        """Set the gradients of the parameters, from the derivative by the outputs: what was there is overwritten."""
        layers = self.layers()
        gradients = self._gradient_arrays()
        ones = np.ones(len(slope), np.float32)
        with np.errstate(all="ignore"):
            for number in range(len(layers) - 1, -1, -1):
                before = inputs[number]
                _multiply(slope.T, before, out=gradients[2 * number])
                np.dot(ones, slope, out=gradients[2 * number + 1])  # a sum over the batch, by the fast way
                if number:
                    slope = _multiply(slope, layers[number].weight)
                    slope *= 1.0 - before * before if self._is_tanh else before > 0.0

    def _gradient_arrays(self) -> list[Array]:
        """The memory of the parameters' gradients, looked up anew only where they have other ones."""
        kept = self._gradients
        if len(kept) < len(self.parameters) or any(
            value.grad is not tensor for value, (tensor, _) in zip(self.parameters, kept, strict=True)
        ):
            for value in self.parameters:
                if value.grad is None:
                    value.grad = torch.empty_like(value)
            tensors = [value.grad for value in self.parameters if value.grad is not None]
            self._gradients = kept = [(tensor, tensor.numpy()) for tensor in tensors]
        return [array for _, array in kept]


def _multiply(left: Array, right: Array, out: Array | None = None) -> Array:
    rows, inner = left.shape
    if rows * inner * right.shape[1] <= ONE_THREAD:
        return np.dot(left, right, out=out)
    product = torch.mm(
        torch.from_numpy(left), torch.from_numpy(right), out=None if out is None else torch.from_numpy(out)
    )
    return product.numpy() if out is None else out
