"""Make Triton's interpreter faster."""


def hasten():
    """Avoid two things that the interpreter repeats.

    At every call of a device function it looks for the functions of triton.language to replace, which takes
    half of its time; here they are replaced once per launch and module. And it builds a table of all types to
    look up numpy's type for one.
    """
    from triton.runtime import interpreter  # which settles whether triton's own functions are interpreted

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
