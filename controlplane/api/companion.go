package api

// Companion is an object that changes in the same commit in which another one is
// made or removed: both are there, or neither.
type Companion struct {
	Object Object // its type, namespace and name
	// Next says what becomes of it. It is given what is stored, nil when there is nothing or what cannot be read, and
	// returns what is to be stored; the same again leaves it, nil removes it. It may be asked more than once, and must
	// not change what it is given.
	Next func(stored Object) Object
}
