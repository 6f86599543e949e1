/* What each asynchronous call does to its hold, in C: hold it, ask whether a sweep is needed, wait and release.
These are the ordinary cases of WorkQueue.hold(), Ledger.can_skip_sweep() and Work.wait(). All others go to Python,
which has all of them, and the tests hold the two against each other. No handler of a signal runs in here, and another
thread only in what is called. Objects are of Python's classes: where their slots lie was found by a mark in each, and
nothing is taken for an object of a class before its type was seen. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* In the order of the marks that collectives/in_c.py gives, with the class of each. */
enum {
    ALLOC_STREAM, CODE, INNER, INSTRUCTION, OP, QUEUE, SINCE, STORAGES, /* Work */
    BUDGET, DEFER_POLLING, HOLDS, INDEX, NEXT_LOOK, NONEMPTY_OF, UNSEEN_BYTES, /* Queue */
    CURRENT, LEDGER, WAIT_IS_STREAM_ORDER, /* WorkQueue */
    LEFTOVERS, NONEMPTY, OBSERVER, PATIENCE, QUARANTINE, UNFINISHED, /* Ledger */
    SLOT_COUNT
};
static Py_ssize_t offsets[SLOT_COUNT];
static PyObject *hold_in_python, *can_skip_in_python, *wait_in_python, *read_clock, *profiler, *nothing;
static Py_ssize_t crowd, newest, share, dropped;
static PyObject *f_code, *f_lasti, *reversed_name, *full_name, *enabled, *block; /* names, interned */

static PyObject **slot(PyObject *object, int which) { return (PyObject **)((char *)object + offsets[which]); }
static PyObject *get(PyObject *object, int which) { return *slot(object, which); } /* borrowed; NULL if it is not set */

static void put(PyObject *object, int which, PyObject *value) {
    PyObject *before = get(object, which);
    *slot(object, which) = Py_NewRef(value);
    Py_XDECREF(before);
}

/* Whether object is of a class, or of one below it: the one that was seen last is told by one comparison. */
typedef struct { PyTypeObject *type, *seen; } Class;
static Class a_work, a_queue, a_work_queue, a_ledger;

static int is(PyObject *object, Class *class) {
    if (!object) return 0;
    if (Py_TYPE(object) == class->seen) return 1;
    if (!PyType_IsSubtype(Py_TYPE(object), class->type)) return 0;
    PyTypeObject *before = class->seen;
    class->seen = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(object)); /* so that no other can get its address */
    Py_DECREF(before);
    return 1;
}

static int is_empty(PyObject *table) { return table && PyDict_Check(table) && PyDict_Size(table) == 0; }

static int is_zero(PyObject *number) { /* None and what is no int is not */
    return number && PyLong_CheckExact(number) && PyLong_AsUnsignedLongLongMask(number) == 0;
}

static int is_device(PyObject *queue) { /* and not the host, -1 */
    PyObject *index = get(queue, INDEX);
    return index && PyLong_CheckExact(index) && PyLong_AsLong(index) >= 0;
}

/* The current stream is the default one, which can't capture: 1. -1: an exception. */
static int is_default_stream(PyObject *queue) {
    PyObject *current = get(queue, CURRENT);
    PyObject *stream = current ? PyObject_CallFunctionObjArgs(current, get(queue, INDEX), NULL) : NULL;
    int found = stream ? is_zero(stream) : current ? -1 : 0;
    Py_XDECREF(stream);
    return found;
}

static PyObject *first_of(PyObject *holds) { /* a new reference; NULL, without an exception, if there is none */
    PyObject *iterator = PyObject_GetIter(holds), *found = iterator ? PyIter_Next(iterator) : NULL;
    Py_XDECREF(iterator);
    PyErr_Clear();
    return found;
}

static PyObject *references(PyObject *Py_UNUSED(module), PyObject *holds) {
    PyObject *first = first_of(holds);
    Py_ssize_t count = first ? Py_REFCNT(first) : 0;
    Py_XDECREF(first);
    return PyLong_FromSsize_t(count);
}

