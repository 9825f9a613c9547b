"""Statuses of the library and the exception that carries them."""

from . import capi

__all__ = ["Error"]

for _name in dir(capi):
    if _name.startswith("KVQ_E_"):
        globals()[_name[4:]] = getattr(capi, _name)
        __all__.append(_name[4:])


class Error(Exception):
    """A call that libkvq refused.

    status  one of kvq.E_INVALID, E_NONFINITE, E_STATE, E_STALE, E_BUSY, E_NOMEM, E_FULL, ...
    detail  one sentence: which argument, which value, what was allowed
    """

    def __init__(self, status, detail):
        super().__init__(status, detail)
        self.status = status
        self.detail = detail

    def __str__(self):
        return f"{capi.kvq_status_string(self.status)}: {self.detail}"


capi.set_error(Error)
