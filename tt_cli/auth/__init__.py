"""Login and admission: the Hugging Face account in use here, and whether a run admits it."""

from tt_cli.auth.account import Organisation, User, login, logout, token_source, whoami
from tt_cli.auth.eligibility import current_user, require_member

__all__ = [
    "Organisation",
    "User",
    "current_user",
    "login",
    "logout",
    "require_member",
    "token_source",
    "whoami",
]
