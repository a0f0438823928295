package api

// Companion is an object that changes in the same commit in which another object is created or
// removed: either both changes are made or neither.
type Companion struct {
	Object Object // the type, namespace and name of the companion
	// Next returns the object to be stored. stored is nil if the object does not exist or cannot be
	// read. Returning stored itself writes nothing, and nil removes the object. Next may be called
	// more than once and must not modify stored.
	Next func(stored Object) Object
}
