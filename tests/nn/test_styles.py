"""Layer styles: what stands between linear layers, and how weights begin."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from rl_lab.errors import ConfigError
from rl_lab.nn.layers import MLP, Head, NormedLinear
from rl_lab.nn.styles import LayerStyle, layer_style


def test_a_style_by_name_by_settings_and_by_default() -> None:
    """Settings start from DreamerV3's style, or from the one that `like` names."""
    assert layer_style(None) == layer_style("dreamer_v3") == LayerStyle()
    own = layer_style({"activation": "mish", "norm": "layer", "eps": 1e-5})
    assert (own.activation, own.norm, own.norm_eps, own.init) == ("mish", "layer", 1e-5, "fan_in")
    assert layer_style({"like": "dreamer_v2", "norm": "layer"}).activation == "elu"


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("dreamer_v4", "dreamer_v"), ({"norm": "lyer"}, "layer"), ({"activaton": "elu"}, "activation")],
)
def test_a_wrong_style_is_named(wrong, hint: str) -> None:
    """With what is meant."""
    with pytest.raises(ConfigError, match=hint):
        layer_style(wrong)


def test_layer_norm_has_no_bias_before_it_in_the_form_of_2023() -> None:
    """SiLU(LayerNorm(W x)), eps 1e-3; without a norm the bias is there whatever the style says."""
    layer, x = NormedLinear(6, 5, style=layer_style("dreamer_v3_2023")), torch.randn(3, 6)
    assert layer.linear.bias is None
    expected = F.silu(F.layer_norm(x @ layer.linear.weight.T, (5,), eps=1e-3))
    torch.testing.assert_close(layer(x), expected)
    assert NormedLinear(6, 5, style=LayerStyle(norm="none", bias=False)).linear.bias is not None


def test_weights_of_older_styles() -> None:
    """Glorot-uniform; in 2023 a truncated normal inside, with the mean of both fans, and uniform outputs whose
    variance is scaled."""
    glorot = MLP(300, 500, 1, style=layer_style("dreamer_v2"))[0].linear.weight
    assert glorot.abs().max().item() == pytest.approx(math.sqrt(6.0 / 800.0), rel=0.01)
    head = Head(300, 500, units=300, layers=1, outscale=0.25, style=layer_style("dreamer_v3_2023"))
    inside, outside = head.trunk[0].linear.weight, head.outputs[0].weight
    assert inside.std().item() == pytest.approx(math.sqrt(1.0 / 300.0), rel=0.02)
    assert inside.abs().max().item() <= 2.0 * 1.1369 * math.sqrt(1.0 / 300.0)
    assert outside.abs().max().item() == pytest.approx(math.sqrt(0.25 * 6.0 / 800.0), rel=0.01)
