package watchcache

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"weak"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
)

// The media types in which encoded objects are cached. mediaTypes is their number.
const (
	mediaJSON = iota
	mediaProtobuf
	mediaCBOR
	mediaTypes
)

// maxEncodedBytes is the maximum memory of cached encodings; the oldest encodings are dropped
// first.
const maxEncodedBytes = 32 << 20

// encodingOverhead is the memory overhead of one cached encoding, in bytes.
const encodingOverhead = 64

// encoded contains an object's cached encodings by media type. A pointer is nil if that encoding is
// not cached.
type encoded [mediaTypes]atomic.Pointer[[]byte]

// convertedObject is the object of an entry as it is returned to clients of one kind: complete, and
// in the version of the kind. It is only needed if the entry's own object is in another version or
// in the light form, in which some fields are still encoded (see light.go).
type convertedObject struct {
	kind    *api.Kind
	obj     api.Object
	encoded encoded
}

// convertedObjectOf returns the cached convertedObject of an entry for a kind. It returns nil if it
// is not cached.
func (e *Entry) convertedObjectOf(k *api.Kind) *convertedObject {
	if all := e.convertedObjects.Load(); all != nil {
		for _, f := range *all {
			if f.kind == k {
				return f
			}
		}
	}
	return nil
}

// encodings limits the memory of cached encodings and convertedObjects. It holds weak pointers
// only: when an entry is neither current nor in the watch history, its encodings are garbage
// collected with it.
type encodings struct {
	mu       sync.Mutex
	maxBytes int
	queue    []cachedEncoding // oldest first
	bytes    int
}

type cachedEncoding struct {
	entry weak.Pointer[Entry]
	// served is the convertedObject that is encoded; nil if the entry's own object is encoded.
	served weak.Pointer[convertedObject]
	// media is the media type; mediaTypes means the convertedObject itself, not an encoding of it.
	media int
	size  int
}

// removeFromEntry removes the cached encoding or convertedObject from its entry.
func (k *cachedEncoding) removeFromEntry() {
	e, f := k.entry.Value(), k.served.Value()
	switch {
	case e == nil:
	case k.served == weak.Pointer[convertedObject]{}:
		e.encoded[k.media].Store(nil)
	case f == nil:
	case k.media < mediaTypes:
		f.encoded[k.media].Store(nil)
	default:
		e.changeConvertedObjects(func(other *convertedObject) bool { return other != f }, nil)
	}
}

// changeConvertedObjects removes the cached convertedObjects of the entry for which keep returns
// false, and adds the convertedObject added, unless it is nil.
func (e *Entry) changeConvertedObjects(keep func(*convertedObject) bool, added *convertedObject) {
	for {
		old := e.convertedObjects.Load()
		var next []*convertedObject
		if old != nil {
			for _, f := range *old {
				if keep(f) {
					next = append(next, f)
				}
			}
		}
		if added != nil {
			next = append(next, added)
		}
		if e.convertedObjects.CompareAndSwap(old, &next) {
			return
		}
	}
}

// cacheConverted caches obj, the object of an entry converted for the kind s, and returns it. It
// removes the cached objects of kinds that are no longer served. If two goroutines convert
// concurrently, either result may be cached.
func (c *encodings) cacheConverted(s *Served, e *Entry, obj api.Object) api.Object {
	f, routes := &convertedObject{kind: s.Kind, obj: obj}, s.storage.cache.routes.Load()
	e.changeConvertedObjects(func(other *convertedObject) bool {
		return other.kind != s.Kind && routes.byKind[other.kind] != nil
	}, f)
	c.addConvertedObject(e, f, decodedSizeFactor*len(e.Value)+decodedOverhead)
	return obj
}

// addConvertedObject adds the size of a convertedObject in bytes to the accounted memory.
func (c *encodings) addConvertedObject(e *Entry, f *convertedObject, size int) {
	c.addCounted(cachedEncoding{entry: weak.Make(e), served: weak.Make(f), media: mediaTypes, size: size})
}

// cacheEncoding stores an encoding with its owner, unless the owner already has one for the media
// type. While the cache exceeds its memory limit, the oldest encodings are dropped.
func (c *encodings) cacheEncoding(owner encodingOwner, media int, data []byte) {
	if !owner.encodedSlots()[media].CompareAndSwap(nil, &data) {
		return
	}
	kept := cachedEncoding{entry: weak.Make(owner.entry), media: media, size: len(data) + encodingOverhead}
	if owner.served != nil {
		kept.served = weak.Make(owner.served)
	}
	c.addCounted(kept)
}

// addCounted adds the size of an encoding or convertedObject to the accounted memory. While the
// cache exceeds its memory limit, it drops the oldest encodings and convertedObjects.
func (c *encodings) addCounted(kept cachedEncoding) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = append(c.queue, kept)
	c.bytes += kept.size
	for c.bytes > c.maxBytes {
		oldest := c.queue[0]
		c.queue[0] = cachedEncoding{}
		c.queue = c.queue[1:]
		c.bytes -= oldest.size
		oldest.removeFromEntry()
	}
}

