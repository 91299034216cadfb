"""The command line, as a test calls it."""

from click.testing import CliRunner, Result

from corp_deploy.cli import main


def run(*words: object) -> Result:
    """Whatever comes of it."""
    return CliRunner().invoke(main, [str(word) for word in words])


def invoked(*words: object, code: int = 0) -> Result:
    """What is to end with this exit code."""
    result = run(*words)
    assert result.exit_code == code, (words, result.output, result.stderr, result.exception)
    return result


def refuses(message: str, *words: object, code: int = 2) -> None:
    """What is to end with this exit code and say why, however its lines are broken."""
    said = invoked(*words, code=code).stderr
    assert message in said or message in " ".join(said.split()), said


def refused(result: Result, *said: str, code: int = 2) -> None:
    """This exit code, one message of a size that can be read, no traceback."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    message = result.stderr.partition("Error: ")[2]
    assert message.strip(), result.stderr
    assert len(result.stderr) < 3000, "what was given is not echoed whole"
    for words in said:
        assert words in result.stderr, result.stderr
