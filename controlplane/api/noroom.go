package api

// NoRoomAnnotation of a CSIStorageCapacity says, in the driver's words, why a node can have no volumes of a class at all:
// the scheduler passes them on to the pods that want some.
const NoRoomAnnotation = "keelson.dev/no-volumes-because"
