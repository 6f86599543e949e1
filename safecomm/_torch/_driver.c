/* What each call asks, in C: on which stream memory was allocated, and whether a stream is being captured.
Optional: hatch_build.py compiles it where it can. Table does what segment_table.py does, step by step, and the
tests hold the two against each other. It needs nothing of CUDA: ctypes has the addresses of the driver's functions.
All of it runs with the GIL held. Only missed and otherwise run code of Python, which may change a table, or let another
thread do that: behind such a call nothing is used that was read of the table before it. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
enum { VERSION = 1, BUFFER_ID = 7, CAPTURE_ACTIVE = 1, GRANULE = 21, ANCHORS = 16, LIMIT = 1 << 16, SLOTS = 2 * LIMIT };
#define NONE LLONG_MIN /* a stream that is unknown: None */
typedef unsigned long long wide;
typedef struct { wide key; long long stream; wide start, end; } Segment;
typedef struct { wide granule; long long stream; } Anchor;
typedef struct {
    PyObject_HEAD
    int (*ask)(wide *answer, int attribute, wide pointer); /* cuPointerGetAttribute */
    Segment *slots; /* by the driver's id, which is never used again, plus 1; open addressing, at most half full */
    size_t count, anchors;
    Anchor anchor[ANCHORS];
    PyObject *missed;
    void *memory; /* what slots lie in: zeros, of which the system gives only the pages that are used */
} Table;

static int as_stream(PyObject *told, long long *stream) {
    return (*stream = told == Py_None ? NONE : PyLong_AsLongLong(told)) == -1 && PyErr_Occurred() ? -1 : 0;
}

static int as_pointer(PyObject *given, wide *pointer) {
    return (*pointer = PyLong_AsUnsignedLongLongMask(given)) == ULLONG_MAX && PyErr_Occurred() ? -1 : 0;
}

static long long anchored_at(Table *self, wide pointer) {
    for (size_t i = 0; i < self->anchors; i++)
        if (self->anchor[i].granule == pointer >> GRANULE) return self->anchor[i].stream;
    return NONE;
}

static Segment *slot_of(Table *self, wide key) {
    size_t place = (size_t)(key ^ key >> 17) % SLOTS; /* ids that follow each other lie side by side */
    while (self->slots[place].key && self->slots[place].key != key) place = (place + 1) % SLOTS;
    return self->slots + place;
}

static int find(Table *self, wide pointer, Segment *found) {
    wide identity = 0;
    *found = (Segment){0, NONE, 0, 0};
    if (self->ask(&identity, BUFFER_ID, pointer)) return 0;
    const Segment *slot = slot_of(self, identity + 1);
    if (slot->key) return *found = *slot, 0;
    PyObject *stream, *told = PyObject_CallFunction(self->missed, "KK", pointer, identity);
    int failed = !told || !PyArg_ParseTuple(told, "OKK", &stream, &found->start, &found->end);
    failed = failed || as_stream(stream, &found->stream);
    Py_XDECREF(told);
    return failed ? -1 : 0;
}

static PyObject *alloc_stream(Table *self, PyObject *const *given, Py_ssize_t count) {
    wide pointer, other = 0;
    if (count != 1 && count != 2) return PyErr_Format(PyExc_TypeError, "it takes one address, or two");
    int two = count == 2 && given[1] != Py_None;
    if (as_pointer(given[0], &pointer) || (two && as_pointer(given[1], &other))) return NULL;
    long long stream = anchored_at(self, pointer);
    if (stream == NONE || (two && anchored_at(self, other) != stream)) {
        Segment found;
        if (find(self, pointer, &found)) return NULL;
        stream = found.stream;
        if (two && !(found.start <= other && other < found.end)) {
            found.stream = anchored_at(self, other);
            if (found.stream == NONE && find(self, other, &found)) return NULL;
            if (found.stream != stream) stream = NONE;
        }
    }
    return stream == NONE ? Py_NewRef(Py_None) : PyLong_FromLongLong(stream);
}