// encodingOwner is where the encodings of an object are cached: its entry or, if served is set, a
// convertedObject of the entry.
type encodingOwner struct {
	entry  *Entry // nil for objects with encodings that are not cached
	served *convertedObject
}

// encodedSlots returns the cached encodings of the owner, which must have an entry.
func (o encodingOwner) encodedSlots() *encoded {
	if o.served != nil {
		return &o.served.encoded
	}
	return &o.entry.encoded
}

// Encoded returns obj encoded in the media type ("application/json",
// "application/vnd.kubernetes.protobuf", "application/cbor"), or a 406 for another type. The
// encoding of a cached object is cached. The bytes are shared: do not modify them.
func (r Reader) Encoded(obj runtime.Object, mediaType string) ([]byte, error) {
	var media int
	switch mediaType {
	case runtime.ContentTypeJSON:
		media = mediaJSON
	case runtime.ContentTypeProtobuf:
		media = mediaProtobuf
	case runtime.ContentTypeCBOR:
		media = mediaCBOR
	default:
		return nil, apierrors.NewGenericServerResponse(406, "get", schema.GroupResource{}, "",
			"the server produces JSON, protobuf and CBOR, not "+mediaType, 0, false)
	}
	o, s := r.cache.servedOf(obj)
	if s == nil {
		data, err := encodeAs(obj, media)
		if err != nil {
			return nil, storeerrors.ToStatus(err, fmt.Sprintf("encoding a %T", obj))
		}
		return data, nil
	}
	at := s.encodingOwnerOf(o)
	if at.entry != nil {
		if data := at.encodedSlots()[media].Load(); data != nil {
			return *data, nil
		}
	}
	full, err := s.Kind.UnpackObject(o)
	if err != nil {
		return nil, storeerrors.ToStatus(err, fmt.Sprintf("encoding a %s", s.Kind.GVK.Kind))
	}
	data, err := encodeAs(s.Kind.ClientView(full), media)
	if err != nil {
		return nil, storeerrors.ToStatus(err, fmt.Sprintf("encoding a %s", s.Kind.GVK.Kind))
	}
	if at.entry != nil {
		r.cache.encodings.cacheEncoding(at, media, data)
	}
	return data, nil
}

// servedOf returns obj as an api.Object, and the Served of its apiVersion and kind. The Served is
// nil if no objects of this kind are stored.
func (c *Cache) servedOf(obj runtime.Object) (api.Object, *Served) {
	o, ok := obj.(api.Object)
	if !ok {
		return nil, nil
	}
	return o, c.routes.Load().byGVK[o.GetObjectKind().GroupVersionKind()]
}

// encodingOwnerOf returns where the encodings of obj are cached. The result has no entry if obj is
// not an object of the cache (compared by pointer).
func (s *Served) encodingOwnerOf(obj api.Object) encodingOwner {
	if e := s.Current(s.Key(obj.GetNamespace(), obj.GetName())); e != nil {
		if e.Object == obj {
			return encodingOwner{entry: e}
		}
		if f := e.convertedObjectOf(s.Kind); f != nil && f.obj == obj {
			if e.version == s.version {
				return encodingOwner{entry: e} // obj is the complete object of an entry that holds the light form
			}
			return encodingOwner{entry: e, served: f}
		}
	}
	s.storage.mu.RLock()
	defer s.storage.mu.RUnlock()
	return encodingOwner{entry: s.storage.historyEntries[obj]}
}

// encodeAs returns obj encoded in one of the cached media types (mediaJSON, mediaProtobuf or
// mediaCBOR).
func encodeAs(obj runtime.Object, media int) ([]byte, error) {
	switch media {
	case mediaJSON:
		return storedform.EncodeJSON(obj)
	case mediaCBOR:
		return encodeCBOR(obj)
	}
	m, ok := obj.(storedform.SizedMarshaler)
	if !ok {
		return nil, apierrors.NewGenericServerResponse(406, "get", schema.GroupResource{}, "",
			fmt.Sprintf("%T has no protobuf form", obj), 0, false)
	}
	gvk := obj.GetObjectKind().GroupVersionKind()
	return storedform.EncodeEnvelope(storedform.EnvelopeHeader(gvk), m)
}

// encodeCBOR encodes an object with Kubernetes' CBOR serializer, which needs no scheme to encode.
func encodeCBOR(obj runtime.Object) ([]byte, error) {
	var buf bytes.Buffer
	if err := cbor.NewSerializer(nil, nil).Encode(obj, &buf); err != nil {
		return nil, err
	}
	return slices.Clip(buf.Bytes()), nil
}
