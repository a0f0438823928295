package registry

import (
	"fmt"

	"keelson.dev/keelson/controlplane/api"
)

// Large objects of kinds with a light form (api.Version.Light) are cached in it, so that unread
// objects use little more memory than their bytes. A reader gets the full object, which is unpacked
// for it. The newest full objects are cached.

const (
	// lightFrom is the stored size from which an object is cached in the light form.
	lightFrom = 2 << 10
	// maxWholeBytes bounds the cached full objects; the oldest are dropped first.
	maxWholeBytes = 4 << 20
	// wholeTimes is the estimated ratio of a full object's memory to its stored size.
	wholeTimes = 16
)

// lighten replaces the object of a new entry by its light form, if the kind has one and the object
// is large. before is an earlier entry of the object, or nil.
func (c *cache) lighten(sc *storageCache, e, before *entry) error {
	l := e.version.Light
	if l == nil || len(e.value) < lightFrom {
		return nil
	}
	var like api.Object
	if before != nil && before.light {
		like = before.obj
	}
	light, err := l.Pack(e.obj, like)
	if err != nil {
		return fmt.Errorf("packing a stored %s: %w", e.version.GVK.Kind, err)
	}
	whole := e.obj
	e.obj, e.light = light, l.Is(light)
	if k := sc.face.Load(); e.light && k != nil && k.GVK == e.version.GVK {
		c.keepWhole(k, e, whole) // cache the full object, because watches read it now
	}
	return nil
}

// keepWhole caches the full object of an entry, within the limit.
func (c *cache) keepWhole(k *api.Kind, e *entry, whole api.Object) {
	f := &form{kind: k, obj: whole}
	e.changeForms(func(have *form) bool { return have.kind != k }, f)
	c.wholes.addForm(e, f, wholeTimes*len(e.value)+decodedBytes)
}

// whole returns the full object of an entry, in its cached version.
func (s *storageCache) whole(e *entry) (api.Object, error) {
	if !e.light {
		return e.obj, nil
	}
	obj, err := e.version.Light.Unpack(e.obj)
	if err != nil {
		return nil, fmt.Errorf("unpacking %s %s: %w", e.version.GVK.Kind, e.key, err)
	}
	return obj, nil
}

// shows reports whether the entry's cached object can be returned to a reader. It must be in the
// kind's version, and full unless the reader accepts the light form.
func (s *served) shows(e *entry, light bool) bool {
	return e.version == s.own && (light || !e.light)
}
