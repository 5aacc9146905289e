"""Videos: the frames that are taken, sizes, patches, times, text and positions as those of
transformers (tests/golden/videos.npz, which `tests/golden/make_golden.py spans` makes, and
clips.npz, which make_golden_clips.py makes).
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

import jpaged
from jpaged import EmbeddingSpan, EngineConfig, RequestError, SamplingParams, UnsupportedError
from jpaged.engine.spans import rows_of
from jpaged.errors import ConfigError
from jpaged.images.limits import DEFAULT_LIMITS
from jpaged.images.prepare import ImagePreparer
from jpaged.images.videos import (
    PreparedVideo,
    Video,
    VideoPreparer,
    open_video,
    resized_frames,
)
from jpaged.models.embedded import Embedded
from jpaged.models.forward import bind
from jpaged.request.embeddings import spans_of
from jpaged.request.images import PromptImages, Sources
from tests.golden import make_golden_clips as clips
from tests.golden import make_golden_spans as made
from tests.images.test_prepare import image_of, settings_of, vision_of, write_settings
from tests.models.test_spans import name_and_params
from tests.models.test_vision import write

GOLDEN = Path(__file__).parents[1] / "golden"
STORED = np.load(GOLDEN / "videos.npz", allow_pickle=False)
CLIPS = np.load(GOLDEN / "clips.npz", allow_pickle=False)
FRAMES = list(STORED["frames"])
VIDEO = {"size": {"shortest_edge": 64, "longest_edge": 10_000}}
WORDS = [f"w{i}" for i in range(16)]
WORDS += ["<pad>", "<image>", "<begin>", "<stop>", "<video>", "seconds", "?", "end"]


def preparer_of(name: str, folder: Path, **changes: Any) -> ImagePreparer:
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO | changes))
    return ImagePreparer(write_settings(name, folder), vision_of(name))


def whole(fps: float, frames: Any = FRAMES) -> Video:
    """All of some frames."""
    return Video(source=frames, do_sample_frames=False, video_metadata={"fps": fps})


def prepare_video(preparer: ImagePreparer, video: Video) -> PreparedVideo:
    videos, frames = VideoPreparer(preparer), open_video(video, DEFAULT_LIMITS)
    return videos.prepare(frames, videos.plan(frames, video))


def reader_of(preparer: ImagePreparer) -> PromptImages:
    config = EngineConfig(max_model_len=256)
    return PromptImages(preparer.folder, preparer.config, config, most=64)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Marks are the ids of tests/golden/towers.py; all else of a time is one unknown word."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    made.add_special_tokens(["<image>", "<begin>", "<stop>", "<video>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_patches_and_times(name: str, tmp_path: Path) -> None:
    """Two frames a patch, the last of five twice; numbers are those of the frames."""
    preparer = preparer_of(name, tmp_path)
    video = prepare_video(preparer, whole(2.0))
    patches = np.concatenate([piece.patches for piece in video.pieces])
    mean, std = (np.array(settings_of(name)[f"image_{x}"])[:, None] for x in ("mean", "std"))
    numbers = (patches.reshape(len(patches), 3, -1) * std + mean) * 255
    expected = STORED["patches"].reshape(numbers.shape)
    np.testing.assert_array_equal(np.round(numbers), expected)
    frames, rows, columns = STORED["grid"]
    if name == "qwen2_5_vl":
        (piece,) = video.pieces
        assert piece.grid == (frames, rows, columns) and video.times is None
        assert piece.time_interval == 4.0  # tokens a second, of a second a pair
    else:
        assert [piece.grid for piece in video.pieces] == [(1, rows, columns)] * frames
        assert {piece.time_interval for piece in video.pieces} == {1.0}
        np.testing.assert_array_equal(video.times, STORED["times"])
    assert len({piece.digest for piece in video.pieces}) == len(video.pieces)
    slower = prepare_video(preparer, whole(1.0)).pieces[0]
    assert (slower.digest == video.pieces[0].digest) == (name != "qwen2_5_vl")


def test_sizes_are_those_of_transformers() -> None:
    for (count, height, width), expected in zip(STORED["sizes"], STORED["resized"], strict=True):
        size = resized_frames(count, height, width, factor=32, frames=2, least=4096, most=196608)
        assert size == tuple(expected)
    with pytest.raises(RequestError, match="one side is over 200 times the other"):
        resized_frames(2, 4000, 9, factor=4, frames=2, least=64, most=10**6)


def test_text_is_that_of_transformers(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    vision: Any = vision_of("qwen3_vl")
    reader = reader_of(preparer_of("qwen3_vl", tmp_path))
    read = reader.read(Sources(videos=[whole(3.0)]))
    metadata = SimpleNamespace(fps=3.0, frames_indices=list(range(5)))
    processor: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<begin>",
        vision_end_token="<stop>",
        video_token="<video>",
        _calculate_timestamps=lambda *x: Qwen3VLProcessor._calculate_timestamps(None, *x),  # pyright: ignore[reportArgumentType]
    )
    told = {"video_grid_thw": STORED["grid"][None], "video_metadata": [metadata]}
    text = Qwen3VLProcessor.replace_video_token(processor, told, 0)
    wanted = tokenizer.encode(f"w3 <begin>{text}<stop> w5", add_special_tokens=False)
    written = reader.in_text("w3 <begin><video><stop> w5", read, tokenizer)
    assert tokenizer.encode(written, add_special_tokens=False) == wanted
    begun = tokenizer.encode("w3 <begin><video><stop> w5", add_special_tokens=False)
    for ids in (begun, wanted):  # also where they are told already
        placed, spans = reader.placed(ids, read, tokenizer)
        assert placed == wanted
        assert wanted.count(vision.video_token) == sum(map(reader.rows, read.pieces))
        for start, span in spans.items():
            count = reader.rows(span.embeddings)
            assert wanted[start : start + count] == [vision.video_token] * count
    reader.close()


@pytest.mark.parametrize("name", clips.NAMES)
def test_frames_that_are_taken_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    preparer = VideoPreparer(preparer_of(name, tmp_path, do_sample_frames=True))
    for i, (total, fps, rate, count) in enumerate(clips.SAMPLED):
        if name == "qwen2_5_vl" and rate is None and count is None:
            rate = 2.0
        taken = preparer._sampled(total, fps, Video(source=[], fps=rate, num_frames=count))
        assert taken == CLIPS[f"{name}/{i}"].tolist(), clips.SAMPLED[i]


@pytest.mark.parametrize("name", clips.NAMES)
@pytest.mark.parametrize("capped", [False, True])
def test_a_video_is_that_of_transformers(name: str, capped: bool, tmp_path: Path) -> None:
    """From the frames on: those taken, resized, as patches."""
    settings = settings_of(name) | {key: clips.SETTINGS[key] for key in ("image_mean", "image_std")}
    images = write_settings(name, tmp_path)
    (images / "preprocessor_config.json").write_text(json.dumps(settings))
    told = clips.SETTINGS | {"cap_pixels_per_frame": capped}
    (images / "video_preprocessor_config.json").write_text(json.dumps(told))
    preparer = VideoPreparer(ImagePreparer(images, vision_of(name)))
    video = Video(source=clips.clip(), fps=2.0, video_metadata={"fps": clips.CLIP_FPS})
    frames = open_video(video, DEFAULT_LIMITS)
    plan = preparer.plan(frames, video)
    key = f"{name}/capped" if capped else name
    assert list(plan.numbers) == CLIPS[f"{key}/taken"].tolist()
    made = preparer.prepare(frames, plan)
    patches = np.concatenate([piece.patches for piece in made.pieces])
    frames_, rows, columns = CLIPS[f"{key}/grid"]
    assert {(g.h, g.w) for g in plan.grids} == {(rows, columns)}
    assert sum(g.t for g in plan.grids) == frames_
    np.testing.assert_allclose(patches, CLIPS[f"{key}/patches"], atol=2e-6)
    if name == "qwen2_5_vl":
        seconds = 2 / float(CLIPS[f"{key}/sampled_fps"])
        assert plan.interval == pytest.approx(4 * seconds, rel=1e-6)


@pytest.mark.parametrize("name", made.VIDEOS)
def test_positions_and_logits(name: str, tmp_path: Path) -> None:
    """Seconds show on the time axis of Qwen2.5-VL."""
    _, params = name_and_params(name, tmp_path)
    grids, length = made.VIDEOS[name], made.VIDEO_TOKENS
    interval = 4 * made.SECONDS if name.startswith("qwen2_5") else 1.0
    embeddings = {}
    for start, grid in grids.items():
        rows, extra = made.rows_of(name, "video", start, grid, made.SPANNED[name])
        deep = extra if len(extra) else None
        embeddings[start] = EmbeddingSpan(rows, grid=grid, deepstack=deep, time_interval=interval)
    spans = spans_of(embeddings, length, params.config)
    assert spans is not None and spans.positions is not None
    expected = STORED[f"{name}/positions"]
    np.testing.assert_array_equal(spans.positions, expected)
    assert spans.offset == expected.max() + 1 - length
    rows = rows_of(list(spans.pieces(0, length)), params.config.num_deepstack, np.float32)
    row = np.full((1, length), -1, np.int32)
    row[0, np.concatenate([np.arange(s.start, s.end) for s in spans])] = range(len(rows))
    forward = bind(params.config, dict(params))
    embedded = Embedded(row=jnp.asarray(row), rows=jnp.asarray(rows))
    ids = jnp.asarray(STORED[f"{name}/token_ids"])[None]
    hidden, _ = forward(ids, embedded=embedded, axes=jnp.asarray(spans.positions)[:, None])
    logits = forward.logits(hidden)[0, -6:]
    assert np.abs(np.asarray(logits) - STORED[f"{name}/logits"]).max() < 1e-4


def test_a_video_is_served_and_trained(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The engine encodes it, other times are another prompt, and a trainer's logprobs are those of
    the rollout.
    """
    write("qwen2_5_vl", tmp_path)
    preparer = preparer_of("qwen2_5_vl", tmp_path)
    assert preparer.max_rows is None
    params = jpaged.load_params(tmp_path, images=True)
    engine = EngineConfig(
        max_model_len=64,
        max_num_seqs=8,
        seq_buckets=(8,),
        max_num_batched_tokens=64,
        token_buckets=(64,),
        num_blocks=64,
        block_size=8,
        images=True,
    )
    text, picture = "w3 <begin><image><stop> w1 <begin><video><stop> w5", image_of(16, 24)
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompts: list[Any] = [
        {
            "prompt_token_ids": ids,
            "images": [picture],
            "videos": [
                {"video": FRAMES, "do_sample_frames": False, "video_metadata": {"fps": fps}}
            ],
        }
        for fps in (1.0, 4.0)
    ]
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, seed=1, logprobs_mode="tempered")
    outs = jpaged.generate(params, prompts, sampling, engine_config=engine)
    arrays = jpaged.to_arrays(outs)
    assert np.abs(arrays["logprobs"][0] - arrays["logprobs"][1]).max() > 1e-3
    logprobs = jpaged.logprobs(params, arrays, images=jpaged.image_arrays(params, outs))
    np.testing.assert_allclose(logprobs, arrays["logprobs"], atol=2e-5)
    jpaged.release(compiled=True)


