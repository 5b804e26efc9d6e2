"""Make Triton's interpreter faster."""


def hasten():
    """Avoid what the interpreter repeats, and what it does in vain.

    At every call of a device function it looks for the functions of triton.language to replace, which takes
    half of its time; here they are replaced once per launch and module. It builds a table of all types to
    look up numpy's type for one. It works out the type and the shape of every result anew. And it looks for
    overflows of integers by five operators, though it says nothing of them outside debug mode.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter  # which settles whether triton's own functions are interpreted

    _keep_types()
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *args: None

    replace, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    done = set()

    def replace_once(function):
        if function.__module__ in done:
            return None  # a device function's caller does not look at it
        scope = replace(function)
        done.add(function.__module__)
        return scope

    def restore_all(scope):
        done.clear()
        restore(scope)

    numpy_type, types = interpreter._get_np_dtype, {}

    def known_numpy_type(type):
        name = type.scalar.name
        if name not in types:
            types[name] = numpy_type(type)
        return types[name]

    interpreter._patch_lang = replace_once
    interpreter._LangPatchScope.restore = restore_all
    interpreter._get_np_dtype = known_numpy_type


def _keep_types():
    """Work out once a type of blocks, the shape of tensors of a type, and what two shapes broadcast to."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    init_type, init_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast = TritonSemantic.broadcast_impl_value
    # What is kept here lives on, so that no other object gets the id of a type or a shape in it.
    shapes, types, joint_shapes = {}, {}, {}

    def known_type(self, element_ty, shape):
        found = types.get((id(element_ty), id(shape)))
        if found is None:
            sizes = tuple(core._unwrap_if_constexpr(size) for size in shape)
            known = shapes.get(sizes)
            found = types.get((id(element_ty), id(known)))
            if found is None:
                init_type(self, element_ty, shape)
                self.shape = shapes.setdefault(sizes, self.shape)
                found = types[id(element_ty), id(self.shape)] = self.__dict__
        self.__dict__ = found

    def known_shape(self, handle, type):
        facts = type.__dict__.get("tensor_facts")
        if facts is None:
            init_tensor(self, handle, type)
            type.tensor_facts = {name: value for name, value in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(facts)
            self.handle = handle

    def known_broadcast(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if not (left.is_block() and right.is_block()):
            return broadcast(self, lhs, rhs)
        if left.shape is right.shape:
            return lhs, rhs
        key = id(left.shape), id(right.shape)
        if key not in joint_shapes:
            joint_shapes[key] = broadcast(self, lhs, rhs)[0].type.shape
        return tuple(to_shape(self, x, joint_shapes[key]) for x in (lhs, rhs))

    def to_shape(self, x, shape):
        while len(x.type.shape) < len(shape):
            x = self.expand_dims(x, 0)
        if x.type.shape is shape:
            return x
        kind = core.block_type(x.type.scalar, shape)
        return self.tensor(self.builder.create_broadcast(x.handle, shape.values), kind)

    core.block_type.__init__ = known_type
    core.tensor.__init__ = known_shape
    TritonSemantic.broadcast_impl_value = known_broadcast
