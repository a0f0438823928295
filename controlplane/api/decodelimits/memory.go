package decodelimits

import (
	"reflect"
	"sync"
)

const (
	// valueMemory is the memory of a scalar without its text. It is also the memory of a member's
	// key and slot without the key's text.
	valueMemory = 64
	// mapMemory is the memory of an object that is decoded into a Go map.
	mapMemory = 256
)

// EstimateMemory returns an upper estimate of the memory that the text takes, in bytes, when it is
// decoded into the Go type of target. nil means maps, lists and scalars. It assumes that every
// object and list item becomes the largest struct of the type, as "{}" and "null" can.
func (c Counts) EstimateMemory(target any) int64 {
	size := int64(mapMemory)
	if target != nil {
		size = max(largestStruct(reflect.TypeOf(target)), valueMemory)
	}
	return int64(c.Values)*valueMemory + int64(c.Items+c.Objects)*size
}

var largestByType sync.Map // map[reflect.Type]int64

// largestStruct returns the size in bytes of the largest struct that an object or list item can be
// decoded into, when a text is decoded into the type t. Results are cached.
func largestStruct(t reflect.Type) int64 {
	if known, ok := largestByType.Load(t); ok {
		return known.(int64)
	}
	out := findLargestStruct(t, map[reflect.Type]bool{})
	largestByType.Store(t, out)
	return out
}

// findLargestStruct computes the result of largestStruct for t. It skips the types in seen, and
// adds the visited types to seen.
func findLargestStruct(t reflect.Type, seen map[reflect.Type]bool) (out int64) {
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
		return max(out, findLargestStruct(t.Elem(), seen))
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			if f.Type.Kind() == reflect.Pointer && f.Type.Elem().Kind() == reflect.Struct {
				out = max(out, int64(f.Type.Elem().Size()))
			}
			out = max(out, findLargestStruct(f.Type, seen))
		}
	}
	return out
}