/* What a method of Python does with the arguments that C was given. */
static PyObject *in_python(PyObject *does, PyObject *self, PyObject *const *given, Py_ssize_t count, PyObject *names) {
    PyObject *all = PyTuple_New(count + 1), *named = names ? PyDict_New() : NULL, *done = NULL;
    if (!all || (names && !named)) goto over;
    PyTuple_SetItem(all, 0, Py_NewRef(self));
    for (Py_ssize_t i = 0; i < count; i++) PyTuple_SetItem(all, i + 1, Py_NewRef(given[i]));
    for (Py_ssize_t i = 0; names && i < PyTuple_Size(names); i++)
        if (PyDict_SetItem(named, PyTuple_GetItem(names, i), given[count + i])) goto over;
    done = PyObject_Call(does, all, named);
over:
    Py_XDECREF(all);
    Py_XDECREF(named);
    return done;
}

/* WorkQueue.hold(work, op, inner, storages, alloc_stream, frame) */
static PyObject *hold(PyObject *queue, PyObject *const *given, Py_ssize_t count) {
    int ordinary = is(queue, &a_work_queue) && count == 6 && is(given[0], &a_work) && is_device(queue);
    ordinary = ordinary && get(queue, HOLDS) && get(queue, NONEMPTY_OF) && is(get(queue, LEDGER), &a_ledger);
    if (ordinary) ordinary = is_default_stream(queue);
    if (ordinary < 0) return NULL;
    if (!ordinary) return in_python(hold_in_python, queue, given, count, NULL);
    PyObject *work = given[0], *code = PyObject_GetAttr(given[5], f_code);
    PyObject *instruction = code ? PyObject_GetAttr(given[5], f_lasti) : NULL;
    PyObject *since = instruction ? PyObject_CallObject(read_clock, NULL) : NULL;
    if (since) {
        put(work, OP, given[1]);
        put(work, INNER, given[2]);
        put(work, ALLOC_STREAM, given[4]);
        put(work, CODE, code);
        put(work, INSTRUCTION, instruction);
        put(work, SINCE, since);
        put(work, QUEUE, queue);
        put(work, STORAGES, given[3]);
    }
    Py_XDECREF(code);
    Py_XDECREF(instruction);
    Py_XDECREF(since);
    if (!since || PyObject_SetItem(get(queue, HOLDS), work, Py_None)) return NULL;
    if (PyObject_SetItem(get(queue, NONEMPTY_OF), queue, Py_None)) return NULL;
    PyObject *observer = get(get(queue, LEDGER), OBSERVER);
    if (observer && observer != Py_None) {
        Py_INCREF(observer);
        PyObject *told = PyObject_CallMethod(observer, "held", "O", work);
        Py_DECREF(observer);
        Py_XDECREF(told);
        if (!told) return NULL;
    }
    return Py_NewRef(work);
}

/* Whether the next hold of an iterator over holds was dropped: 1, also where it is no Work or there is none. */
static int next_is_dropped(PyObject *iterator, double young) {
    PyObject *next = iterator ? PyIter_Next(iterator) : NULL;
    PyObject *since = is(next, &a_work) ? get(next, SINCE) : NULL;
    int found = !since || !PyFloat_CheckExact(since) || PyFloat_AsDouble(since) <= young || Py_REFCNT(next) <= dropped;
    Py_XDECREF(next);
    return found;
}

/* Whether a sweep may pass a queue by: 1, 0; -1: it is for Python to say. */
static int can_pass_by(PyObject *queue, double now, double young) {
    PyObject *look = get(queue, NEXT_LOOK), *unseen = get(queue, UNSEEN_BYTES), *budget = get(queue, BUDGET);
    PyObject *holds = get(queue, HOLDS), *defer = get(queue, DEFER_POLLING);
    if (!look || !unseen || !budget || !holds || !defer || !PyFloat_CheckExact(look) || !PyDict_Check(holds)) return -1;
    if (PyFloat_AsDouble(look) > now) {
        long long come = PyLong_AsLongLong(unseen), left_alone = PyLong_AsLongLong(budget);
        if (PyErr_Occurred() || come > LLONG_MAX / share) return PyErr_Clear(), -1;
        if (share * come <= left_alone) return 1;
    }
    Py_ssize_t count = PyDict_Size(holds);
    if (defer != Py_True || count > crowd) return 0;
    PyObject *iterator = PyObject_GetIter(holds);
    int found = !next_is_dropped(iterator, young);
    Py_XDECREF(iterator);
    if (found && count > 1) {
        iterator = PyObject_CallMethodObjArgs(holds, reversed_name, NULL);
        for (Py_ssize_t i = 0; found && i < newest && i < count; i++) found = !next_is_dropped(iterator, -1e300);
        Py_XDECREF(iterator);
    }
    PyErr_Clear();
    return found;
}

