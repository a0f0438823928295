package registry

import (
	"fmt"

	"keelson.dev/keelson/controlplane/api"
)

// Objects of kinds that have a light form (api.Version.Light) are cached in it, so that those which nobody reads take
// little more than their bytes. Who reads one gets the object itself, made for that; the newest few are kept.

const (
	// lightFrom is the size as stored from which an object is cached in the light form.
	lightFrom = 2 << 10
	// maxWholeBytes bounds the objects that are kept beside their light forms; the oldest go first.
	maxWholeBytes = 4 << 20
	// wholeTimes is how many times of what it takes in the store such an object takes in memory.
	wholeTimes = 16
)

// lighten brings the object of a new entry into the light form where there is one; before is an earlier state of it, or nil.
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
		c.keepWhole(k, e, whole) // whoever hears of the change reads it now
	}
	return nil
}

// keepWhole hangs the object itself on its entry, for as long as there is room.
func (c *cache) keepWhole(k *api.Kind, e *entry, whole api.Object) {
	f := &form{kind: k, obj: whole}
	e.changeForms(func(have *form) bool { return have.kind != k }, f)
	c.wholes.addForm(e, f, wholeTimes*len(e.value)+decodedBytes)
}

// whole is the object of an entry as it is, in the version in which it is cached.
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

// shows says that the object of an entry is what a reader wants: in the kind's version, and itself unless the light
// form will do.
func (s *served) shows(e *entry, light bool) bool {
	return e.version == s.own && (light || !e.light)
}
