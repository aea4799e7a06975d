"""How two ranks prove to each other that they have the same key, without sending it. Pure but for fresh numbers.

A rank sends its greeting with a nonce; rank 0 answers with a nonce of its own and an HMAC over both; the rank sends
another HMAC over both. Each begins with its sender's role, so that neither can be sent back as the other, and fresh
nonces make what was recorded earlier worthless (the form of ISO/IEC 9798-4, three passes).
"""

import hmac
import secrets
from typing import Self

import msgspec

_LEADER, _FOLLOWER = b"rank 0 proves\n", b"another rank proves\n"


def fresh_nonce() -> str:
    return secrets.token_hex(16)


class Challenge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank 0's answer to a greeting."""

    nonce: str
    proof: str

    @classmethod
    def fresh(cls, key: bytes, greeting: bytes) -> Self:
        """`greeting`: the bytes that the other rank sent."""
        nonce = fresh_nonce()
        return cls(nonce, _proof(_LEADER, key, greeting, nonce))

    def proves(self, key: bytes, greeting: bytes) -> bool:
        """Whether rank 0 has the key, and answered this greeting."""
        return hmac.compare_digest(self.proof.encode(), _proof(_LEADER, key, greeting, self.nonce).encode())


def answer(key: bytes, greeting: bytes, challenge: Challenge) -> bytes:
    """The other rank's proof."""
    return _proof(_FOLLOWER, key, greeting, challenge.nonce).encode()


def answers(proof: bytes, key: bytes, greeting: bytes, challenge: Challenge) -> bool:
    """Whether the rank that sent `greeting` has the key, and answered this challenge."""
    return hmac.compare_digest(proof, answer(key, greeting, challenge))


def _proof(role: bytes, key: bytes, greeting: bytes, nonce: str) -> str:
    return hmac.new(key, role + nonce.encode() + b"\n" + greeting, "sha256").hexdigest()
