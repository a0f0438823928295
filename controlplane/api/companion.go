package api

// Companion is an object that is changed in the same commit in which another object is created or
// removed. Either both changes are made or neither.
type Companion struct {
	Object Object // the type, namespace and name of the companion
	// Next returns the object to be stored. stored is nil if the object does not exist or cannot be
	// read. If Next returns stored itself, nothing is written. If it returns nil, the object is
	// removed. Next may be called more than once and must not modify stored.
	Next func(stored Object) Object
}
