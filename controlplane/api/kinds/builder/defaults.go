package builder

// SetDefault fills *p when it is the zero value.
func SetDefault[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// SetDefaultPtr fills *p when it points nowhere.
func SetDefaultPtr[T any](p **T, v T) {
	if *p == nil {
		*p = &v
	}
}
