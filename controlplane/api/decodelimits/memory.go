package decodelimits

import (
	"reflect"
	"sync"
)

const (
	// valueMemory is what a scalar, or the key and the slot of a member, takes besides its own bytes.
	valueMemory = 64
	// mapMemory is what an object takes that becomes a map of Go.
	mapMemory = 256
)

// Memory returns about how many bytes a text takes when it is decoded into a value of the Go type of into; nil means
// maps, lists and scalars. Any object or list item may become the largest struct of the type, as "{}" and "null" do.
func (c Counts) Memory(into any) int64 {
	size := int64(mapMemory)
	if into != nil {
		size = max(largestStruct(reflect.TypeOf(into)), valueMemory)
	}
	return int64(c.Values)*valueMemory + int64(c.Items+c.Objects)*size
}

var largestByType sync.Map // of int64, by reflect.Type

// largestStruct returns the size of the largest Go value that an object or list item inside of the type may become.
func largestStruct(t reflect.Type) int64 {
	if known, ok := largestByType.Load(t); ok {
		return known.(int64)
	}
	out := largestBelow(t, map[reflect.Type]bool{})
	largestByType.Store(t, out)
	return out
}

// largestBelow is largestStruct of the types below t that were not seen.
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
