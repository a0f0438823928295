package builder

// SetDefault sets *p to v if it is the zero value.
func SetDefault[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// SetDefaultPtr sets *p to a pointer to v if it is nil.
func SetDefaultPtr[T any](p **T, v T) {
	if *p == nil {
		*p = &v
	}
}
