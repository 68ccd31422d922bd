from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from rl_lab.metrics.illustrations import HEAD, TOP, write_illustrations
from rl_lab.metrics.imagination import write_imagination
from rl_lab.metrics.imagination_images import chosen_steps, image_video, step_label
from rl_lab.records import Illustration, ImaginedRollout

BATCH, STEPS, CONTEXT = 3, 9, 4


def rollout(real: dict[str, np.ndarray], imagined: dict[str, np.ndarray]) -> ImaginedRollout:
    reward = np.ones((BATCH, STEPS), np.float32)
    return ImaginedRollout(CONTEXT, real, imagined, reward, reward + 0.5, np.full((BATCH, STEPS), 0.9))


def images(channels: int = 3, size: int = 16) -> np.ndarray:
    shape = (BATCH, STEPS, size, size, channels)
    return np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)


def vectors(size: int = 4) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(BATCH, STEPS, size)).cumsum(1).astype(np.float32)


def numbers(folder):
    return json.loads((folder / "imagination.json").read_text())


def test_image_rollout(tmp_path):
    """Images give a picture strip, a film, an error chart and the numbers; a perfect prediction has no error."""
    real = images()
    files = write_imagination(rollout({"image": real}, {"image": real.astype(np.float32) / 255}), tmp_path, fps=8)
    names = [path.name for path in files]
    assert names == ["picture.png", "video.mp4", "errors.png", "imagination.json"]
    assert all(0 < path.stat().st_size < 2_000_000 for path in files)
    entry = numbers(tmp_path)["keys"]["image"]
    assert entry["error_mean"] == pytest.approx(0.0, abs=1e-6)
    assert entry["baseline_mean"] > 0.1


def test_vector_errors_by_hand(tmp_path):
    """The error of a step is the RMSE over sequences and entries; the baseline repeats the last observation."""
    real = vectors()
    imagined = real.copy()
    imagined[:, CONTEXT:] += 2.0
    write_imagination(rollout({"vector": real}, {"vector": imagined}), tmp_path, fps=8)
    entry = numbers(tmp_path)["keys"]["vector"]
    np.testing.assert_allclose(entry["error"], [0.0] * CONTEXT + [2.0] * (STEPS - CONTEXT), atol=1e-5)
    still = np.sqrt(np.square(real[:, -1].astype(np.float64) - real[:, CONTEXT - 1]).mean())
    assert entry["baseline"][-1] == pytest.approx(still, rel=1e-6)
    assert entry["steps_better"] == sum(baseline > 2.0 for baseline in entry["baseline"][CONTEXT:])
    reward = numbers(tmp_path)["reward"]
    assert reward["error_mean"] == pytest.approx(0.5)
    assert reward["real_sum_mean"] == STEPS - CONTEXT


def test_dict_rollout_draws_every_key(tmp_path):
    """The image leads; other keys have files of their own; what cannot be compared is named with the reason."""
    real = {"state/a b": vectors(), "image": images(1), "direction": vectors(1), "unseen": vectors(2)}
    imagined = {"state/a b": vectors(), "image": images(1), "direction": vectors(4)}
    files = {path.name for path in write_imagination(rollout(real, imagined), tmp_path, fps=8)}
    assert {"picture.png", "video.mp4", "picture-state_a_b.png", "video-state_a_b.mp4"} <= files
    found = numbers(tmp_path)
    assert found["keys"]["image"]["picture"] == "picture.png"
    assert set(found["skipped"]) == {"direction", "unseen"}
    assert "[3, 9, 4]" in found["skipped"]["direction"]


@pytest.mark.parametrize("channels", [1, 4, 9])
def test_frame_stacks_show_the_newest_frame(channels):
    """Stacked frames are drawn as the last one of the stack; older ones change nothing."""
    real = images(channels, 8)[:1, :3]
    older = real.copy()
    older[..., : channels - (3 if channels == 9 else 1)] = 0
    frames = image_video(real, older, 1)
    assert frames.shape[-1] == 3
    np.testing.assert_array_equal(frames, image_video(real, real, 1))


def test_predictions_that_are_not_finite(tmp_path):
    """A model that blew up still gets its pictures and a valid JSON file."""
    real, imagined = vectors(2), vectors(2)
    imagined[:, -2:] = np.nan
    write_imagination(rollout({"vector": real}, {"vector": imagined}), tmp_path, fps=8)
    assert numbers(tmp_path)["keys"]["vector"]["error"][-1] is None


def test_strip_shows_where_observing_ends():
    """The last observed steps come first, then imagined ones from the first to the last."""
    steps = chosen_steps(64, 5)
    assert steps[:4] == [2, 3, 4, 5]
    assert steps[-1] == 63
    assert [step_label(step, 5) for step in (3, 4, 5, 63)] == ["\N{MINUS SIGN}1", "last seen", "+1", "+59"]


def test_context_must_leave_something_to_imagine(tmp_path):
    """A context as long as the rollout is refused."""
    reward = np.zeros((1, 4))
    with pytest.raises(ValueError, match="context is 4"):
        write_imagination(ImaginedRollout(4, {}, {}, reward, reward), tmp_path, fps=8)


def test_columns_are_labelled_where_they_have_labels(tmp_path):
    """The labels have a line of their own above the images, which keep their order below it."""
    rows = [("z0", np.zeros((2, 16, 16, 3), np.uint8))]
    plain = Illustration("plain", "A title", "", rows)
    labelled = Illustration("labelled", "A title", "", rows, columns=("-3.0", "3.0"))
    write_illustrations([plain, labelled], tmp_path)
    without, heads = (
        np.asarray(Image.open(tmp_path / f"{item.name}.png").convert("RGB")) for item in (plain, labelled)
    )
    np.testing.assert_array_equal(heads[TOP + HEAD :], without[TOP:])
    assert (heads[TOP : TOP + HEAD] < 128).any()


def test_a_model_without_rewards_says_nothing_of_them(tmp_path):
    """Neither a number nor a panel of the chart."""
    real = vectors()
    with_rewards = rollout({"vector": real}, {"vector": real})
    write_imagination(with_rewards, tmp_path / "with", fps=8)
    write_imagination(replace(with_rewards, imagined_reward=None), tmp_path / "without", fps=8)
    assert "reward" in numbers(tmp_path / "with")
    assert "reward" not in numbers(tmp_path / "without")
    three, two = (Image.open(tmp_path / name / "errors.png").width for name in ("with", "without"))
    assert two < three  # panels
