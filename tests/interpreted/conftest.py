"""Only where Triton interprets, which it is told before it is loaded: a process of its own."""

import os
from types import SimpleNamespace

import numpy as np

# What lies beyond the true widths of a tile may overflow: it is masked, and a card does not mind.
np.seterr(over="ignore", invalid="ignore", divide="ignore")

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

if not collect_ignore_glob:
    import triton.language as tl
    from triton.runtime import interpreter

    # Triton would look through its whole language at every call of a function within a kernel, which takes longer than
    # the functions: here the language is the interpreter's throughout.
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

    # At every operation of two operands it would cast and broadcast both: numpy broadcasts. Some of 16 bits are cast.
    wide = {tl.float32, tl.float64, tl.int32, tl.int64}
    semantic, joint = type(interpreter.interpreter_semantic), {}
    check_types = semantic.binary_op_type_checking_impl

    def checked(self, lhs, rhs, *rest, **how):
        if not (isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.dtype == rhs.dtype in wide):
            return check_types(self, lhs, rhs, *rest, **how)
        names = lhs.type.name, rhs.type.name
        if names not in joint:
            joint[names] = check_types(self, lhs, rhs, *rest, **how)[0].type
        return tl.tensor(lhs.handle, joint[names]), tl.tensor(rhs.handle, joint[names])

    semantic.binary_op_type_checking_impl = checked

    # At every operation it would list all dtypes of numpy, and check and wrap each size of the few shapes there are.
    make_dtype, make_block, make_tensor = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__
    dtypes, blocks, shapes = {}, {}, {}

    def np_dtype(of):
        name = of.scalar.name
        if name not in dtypes:
            dtypes[name] = make_dtype(of)
        return dtypes[name]

    def block_type(self, element_ty, shape):
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        self.__dict__.update(blocks[key], element_ty=element_ty)

    def tensor(self, handle, type):
        name = type.name
        if name not in shapes:
            make_tensor(self, handle, type)
            shapes[name] = {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(shapes[name], handle=handle, type=type, dtype=type.scalar)

    interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__ = np_dtype, block_type, tensor