def test_what_cannot_be_taken_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    preparer = preparer_of("qwen3_vl", tmp_path)

    def refused(said: str, **options: Any) -> None:
        with pytest.raises(RequestError, match=said):
            prepare_video(preparer, Video(**dict[str, Any]({"source": FRAMES} | options)))

    for fps in (0, -1.0, float("inf"), True, "2"):
        refused("fps=.*: must be a number of frames a second", fps=fps)
        refused("fps of video_metadata=.*: must be a number", video_metadata={"fps": fps})
    refused("pass one of them", fps=1.0, num_frames=2)
    refused("num_frames=0: must be from 1 to 65536", num_frames=0)
    refused("1 frames: a video has at least 2", source=FRAMES[:1])
    refused("a video of no frames", source=[])
    refused("a video of type int: pass a file", source=5)
    refused("an array of 3 axes: pass a file", source=FRAMES[0])
    several = [FRAMES[0], FRAMES[0], image_of(8, 8)]
    refused("frames of several sizes in one video", source=several, do_sample_frames=False)
    refused("must be integers in order", video_metadata={"frames_indices": [3, 1]})
    refused("2 frames_indices in video_metadata of 5", video_metadata={"frames_indices": [1, 3]})
    refused("must be a dict of fps, frames_indices", video_metadata={"width": 4})
    with pytest.raises(RequestError, match="a video with speed: pass 'video' and any of fps"):
        Video.of({"video": FRAMES, "speed": 2})
    reader = reader_of(preparer)
    read = reader.read(Sources(videos=[whole(1.0)]))
    with pytest.raises(RequestError, match="0 of the placeholder <video>, and 1 videos were"):
        reader.in_text("w3", read, tokenizer)
    with pytest.raises(RequestError, match="0 of the placeholder 20, and 1 videos were"):
        reader.placed([3], read, tokenizer)
    reader.close()
    with pytest.raises(ConfigError, match=r"patch_size=3 is not 4, which images have"):
        VideoPreparer(preparer_of("qwen3_vl", tmp_path, patch_size=3))
    gemma = ImagePreparer(write_settings("gemma3", tmp_path), vision_of("gemma3"))
    with pytest.raises(UnsupportedError, match="a Siglip vision tower: pass frames as images"):
        VideoPreparer(gemma)
    _, config = tmp_path, vision_of("qwen2_5_vl")
    model = jpaged.ModelConfig.from_hf(made.SPANNED["qwen2_5_vl_g2_d32"])
    span = EmbeddingSpan(np.zeros((2, model.hidden_size), np.float32), time_interval=-1.0)
    with pytest.raises(RequestError, match=r"time_interval=-1.0 of embeddings at 0: must be"):
        spans_of({0: span}, 4, model)
    assert config.on_axes
