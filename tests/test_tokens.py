"""Files of token ids: what is written is read, a window at a time, and bad files say what they are."""

import pickle

import numpy as np
import pytest

from fp8jax.train import TokenFile, write_tokens
from fp8jax.train.data import tokens

IDS = np.arange(1000) * 7 % 601


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        IDS.tolist(),
        (int(i) for i in IDS),
        [IDS[:10], 70, IDS[11:500].tolist(), [], *IDS[500:998], IDS[998:]],  # documents, and ids between them
    ],
    ids=["array", "list", "generator", "documents"],
)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_ids_come_back(tmp_path, monkeypatch, given, dtype):
    monkeypatch.setattr(tokens, "_CHUNK", 64)
    path = tmp_path / "ids.npy"
    if not isinstance(given, (list, np.ndarray)):
        given = (int(i) for i in IDS)  # one generator serves one test
    assert write_tokens(path, given, dtype) == 1000
    kept = np.load(path)
    assert kept.dtype == dtype
    np.testing.assert_array_equal(kept, IDS)
    assert [p.name for p in tmp_path.iterdir()] == ["ids.npy"]


def test_the_header_has_room_for_any_length(tmp_path):
    lengths = []
    for count in (0, 10**15):
        with open(tmp_path / "header", "wb") as file:
            tokens._write_header(file, np.dtype("<u2"), count)
            lengths.append(file.tell())
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("name, dtype", [("ids.npy", None), ("ids.npy", np.uint16), ("ids.bin", np.uint16)])
def test_windows_stand_side_by_side(tmp_path, name, dtype):
    path = tmp_path / name
    write_tokens(path, IDS) if name.endswith("npy") else IDS.astype("<u2").tofile(path)  # as nanoGPT does it
    windows = TokenFile(path, 30, dtype=dtype, vocabulary=601)
    assert len(windows) == 33 == len(list(windows))
    for i, window in enumerate(windows):
        assert window.dtype == np.int32
        np.testing.assert_array_equal(window, IDS[30 * i : 30 * i + 31])
    np.testing.assert_array_equal(windows[-1], windows[np.int64(32)])


@pytest.mark.parametrize("count, windows", [(31, 1), (60, 1), (61, 2)])
def test_every_token_but_the_first_is_a_target_once(tmp_path, count, windows):
    write_tokens(tmp_path / "ids.npy", IDS[:count])
    found = TokenFile(tmp_path / "ids.npy", 30)
    assert len(found) == windows
    np.testing.assert_array_equal(np.concatenate([w[1:] for w in found]), IDS[1 : 30 * windows + 1])


def test_no_data_is_pickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokens("ids.npy", np.tile(IDS, 100))
    content = pickle.dumps(TokenFile("ids.npy", 30, dtype=np.uint16, vocabulary=601))
    assert len(content) < 1000
    monkeypatch.chdir("/")
    copy = pickle.loads(content)
    np.testing.assert_array_equal(copy[3], IDS[90:121])
    assert isinstance(copy.tokens, np.memmap) and (copy.context, copy.vocabulary) == (30, 601)


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    write_tokens(tmp_path / "ids.npy", IDS)
    with pytest.raises(ValueError):
        write_tokens(tmp_path / "ids.npy", [1, 2, 70_000])
    assert len(np.load(tmp_path / "ids.npy")) == 1000
    assert [p.name for p in tmp_path.iterdir()] == ["ids.npy"]


@pytest.mark.parametrize(
    "given, options, error, says",
    [
        ([1, 65_536], {}, ValueError, "token 1 is 65536, and ids must be at least 0 and below 65536"),
        ([[3], [4, -1]], {}, ValueError, "token 2 is -1"),
        ([2**31], {"dtype": np.uint32}, ValueError, "below 2147483648"),
        ([5, 9], {"vocabulary": 9}, ValueError, "token 1 is 9, and ids must be at least 0 and below 9"),
        ([0.5], {}, TypeError, "`tokens` must be whole numbers, or arrays of them; got float64"),
        (["ab"], {}, TypeError, "must be whole numbers"),
        ([1], {"dtype": np.int32}, ValueError, "`dtype` must be np.uint16 or np.uint32"),
    ],
)
def test_what_cannot_be_written(tmp_path, given, options, error, says):
    with pytest.raises(error) as caught:
        write_tokens(tmp_path / "ids.npy", given, **options)
    assert says in str(caught.value)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "name, prepare, options, says",
    [
        ("none.npy", None, {}, "cannot be read (No such file or directory); `write_tokens` makes"),
        ("raw.bin", lambda path: IDS.astype("<u2").tofile(path), {}, "does not say what its ids are"),
        (
            "raw.bin",
            lambda path: path.write_bytes(b"abc"),
            {"dtype": np.uint16},
            "3 bytes, no multiple of the 2",
        ),
        ("raw.bin", lambda path: path.write_bytes(b""), {"dtype": np.uint16}, "has 0 tokens"),
        ("ids.npy", lambda path: (write_tokens(path, IDS), cut(path)), {}, "is cut off or damaged"),
        (
            "ids.npy",
            lambda path: np.save(path, IDS),
            {},
            "must hold uint16 or uint32 of shape (tokens,); got int64",
        ),
        ("ids.npy", lambda path: np.save(path, np.ones((2, 9), np.uint16)), {}, "uint16 of shape (2, 9)"),
        ("ids.npy", lambda path: write_tokens(path, IDS), {"dtype": np.uint32}, "and `dtype` is uint32"),
        (
            "ids.npy",
            lambda path: write_tokens(path, IDS[:9]),
            {},
            "has 9 tokens, and a window with `context` 9",
        ),
        (
            "ids.npy",
            lambda path: write_tokens(path, IDS),
            {"context": 0},
            "`context` must be at least 1; got 0",
        ),
    ],
)
def test_bad_files_say_what_they_are(tmp_path, name, prepare, options, says):
    if prepare is not None:
        prepare(tmp_path / name)
    with pytest.raises(ValueError) as caught:
        TokenFile(tmp_path / name, **{"context": 9, **options})
    assert says in str(caught.value)


@pytest.mark.parametrize("magic, kind", [(20240520, "uint16"), (20240801, "uint32")])
def test_a_file_of_llm_c_has_a_header(tmp_path, magic, kind):
    """Read as ids, it would be 512 of them; the message says how to leave it out."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(IDS)
    path = tmp_path / "train.bin"
    path.write_bytes(header.tobytes() + np.asarray(IDS, kind).tobytes())
    with pytest.raises(ValueError) as caught:
        TokenFile(path, 9, dtype=kind)
    message, command, _ = str(caught.value).split("`")
    assert message.startswith(f"{path} begins with llm.c's header of 1,024 bytes") and "\n" not in message
    new = tmp_path / "new.npy"
    eval(command, {"write_tokens": write_tokens, "np": np, "path": path, "new": new})
    np.testing.assert_array_equal(TokenFile(new, 9)[0], IDS[:10])


def test_an_id_out_of_the_vocabulary_is_found_where_it_is_read(tmp_path):
    write_tokens(tmp_path / "ids.npy", [0, 1, 2, 3, 9, 5, 6], dtype=np.uint32)
    windows = TokenFile(tmp_path / "ids.npy", 3, vocabulary=9)
    np.testing.assert_array_equal(windows[0], [0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"ids.npy: token 4 is 9, and ids must be at least 0 and below 9"):
        windows[1]
    with pytest.raises(IndexError):
        windows[2]
