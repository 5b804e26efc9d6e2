"""Triton's interpreter, without what it does over and over."""


def hasten():
    """Replace the functions of triton.language once for a launch and module: at every call of a device
    function the interpreter looks for all of them anew, half of its time, to find them replaced. And look up
    a type's numpy type, for which it would make a table of all each time."""
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
