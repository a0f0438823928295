package builder

// SetDefault sets *field to value if *field has the zero value.
func SetDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// SetDefaultPtr sets *field to a pointer to value if *field is nil.
func SetDefaultPtr[T any](field **T, value T) {
	if *field == nil {
		*field = &value
	}
}
