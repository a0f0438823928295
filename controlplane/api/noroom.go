package api

// NoRoomAnnotation on a CSIStorageCapacity is the driver's reason why a node cannot have any volume
// of a storage class. The scheduler copies the reason to the pods that need such a volume.
const NoRoomAnnotation = "keelson.dev/no-volumes-because"
