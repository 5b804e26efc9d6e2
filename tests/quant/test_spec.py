import pytest
import torch

from qrt.errors import ConfigError
from qrt.quant.spec import Granularity, QuantSpec, TensorSpec


@pytest.mark.parametrize("bits", range(2, 9))
def test_levels_and_midpoint(bits):
    spec = QuantSpec(bits, symmetric=True, granularity=Granularity.CHANNEL)
    assert spec.levels == 2**bits
    assert spec.midpoint == 2**bits / 2


@pytest.mark.parametrize("bits", [-1, 0, 1, 9, 16])
def test_bits_out_of_range(bits):
    with pytest.raises(ConfigError, match=f"bits: expected 2 to 8, got {bits}"):
        QuantSpec(bits, symmetric=True, granularity=Granularity.CHANNEL)


@pytest.mark.parametrize(
    "granularity, group_size",
    [(Granularity.GROUP, None), (Granularity.CHANNEL, 128), (Granularity.GROUP, 0)],
)
def test_group_size_goes_with_groups(granularity, group_size):
    with pytest.raises(ConfigError, match="group_size"):
        QuantSpec(4, symmetric=True, granularity=granularity, group_size=group_size)


def test_group_of():
    grouped = QuantSpec(4, symmetric=False, granularity=Granularity.GROUP, group_size=128)
    assert grouped.group_of(4096) == 128
    assert QuantSpec(8, symmetric=True, granularity=Granularity.CHANNEL).group_of(4097) == 4097


def test_group_that_does_not_divide_names_one_that_does():
    grouped = QuantSpec(4, symmetric=False, granularity=Granularity.GROUP, group_size=128)
    with pytest.raises(ConfigError, match=r"group size 128 does not divide 1376 .*e\.g\. 32.*--ignore"):
        grouped.group_of(1376)  # 43 * 32


@pytest.mark.parametrize("in_features", [336, 1360, 4095])
def test_indivisible_group_suggests_per_channel_scale(in_features):
    grouped = QuantSpec(4, symmetric=False, granularity=Granularity.GROUP, group_size=128)
    with pytest.raises(
        ConfigError, match=r"; use group size -1 \(one scale per channel\) or leave .* --ignore$"
    ):
        grouped.group_of(in_features)


def test_tensor_spec():
    spec = TensorSpec((3, 5), torch.int16)
    made = spec.zeros("cpu")
    assert spec.num_bytes == 30 == made.numel() * made.element_size()
    assert made.dtype == torch.int16 and not made.any()
