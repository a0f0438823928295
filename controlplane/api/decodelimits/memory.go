package decodelimits

import (
	"reflect"
	"sync"
)

const (
	// valueMemory is the memory of a scalar, or of the key and the slot of a member, without its
	// text.
	valueMemory = 64
	// mapMemory is the memory of an object that is decoded into a Go map.
	mapMemory = 256
)

// Memory returns an upper estimate of the bytes that the text takes when it is decoded into the Go
// type of into. nil means maps, lists and scalars. It assumes that every object and list item
// becomes the largest struct of the type, as "{}" and "null" can.
func (c Counts) Memory(into any) int64 {
	size := int64(mapMemory)
	if into != nil {
		size = max(largestStruct(reflect.TypeOf(into)), valueMemory)
	}
	return int64(c.Values)*valueMemory + int64(c.Items+c.Objects)*size
}

var largestByType sync.Map // map[reflect.Type]int64

// largestStruct returns the size of the largest Go value that an object or list item within the
// type can become. Results are cached.
func largestStruct(t reflect.Type) int64 {
	if known, ok := largestByType.Load(t); ok {
		return known.(int64)
	}
	out := largestBelow(t, map[reflect.Type]bool{})
	largestByType.Store(t, out)
	return out
}

// largestBelow computes largestStruct for t. Types in seen are skipped, and visited types are added
// to seen.
func largestBelow(t reflect.Type, seen map[reflect.Type]bool) (out int64) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if seen[t] {
		return 0
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Interface:
		return mapMemory
	case reflect.Map, reflect.Slice:
		if t.Elem().Kind() == reflect.Struct {
			out = int64(t.Elem().Size())
		}
		return max(out, largestBelow(t.Elem(), seen))
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			if f.Type.Kind() == reflect.Pointer && f.Type.Elem().Kind() == reflect.Struct {
				out = max(out, int64(f.Type.Elem().Size()))
			}
			out = max(out, largestBelow(f.Type, seen))
		}
	}
	return out
}