/* Ledger.can_skip_sweep() */
static PyObject *can_skip_sweep(PyObject *ledger, PyObject *const *given, Py_ssize_t count) {
    (void)given;
    PyObject *nonempty = !count && is(ledger, &a_ledger) ? get(ledger, NONEMPTY) : NULL;
    PyObject *patience = nonempty && PyDict_CheckExact(nonempty) ? get(ledger, PATIENCE) : NULL;
    int found = patience && PyFloat_CheckExact(patience);
    if (!found) return PyObject_CallFunctionObjArgs(can_skip_in_python, ledger, NULL);
    found = is_empty(get(ledger, QUARANTINE)) && is_empty(get(ledger, LEFTOVERS)) && is_empty(get(ledger, UNFINISHED));
    if (!found) Py_RETURN_FALSE;
    PyObject *queue, *value, *told = PyObject_CallObject(read_clock, NULL);
    if (!told) return NULL;
    double now = PyFloat_AsDouble(told), young = now - PyFloat_AsDouble(patience);
    Py_DECREF(told);
    Py_ssize_t place = 0, size = PyDict_Size(nonempty);
    while (found == 1 && PyDict_Next(nonempty, &place, &queue, &value)) {
        Py_INCREF(queue);
        found = is(queue, &a_queue) ? can_pass_by(queue, now, young) : -1;
        Py_DECREF(queue);
        if (found == 1 && PyDict_Size(nonempty) != size) found = 0; /* another thread, or a finalizer, was there */
    }
    return found < 0 ? PyObject_CallFunctionObjArgs(can_skip_in_python, ledger, NULL) : PyBool_FromLong(found);
}

/* Take a work out of its queue and let go of what it holds: Rules.release() of one that has nothing besides. */
static void release(PyObject *work, PyObject *queue, PyObject *holds) {
    PyObject *storages = get(work, STORAGES), *nonempty = get(queue, NONEMPTY_OF);
    *slot(work, STORAGES) = Py_NewRef(nothing);
    if (PyObject_DelItem(holds, work)) PyErr_Clear();
    if (PyDict_Size(holds) == 0 && PyDict_DelItem(nonempty, queue)) PyErr_Clear();
    Py_DECREF(storages); /* last, because it may run what it likes */
}

/* Tell the ledger of the exception that a wait has raised, which goes on. */
static void fail(PyObject *ledger, PyObject *work) {
    PyObject *type, *error, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return; /* an interrupt says nothing about the work */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* since 3.12, which has what 3.10 has not */
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyObject *done = PyObject_CallMethod(ledger, "fail", "OO", work, error);
    Py_XDECREF(done);
    if (done) {
        PyErr_Restore(type, error, traceback);
        return;
    }
#pragma GCC diagnostic pop
    Py_XDECREF(type), Py_XDECREF(error), Py_XDECREF(traceback);
}

/* Wait for a work and release it: 1. 0: it is not an ordinary one, and nothing was done. -1: an exception. */
static int wait_ordinarily(PyObject *work) {
    PyObject *queue = Py_TYPE(work) == a_work.type ? get(work, QUEUE) : NULL;
    if (!is(queue, &a_work_queue) || get(queue, WAIT_IS_STREAM_ORDER) != Py_True) return 0;
    PyObject *holds = get(queue, HOLDS), *ledger = get(queue, LEDGER), *inner = get(work, INNER);
    if (!inner || !holds || !PyDict_Check(holds) || !is(ledger, &a_ledger) || !is_device(queue)) return 0;
    PyObject *full = PyObject_GetAttr(work, full_name);
    int ordinary = full ? !PyObject_IsTrue(full) && PyDict_GetItemWithError(profiler, enabled) == Py_False : -1;
    Py_XDECREF(full);
    if (ordinary == 1) ordinary = is_default_stream(queue);
    if (ordinary == 1) ordinary = PyDict_Contains(holds, work);
    if (ordinary != 1) return ordinary;
    Py_INCREF(inner);
    PyObject *ordered = PyObject_CallMethodObjArgs(inner, block, NULL);
    Py_DECREF(inner);
    if (!ordered) return fail(ledger, work), -1;
    Py_DECREF(ordered);
    PyObject *storages = get(work, STORAGES); /* another thread may have released it meanwhile */
    if (!storages || !PyTuple_Check(storages) || PyTuple_Size(storages) == 0) return 1;
    PyObject *first = PyDict_Size(holds) == 1 ? Py_NewRef(work) : first_of(holds);
    int alone = first == work && is_zero(get(work, ALLOC_STREAM));
    Py_XDECREF(first);
    if (alone && get(ledger, OBSERVER) == Py_None && is_empty(get(ledger, QUARANTINE))) {
        release(work, queue, holds);
        return 1;
    }
    PyObject *done = PyObject_CallMethod(ledger, alone ? "release" : "waited", "O", work);
    Py_XDECREF(done);
    return done ? 1 : -1;
}

