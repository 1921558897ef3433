"""Text as characters, and its windows."""

import os

import corpus
import numpy as np
import pytest

from fp8jax.train import Loader


def decode(text, tokens):
    return "".join(text.vocabulary[token] for token in tokens)


@pytest.mark.parametrize(
    "content, vocabulary",
    [
        (b"banana bandana", " abdn"),
        ("zürich\r\n".encode(), "\n\rchirzü"),
        (b"caf\xe9 \xff", " acf\xe9\xff"),  # no UTF-8: byte by byte
        ("𝔽ℙ8".encode(), "8ℙ𝔽"),
    ],
)
def test_text_round_trips(tmp_path, content, vocabulary):
    path = tmp_path / "text"
    path.write_bytes(content)
    text = corpus.load(str(path))
    assert text.vocabulary == vocabulary
    decoded = decode(text, text.train) + decode(text, text.validation)
    assert decoded.encode("utf-8" if b"\xff" not in content else "latin-1") == content
    assert len(text.train) == int(0.9 * len(decoded))


def test_standard_library_is_the_same_text_every_time():
    first, second = corpus.load(""), corpus.load("")
    np.testing.assert_array_equal(first.train, second.train)
    assert len(first.train) + len(first.validation) == corpus.LIBRARY_CHARACTERS
    assert set(first.vocabulary) <= {chr(c) for c in range(32, 127)} | {"\n", "\N{REPLACEMENT CHARACTER}"}
    assert len(first.vocabulary) >= 90
    assert "import " in decode(first, first.validation)


def test_the_program_writes_the_modules_of_packages_too(tmp_path, monkeypatch, capsys):
    """But not those that pip installed, and over no file."""
    for name, code in (("a.py", "a\n"), ("package/b.py", "\xe9b"), ("site-packages/c.py", "c")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    path = tmp_path / "library.txt"
    corpus.main([str(path)])
    assert path.read_text(encoding="utf-8") == "a\n\N{REPLACEMENT CHARACTER}b"
    with pytest.raises(SystemExit):
        corpus.main([str(tmp_path / "a.py")])
    assert "expected a new file" in capsys.readouterr().err and (tmp_path / "a.py").read_text() == "a\n"


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda path: None, "cannot be read (No such file or directory); give a text file"),
        (lambda path: path.mkdir(), "cannot be read"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"text\0" * 50), "is a binary file, or in UTF-16"),
        (lambda path: path.write_bytes(bytes(range(1, 256)) * 9), "is a binary file, or in UTF-16"),
        (lambda path: path.symlink_to("/dev/null"), "cannot be read (it is no file)"),
        (os.mkfifo, "cannot be read (it is no file); give a text file"),
    ],
)
def test_unreadable_text(tmp_path, make, says):
    path = tmp_path / "text"
    make(path)
    with pytest.raises(ValueError) as caught:
        corpus.load(str(path))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "size, context, too_short",
    [(9, 9, None), (10, 9, "training part has 90 characters"), (1, 10, "validation part has 10 characters")],
)
def test_too_short_text(tmp_path, size, context, too_short):
    path = tmp_path / "text"
    path.write_text("ab" * 50)
    text = corpus.load(str(path))
    if too_short is None:
        corpus.check_length(text, size, context)
        rows = corpus.RandomWindows(text.validation, context, size, steps=1, seed=0)
        assert rows.step(0).shape == (size, context + 1)
        return
    with pytest.raises(ValueError) as caught:
        corpus.check_length(text, size, context)
    assert too_short in str(caught.value) and "smaller --batch and --context" in str(caught.value)


def random_windows(tokens, seed=3, purpose="train", **changes):
    return corpus.RandomWindows(
        tokens, **{"context": 8, "batch": 64, "steps": 9, **changes}, seed=seed, purpose=purpose
    )


def test_random_windows():
    """They depend on the seed, the purpose and the step, and on nothing else."""
    rows = random_windows(np.arange(500, dtype=np.uint16))
    batch = rows.step(7)
    assert batch.shape == (64, 9) and batch.dtype == np.int32 and len(rows) == 64 * 9
    np.testing.assert_array_equal(batch - batch[:, :1], np.broadcast_to(np.arange(9), (64, 9)))
    assert batch.min() >= 0 and batch.max() <= 499
    again = random_windows(np.arange(500, dtype=np.uint16), steps=20)
    np.testing.assert_array_equal(batch, again.step(7))
    np.testing.assert_array_equal(batch[5], again[7 * 64 + 5])
    others = random_windows(np.arange(500), seed=4), random_windows(np.arange(500), purpose="validation")
    for other in (*(rows.step(7) for rows in others), rows.step(8)):
        assert not np.array_equal(batch, other)
    loader = Loader(rows, batch=64, seed=0, shuffle=False)
    for step in range(3):
        np.testing.assert_array_equal(next(loader), rows.step(step))


def test_other_characters_with_the_same_tokens():
    """They are another text, which a resumed run notices."""
    tokens = np.arange(500, dtype=np.uint16)
    first, second, plain = (random_windows(tokens, vocabulary=v).fingerprint for v in ("ab", "xy", ""))
    assert first != second != plain and plain == random_windows(tokens).fingerprint


def test_every_window_can_be_drawn():
    starts = random_windows(np.arange(5), seed=0, batch=200, context=2).step(0)[:, 0]
    assert set(starts.tolist()) == {0, 1, 2}


def test_random_windows_are_nanogpts_batches():
    """A resumed run needs the batches that it began with: these are those of earlier versions."""
    rows = random_windows(np.arange(1000), seed=0, batch=3, context=2)
    assert rows.step(0)[:, 0].tolist() == [425, 112, 496]


def test_windows_side_by_side():
    """They cover a text that is not too long; of a longer one they are evenly spaced."""
    tokens = np.arange(1000, dtype=np.uint16)
    rows = corpus.windows(tokens, batch=4, context=8, most=100)
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows, np.arange(124)[:, None] * 8 + np.arange(9))
    spread = corpus.windows(tokens, batch=4, context=8, most=2)[:, 0]
    np.testing.assert_array_equal(spread, np.arange(8) * 124 // 8 * 8)
    few = corpus.windows(tokens[:18], batch=4, context=8, most=100)
    np.testing.assert_array_equal(few[:, 0], [0, 0, 8, 8])
