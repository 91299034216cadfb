"""Who signs a release, and whose signature one has to have, on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import FILE, value_options

if TYPE_CHECKING:
    from corp_deploy.release.check import Expected
    from corp_deploy.release.signer import Signer

SIGSTORE = "sigstore"


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningChoice:
    """Raises UsageError for a certificate or password without the key that it goes with."""

    sign: str | None
    sign_certificate: Path | None
    sign_chain: tuple[Path, ...]
    sign_password: Path | None

    def __post_init__(self) -> None:
        beside = self.sign_certificate or self.sign_chain or self.sign_password
        if beside and self.sign in (None, SIGSTORE):
            raise click.UsageError(
                "--sign-certificate, --sign-chain and --sign-password go with a private key: --sign KEY.pem"
            )
        if self.sign_chain and self.sign_certificate is None:
            raise click.UsageError("--sign-chain leads on from a certificate: give --sign-certificate too")

    def signer(self) -> "Signer | None":
        """Raises BadInput for a password that can't be read."""
        from corp_deploy.release.signer import KeySigner, SigstoreSigner, password_from_file

        if self.sign is None:
            return None
        if self.sign == SIGSTORE:
            return SigstoreSigner()
        return KeySigner(
            key=Path(self.sign),
            password=None if self.sign_password is None else password_from_file(self.sign_password),
            certificate=self.sign_certificate,
            chain=self.sign_chain,
        )


signing_options = value_options(
    "signing",
    SigningChoice,
    click.option("--sign", metavar="KEY.pem|sigstore", default=None, help="Sign it: with this private key (EC, PEM)."),
    click.option("--sign-certificate", type=FILE, default=None, help="The key's certificate, by which others know it."),
    click.option("--sign-chain", type=FILE, multiple=True, help="Certificates from that one on to the root; repeat."),
    click.option("--sign-password", type=FILE, default=None, help="The file with the password of an encrypted key."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyingChoice:
    """Raises UsageError for what is expected of a signature where none is."""

    verify: str | None
    root: tuple[Path, ...]
    issuer: str | None
    expect_name: str | None
    expect_version: str | None

    def __post_init__(self) -> None:
        if self.verify is None and (self.root or self.issuer or self.expect_name or self.expect_version):
            raise click.UsageError("--root, --issuer, --expect-name and --expect-version go with --verify")

    def expected(self) -> "Expected | None":
        """Raises BadInput for nobody who could be meant."""
        from corp_deploy.release.check import Expected
        from corp_deploy.release.verifier import verifier_from_options

        if self.verify is None:
            return None
        verifier = verifier_from_options(self.verify, self.root, self.issuer)
        return Expected(verifier=verifier, name=self.expect_name, version=self.expect_version)


verifying_options = value_options(
    "verifying",
    VerifyingChoice,
    click.option(
        "--verify",
        metavar="KEY.pub.pem|IDENTITY",
        default=None,
        help="First of all verify the signature, by this public key or of this identity.",
    ),
    click.option("--root", type=FILE, multiple=True, help="With an identity: the root certificates it has to lead to."),
    click.option("--issuer", default=None, help="With an identity: the OpenID issuer that Sigstore has to have asked."),
    click.option("--expect-name", default=None, help="With --verify: the release's name that was signed."),
    click.option("--expect-version", default=None, help="With --verify: its version; an older one is signed as well."),
)
