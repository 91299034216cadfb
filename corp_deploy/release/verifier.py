"""Verifiers of signatures: by a public key, by the name in a certificate, or by an identity in Sigstore."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ground.errors import BadInput, Missing
from ground.files import sha256_of_text, text_from_file

from .signature import Signed, Unverified, require_library, verify_signature

if TYPE_CHECKING:
    from cryptography import x509

CURVES = ("secp256r1", "secp384r1", "secp521r1")
NEW_KEY = "make one with: openssl ecparam -name prime256v1 -genkey -noout -out key.pem"
PUBLIC_PART = "its public part is made with: openssl ec -in key.pem -pubout -out key.pub.pem"


def pem_from_file(path: Path, what: str) -> bytes:
    try:
        text = text_from_file(path)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file, expected {what} in PEM") from None
    if "-----BEGIN " not in text:
        raise BadInput(f"{path}: not PEM, expected {what} that begins with -----BEGIN")
    return text.encode()


def certificates_from_file(path: Path) -> "list[x509.Certificate]":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem_from_file(path, "certificates"))
    except ValueError as error:
        raise BadInput(f"{path}: not certificates in PEM ({error!s:.200})") from None


def names_in_certificate(certificate: "x509.Certificate") -> list[str]:
    """Return the names in a certificate: mail addresses, URIs, hosts, then the common name."""
    from cryptography import x509

    names: list[str] = []
    try:
        others = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        for kind in (x509.RFC822Name, x509.UniformResourceIdentifier, x509.DNSName):
            names += others.get_values_for_type(kind)
    except x509.ExtensionNotFound:
        pass
    common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return [*names, *(str(each.value) for each in common)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKey:
    """A verifier with the public key of an elliptic curve, in a PEM file."""

    path: Path

    def verify(self, folder: Path) -> Signed:
        require_library()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
        from model_signing import verifying

        data = pem_from_file(self.path, "a public key")
        try:
            key = load_pem_public_key(data)
        except (ValueError, UnsupportedAlgorithm) as error:
            private = "; it holds a private key: " + PUBLIC_PART if b"PRIVATE KEY" in data else ""
            raise BadInput(f"{self.path}: not a public key in PEM ({error!s:.120}){private}") from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in CURVES:
            raise BadInput(f"{self.path}: no key of {', '.join(CURVES)}; the library verifies no others")
        text = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        words = f"the key {sha256_of_text(text)[:16]}"
        config = verifying.Config().use_elliptic_key_verifier(public_key=self.path)
        return verify_signature(folder, config, lambda data: words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """A verifier that accepts a certificate with the name `identity` whose chain ends at one of `roots`.

    The chain is verified for the time at which the certificate becomes valid.
    """

    identity: str
    roots: tuple[Path, ...]

    def _who(self, data: bytes) -> str:
        from cryptography import x509

        chain = json.loads(data)["verificationMaterial"]["x509CertificateChain"]["certificates"]
        names = names_in_certificate(x509.load_der_x509_certificate(base64.b64decode(chain[0]["rawBytes"])))
        if self.identity not in names:
            others = ", ".join(names)[:200] or "nobody by name"
            raise Unverified(f"model.sig: the certificate names {others}, expected {self.identity}")
        return self.identity

    def verify(self, folder: Path) -> Signed:
        require_library()
        from model_signing import verifying

        for root in self.roots:
            certificates_from_file(root)
        config = verifying.Config().use_certificate_verifier(certificate_chain=self.roots)
        return verify_signature(folder, config, self._who)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sigstore:
    """A verifier that accepts a Sigstore signature by `identity` of the OpenID `issuer`; it needs the network."""

    identity: str
    issuer: str

    def verify(self, folder: Path) -> Signed:
        require_library()
        from model_signing import verifying

        try:
            config = verifying.Config().use_sigstore_verifier(identity=self.identity, oidc_issuer=self.issuer)
        except Exception as error:
            why = f"{type(error).__name__}: {error!s:.200}"
            raise Missing(f"Sigstore's roots of trust can't be had here ({why})") from None
        return verify_signature(folder, config, lambda data: f"{self.identity} by {self.issuer}")


Verifier = PublicKey | Certified | Sigstore


def verifier_from_options(verify: str, roots: tuple[Path, ...], issuer: str | None) -> Verifier:
    """Return the verifier that --verify, --root and --issuer describe; `verify` alone is the file of a public key."""
    if roots and issuer is not None:
        raise BadInput("--root verifies by certificates, --issuer by Sigstore; give one of the two")
    if roots:
        return Certified(identity=verify, roots=roots)
    if issuer is not None:
        return Sigstore(identity=verify, issuer=issuer)
    if not Path(verify).is_file():
        raise BadInput(
            f"--verify {verify[:200]}: no such file, expected a public key; an identity goes with --root CERTIFICATES "
            "or, where Sigstore vouches for it, with --issuer URL"
        )
    return PublicKey(path=Path(verify))
