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
