"""Signers of releases: a private key, a private key with its certificate, or the identity of a CI job by Sigstore."""

import base64
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ground.errors import BadInput, Missing
from ground.files import sha256_of_text, text_from_file, write_text

from .names import ATTESTATION, PROVENANCE, SIGNATURE
from .signature import Unverified, entries_below, hashing_config, require_library
from .verifier import CURVES, NEW_KEY, Certified, PublicKey, certificates_from_file, names_in_certificate, pem_from_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec
    from model_signing import signing


PAYLOAD = "application/vnd.in-toto+json"


def _private_key(path: Path, password: str | None) -> "ec.EllipticCurvePrivateKey":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = pem_from_file(path, "a private key")
    try:
        key = load_pem_private_key(data, None if password is None else password.encode())
    except TypeError:
        words = "is encrypted; give --sign-password FILE" if password is None else "has no password; leave it out"
        raise BadInput(f"{path}: the key {words}") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{path}: not a private key in PEM, or another password ({error!s:.120}); {NEW_KEY}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in CURVES:
        raise BadInput(f"{path}: no key of {', '.join(CURVES)}, the only supported curves; {NEW_KEY}")
    return key


def password_from_file(path: Path) -> str:
    try:
        lines = text_from_file(path).splitlines()
    except OSError as error:
        raise BadInput(f"{path}: can't be read ({error.strerror})") from None
    if not lines or not lines[0]:
        raise BadInput(f"{path}: no password in its first line")
    return lines[0]


def _public_text(key: "ec.EllipticCurvePrivateKey") -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def _envelope(payload: bytes, key: "ec.EllipticCurvePrivateKey") -> dict[str, Any]:
    """Return a DSSE v1 envelope with the payload and its signature by a key."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    sizes: dict[int, hashes.HashAlgorithm] = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
    signed = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)
    signature = key.sign(signed, ec.ECDSA(sizes[key.curve.key_size]))
    return {
        "payloadType": PAYLOAD,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": sha256_of_text(_public_text(key)), "sig": base64.b64encode(signature).decode()}],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySigner:
    """A signer with a private key of an elliptic curve and, optionally, its certificate and the chain to the root."""

    key: Path
    password: str | None = None
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()

    def require(self) -> None:
        """Raise BadInput for a key or certificate that can't sign, Missing without the library."""
        require_library()
        key = _private_key(self.key, self.password)
        if self.certificate is None:
            return
        if self.password is not None:
            raise BadInput("--sign-password: with a certificate the library takes only keys without a password")
        if certificates_from_file(self.certificate)[0].public_key() != key.public_key():
            raise BadInput(f"{self.certificate}: the certificate belongs to another key than {self.key}")
        for each in self.chain:
            certificates_from_file(each)

    @property
    def config(self) -> "signing.Config":
        from model_signing import signing

        config = signing.Config()
        if self.certificate is not None:
            return config.use_certificate_signer(
                private_key=self.key, signing_certificate=self.certificate, certificate_chain=self.chain
            )
        password: Any = None if self.password is None else self.password.encode()  # typed as text, taken as bytes
        return config.use_elliptic_key_signer(private_key=self.key, password=password)

    def has_signed(self, folder: Path, scratch: Path) -> bool:
        if self.certificate is not None:
            names = names_in_certificate(certificates_from_file(self.certificate)[0])
            return bool(names) and _holds(Certified(identity=names[0], roots=(*self.chain, self.certificate)), folder)
        public = scratch / "key.pub.pem"
        public.write_text(_public_text(_private_key(self.key, self.password)), encoding="utf-8")
        return _holds(PublicKey(path=public), folder)

    def attest(self, folder: Path) -> None:
        if not (folder / PROVENANCE).is_file():
            return
        payload = text_from_file(folder / PROVENANCE, most_bytes=2**28).encode()
        envelope = _envelope(payload, _private_key(self.key, self.password))
        write_text(folder / ATTESTATION, json.dumps(envelope) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class SigstoreSigner:
    """A signer with the OpenID identity of the CI job that this process runs in; elsewhere there is no identity."""

    def require(self) -> None:
        """Raise Missing without the library or an identity."""
        require_library()
        _ = self._token

    @property
    def _token(self) -> str:
        from sigstore.oidc import detect_credential

        try:
            token = detect_credential()
        except Exception as error:
            raise Missing(f"no identity for Sigstore ({type(error).__name__}: {error!s:.200})") from None
        if token is None:
            raise Missing("no identity for Sigstore: run in a CI job that may ask for an OpenID token, or sign by key")
        return str(token)

    @property
    def config(self) -> "signing.Config":
        from model_signing import signing

        return signing.Config().use_sigstore_signer(identity_token=self._token)

    def has_signed(self, folder: Path, scratch: Path) -> bool:
        return False

    def attest(self, folder: Path) -> None:
        (folder / ATTESTATION).unlink(missing_ok=True)


Signer = KeySigner | SigstoreSigner


def _holds(verifier: PublicKey | Certified, folder: Path) -> bool:
    try:
        verifier.verify(folder)
    except Unverified:
        return False
    return True


def sign(folder: Path, signer: Signer, files: frozenset[str]) -> bool:
    """Sign a directory and attest its provenance; return False if this signer's valid signature is there already.

    Raises BadInput if the directory has a file that is not in `files`.
    """
    there = {path.relative_to(folder).as_posix(): path for path in entries_below(folder)}
    foreign = sorted(name for name, path in there.items() if name not in files or path.is_symlink())
    foreign = [name for name in foreign if name != ATTESTATION]
    if foreign:
        raise BadInput(f"{folder / foreign[0]}: not among the files to sign; move it away, then sign again")
    with tempfile.TemporaryDirectory() as scratch:
        if signer.has_signed(folder, Path(scratch)):
            return False
        (folder / SIGNATURE).unlink(missing_ok=True)
        signer.attest(folder)
        beside = Path(scratch) / SIGNATURE
        try:
            signer.config.set_hashing_config(hashing_config()).sign(folder, beside)
        except (ValueError, TypeError) as error:
            raise BadInput(f"{folder}: can't be signed ({error!s:.300})") from None
        write_text(folder / SIGNATURE, beside.read_text(encoding="utf-8"))
    return True