/* Work.wait(timeout=None) */
static PyObject *wait(PyObject *work, PyObject *const *given, Py_ssize_t count, PyObject *names) {
    int waited = count || names ? 0 : wait_ordinarily(work);
    if (waited) return waited < 0 ? NULL : Py_NewRef(Py_True);
    return in_python(wait_in_python, work, given, count, names);
}

#define FUNCTION(name, flags) {#name, (PyCFunction)(void (*)(void))name, flags, NULL}
static PyMethodDef methods[] = {
    FUNCTION(hold, METH_FASTCALL), FUNCTION(can_skip_sweep, METH_FASTCALL),
    FUNCTION(wait, METH_FASTCALL | METH_KEYWORDS)};

/* Return where the pointer to mark lies in object; 0 if it is not there. */
static Py_ssize_t offset_of(PyObject *object, PyObject *mark) {
    PyObject *size = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__basicsize__");
    Py_ssize_t end = size ? PyLong_AsSsize_t(size) : 0, found = sizeof(PyObject);
    Py_XDECREF(size);
    while (found < end && *(PyObject **)((char *)object + found) != mark) found += sizeof(PyObject *);
    return found < end ? found : 0;
}

/* holding(marks, classes, functions, numbers): see collectives/in_c.py. Three functions; None: a slot is lacking. */
static PyObject *holding(PyObject *Py_UNUSED(module), PyObject *given) {
    PyObject *marks, *object, *mark, *classes[4], *python[5];
    if (!PyArg_ParseTuple(
            given, "O!(OOOO)(OOOOO!)(nnnn)s", &PyList_Type, &marks, classes, classes + 1, classes + 2, classes + 3,
            python, python + 1, python + 2, python + 3, &PyDict_Type, python + 4, &crowd, &newest, &share, &dropped,
            &methods[2].ml_doc)) return NULL;
    if (PyList_Size(marks) != SLOT_COUNT) Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < SLOT_COUNT; i++) {
        if (!PyArg_ParseTuple(PyList_GetItem(marks, i), "OO", &object, &mark)) return NULL;
        if (!(offsets[i] = offset_of(object, mark))) Py_RETURN_NONE;
    }
    Py_INCREF(given); /* for good */
    Class *known[] = {&a_work, &a_queue, &a_work_queue, &a_ledger};
    for (int i = 0; i < 4; i++) {
        known[i]->type = (PyTypeObject *)classes[i];
        known[i]->seen = (PyTypeObject *)Py_NewRef(classes[i]);
    }
    hold_in_python = python[0], can_skip_in_python = python[1], wait_in_python = python[2];
    read_clock = python[3], profiler = python[4];
    f_code = PyUnicode_InternFromString("f_code"), f_lasti = PyUnicode_InternFromString("f_lasti");
    reversed_name = PyUnicode_InternFromString("__reversed__");
    full_name = PyUnicode_InternFromString("needs_full_wait");
    enabled = PyUnicode_InternFromString("_is_profiler_enabled");
    block = PyUnicode_InternFromString("block_current_stream");
    if (!block || !(nothing = PyTuple_New(0))) return NULL;
    return Py_BuildValue(
        "NNN", PyDescr_NewMethod(&PyBaseObject_Type, methods), PyDescr_NewMethod(&PyBaseObject_Type, methods + 1),
        PyDescr_NewMethod(&PyBaseObject_Type, methods + 2));
}

PyMethodDef of_holds[] = {FUNCTION(holding, METH_VARARGS), FUNCTION(references, METH_O), {NULL, NULL, 0, NULL}};
