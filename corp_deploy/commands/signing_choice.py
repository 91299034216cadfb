"""Options for signing a release or model repository, and for verifying its signature."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from corp_deploy.invocation.option import Record, option
from corp_deploy.invocation.values import FILE, TEXT, Repeated, text_of
from ground.errors import BadInput

if TYPE_CHECKING:
    from corp_deploy.release.check import ExpectedRelease
    from corp_deploy.release.signer import Signer

SIGSTORE = "sigstore"


@dataclass(frozen=True, kw_only=True)
class SigningChoice(Record, heading="Signature"):
    """The key or identity that signs. Raises BadInput for a certificate, chain or password without a key."""

    sign: str | None = option(
        text_of(f"KEY.pem|{SIGSTORE}"), help="Sign with this private key (EC, PEM), or through Sigstore as the CI job."
    )
    sign_certificate: Path | None = option(
        FILE, help="Certificate of the key, which `check --verify IDENTITY` verifies."
    )
    sign_chain: Sequence[Path] = option(
        Repeated(each=FILE), (), help="Certificates between --sign-certificate and the root, and the root; repeat."
    )
    sign_password: Path | None = option(FILE, help="The file with the password of an encrypted key.")

    def __post_init__(self) -> None:
        super().__post_init__()
        beside = self.sign_certificate or self.sign_chain or self.sign_password
        if beside and self.sign in (None, SIGSTORE):
            raise BadInput("--sign-certificate, --sign-chain and --sign-password go with a private key: --sign KEY.pem")
        if self.sign_chain and self.sign_certificate is None:
            raise BadInput("--sign-chain continues --sign-certificate; give that too")

    def signer(self) -> "Signer | None":
        """Return the signer, None without --sign; raise BadInput for a password that can't be read."""
        from corp_deploy.release.signer import KeySigner, SigstoreSigner, password_from_file

        if self.sign is None:
            return None
        if self.sign == SIGSTORE:
            return SigstoreSigner()
        return KeySigner(
            key=Path(self.sign),
            password=None if self.sign_password is None else password_from_file(self.sign_password),
            certificate=self.sign_certificate,
            chain=tuple(self.sign_chain),
        )


@dataclass(frozen=True, kw_only=True)
class VerifyingChoice(Record):
    """The expected signer, name and version of a release. Raises BadInput for any of them without --verify."""

    verify: str | None = option(
        text_of("KEY.pub.pem|IDENTITY"),
        help="First verify the signature, by this public key or for this identity.",
    )
    root: Sequence[Path] = option(
        Repeated(each=FILE), (), help="With an identity: the root certificates that it has to chain to."
    )
    issuer: str | None = option(TEXT, help="With an identity: the OpenID issuer that Sigstore must have used.")
    expect_name: str | None = option(TEXT, help="With --verify: the release's name that was signed.")
    expect_version: str | None = option(
        TEXT, help="With --verify: the version that was signed; signatures of older versions stay valid."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify is None and self.non_default:
            raise BadInput("--root, --issuer, --expect-name and --expect-version go with --verify")

    def expected(self) -> "ExpectedRelease | None":
        """Return the expected release, None without --verify; raise BadInput for a verifier that can't be used."""
        from corp_deploy.release.check import ExpectedRelease
        from corp_deploy.release.verifier import verifier_from_options

        if self.verify is None:
            return None
        verifier = verifier_from_options(self.verify, tuple(self.root), self.issuer)
        return ExpectedRelease(verifier=verifier, name=self.expect_name, version=self.expect_version)