static PyObject *all_allocated_on(Table *self, PyObject *const *given, Py_ssize_t count) {
    long long stream;
    wide pointer;
    Segment found = {0, NONE, 0, 0};
    if (count != 2 || !PyList_Check(given[1])) return PyErr_Format(PyExc_TypeError, "it takes a stream and a list");
    if (as_stream(given[0], &stream)) return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(given[1]); i++) {
        if (as_pointer(PyList_GetItem(given[1], i), &pointer)) return NULL;
        if (pointer < found.end || anchored_at(self, pointer) == stream) continue;
        if (find(self, pointer, &found)) return NULL;
        if (found.stream != stream) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *clear(Table *self, PyObject *Py_UNUSED(nothing)) {
    if (self->count) memset(self->slots, 0, SLOTS * sizeof(Segment));
    self->count = 0;
    Py_RETURN_NONE;
}

static PyObject *keep(Table *self, PyObject *given) {
    Segment next, *slot;
    PyObject *stream;
    if (!PyArg_ParseTuple(given, "KOKK", &next.key, &stream, &next.start, &next.end)) return NULL;
    if (as_stream(stream, &next.stream)) return NULL;
    if (self->count > LIMIT) Py_DECREF(clear(self, NULL));
    slot = slot_of(self, ++next.key);
    self->count += !slot->key;
    *slot = next;
    Py_RETURN_NONE;
}

static PyObject *anchor(Table *self, PyObject *given) {
    Anchor next;
    PyObject *stream;
    if (!PyArg_ParseTuple(given, "KO", &next.granule, &stream) || as_stream(stream, &next.stream)) return NULL;
    size_t i = 0;
    while (i < self->anchors && self->anchor[i].granule != next.granule) i++;
    if (next.stream == NONE && i < self->anchors) self->anchor[i] = self->anchor[--self->anchors];
    if (next.stream == NONE || i == ANCHORS) Py_RETURN_NONE;
    self->anchors += i == self->anchors;
    self->anchor[i] = next;
    Py_RETURN_NONE;
}

static PyObject *new_table(PyTypeObject *type, PyObject *given, PyObject *Py_UNUSED(named)) {
    wide ask;
    PyObject *missed;
    if (!PyArg_ParseTuple(given, "KO", &ask, &missed)) return NULL;
    Table *self = (Table *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self || !(self->memory = calloc(SLOTS + 2, sizeof(Segment)))) return Py_XDECREF(self), PyErr_NoMemory();
    self->slots = (Segment *)(((uintptr_t)self->memory + 63) & ~(uintptr_t)63); /* each in one line of the cache */
    self->ask = (int (*)(wide *, int, wide))(uintptr_t)ask;
    self->missed = Py_NewRef(missed);
    return (PyObject *)self;
}

/* No tp_clear: a circle that a table is part of goes through the dictionary of whose method missed is. */
static int traverse(Table *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->missed);
    return 0;
}

static void dealloc(Table *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->missed);
    free(self->memory);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int (*stream_is_capturing)(wide stream, int *status); /* cuStreamIsCapturing */
static int (*capture_info)(wide stream, int *status, wide *answer, void *, void *, void *); /* ...GetCaptureInfo_v2 */
static PyObject *otherwise; /* is_capturing() of streams.py, which is asked where the driver fails */

static PyObject *capture_id(PyObject *Py_UNUSED(module), PyObject *given) {
    wide stream, identity = 0;
    int status = 0;
    if (as_pointer(given, &stream)) return NULL;
    if (stream_is_capturing(stream, &status) || status != CAPTURE_ACTIVE) return PyLong_FromLong(0);
    return PyLong_FromUnsignedLongLong(capture_info(stream, &status, &identity, NULL, NULL, NULL) ? 0 : identity);
}

static PyObject *is_capturing(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t count) {
    wide stream;
    int status = 0;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "it takes a device and a stream");
    if (as_pointer(given[1], &stream)) return NULL;
    if (stream_is_capturing(stream, &status)) return PyObject_CallFunctionObjArgs(otherwise, given[0], given[1], NULL);
    return PyBool_FromLong(status);
}

#define FUNCTION(name, flags) {#name, (PyCFunction)(void (*)(void))name, flags, NULL}
static PyMethodDef of_captures[] = {FUNCTION(capture_id, METH_O), FUNCTION(is_capturing, METH_FASTCALL)};
static PyObject *captures(PyObject *Py_UNUSED(module), PyObject *given) {
    wide first, second;
    if (!PyArg_ParseTuple(given, "KKO", &first, &second, &otherwise)) return NULL;
    stream_is_capturing = (int (*)(wide, int *))(uintptr_t)first;
    capture_info = (int (*)(wide, int *, wide *, void *, void *, void *))(uintptr_t)second;
    Py_INCREF(otherwise); /* for good, as the functions */
    return Py_BuildValue("NN", PyCFunction_New(of_captures, NULL), PyCFunction_New(of_captures + 1, NULL));
}

static PyMethodDef of_table[] = {
    FUNCTION(alloc_stream, METH_FASTCALL), FUNCTION(all_allocated_on, METH_FASTCALL), FUNCTION(keep, METH_VARARGS),
    FUNCTION(clear, METH_NOARGS), FUNCTION(anchor, METH_VARARGS), {NULL, NULL, 0, NULL}};
static PyType_Slot slots_of_table[] = {
    {Py_tp_methods, of_table}, {Py_tp_new, new_table}, {Py_tp_traverse, traverse}, {Py_tp_dealloc, dealloc}, {0, NULL}};
static PyType_Spec table_spec = {
    "safecomm._torch._driver.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots_of_table};
static PyMethodDef of_module[] = {FUNCTION(captures, METH_VARARGS), {NULL, NULL, 0, NULL}};
static int execute(PyObject *module) {
    PyObject *table = PyType_FromSpec(&table_spec);
    int failed = PyModule_AddObjectRef(module, "Table", table) || PyModule_AddIntMacro(module, VERSION);
    Py_XDECREF(table);
    return failed ? -1 : 0;
}
static PyModuleDef_Slot of_import[] = {{Py_mod_exec, execute}, {0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_driver", NULL, 0, of_module, of_import, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__driver(void) { return PyModuleDef_Init(&definition); }
