// Nothing: a library of this file is a name (CMakeLists.txt).
