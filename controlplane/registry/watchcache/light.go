package watchcache

import (
	"fmt"

	"keelson.dev/keelson/controlplane/api"
)

// Large objects of some kinds (CustomResourceDefinitions) are cached in a light form (api.Light),
// in which some fields are still encoded. An object that is not read then uses little more memory
// than its stored bytes. For a reader, the complete object is decoded from the light form. The
// newest complete objects are cached.

const (
	// minLightFormBytes is the minimum stored size of an object that is cached in the light form.
	minLightFormBytes = 2 << 10
	// maxCompleteBytes is the maximum memory of the cached complete objects; the oldest are dropped
	// first.
	maxCompleteBytes = 4 << 20
	// completeSizeFactor is the estimated ratio of a complete object's memory to its stored size.
	completeSizeFactor = 16
)

// replaceWithLightForm replaces the object of a new entry with its light form, in which some fields
// are still encoded. It does nothing if the object is small or its version has no light form.
// earlier is an earlier entry of the same object, or nil; the light form may share memory with it.
func (c *Cache) replaceWithLightForm(sc *storageCache, e, earlier *Entry) error {
	l := e.version.Light
	if l == nil || len(e.Value) < minLightFormBytes {
		return nil
	}
	var like api.Object
	if earlier != nil && earlier.light {
		like = earlier.Object
	}
	light, err := l.Pack(e.Object, like)
	if err != nil {
		return fmt.Errorf("packing a stored %s: %w", e.version.GVK.Kind, err)
	}
	full := e.Object
	e.Object, e.light = light, l.Is(light)
	if k := sc.defaultKind.Load(); e.light && k != nil && k.GVK == e.version.GVK {
		c.cacheCompleteObject(k, e, full) // watches read the complete object soon
	}
	return nil
}

// cacheCompleteObject caches the complete object of an entry that holds only the light form. The
// oldest such objects are dropped while the cache exceeds its memory limit.
func (c *Cache) cacheCompleteObject(k *api.Kind, e *Entry, full api.Object) {
	f := &convertedObject{kind: k, obj: full}
	e.changeConvertedObjects(func(other *convertedObject) bool { return other.kind != k }, f)
	c.completeObjects.addConvertedObject(e, f, completeSizeFactor*len(e.Value)+decodedOverhead)
}

// completeObject returns the complete object of an entry, in the version in which the entry is
// cached. It decodes the light form, in which some fields are still encoded.
func (sc *storageCache) completeObject(e *Entry) (api.Object, error) {
	if !e.light {
		return e.Object, nil
	}
	obj, err := e.version.Light.Unpack(e.Object)
	if err != nil {
		return nil, fmt.Errorf("unpacking %s %s: %w", e.version.GVK.Kind, e.key, err)
	}
	return obj, nil
}

// isServable reports whether the entry's own object can be returned to a reader without conversion.
// It must be in the kind's version and complete. If acceptsLight is true, it may also be in the
// light form, in which some fields are still encoded.
func (s *Served) isServable(e *Entry, acceptsLight bool) bool {
	return e.version == s.version && (acceptsLight || !e.light)
}
