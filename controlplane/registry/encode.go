package registry

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"weak"

	"google.golang.org/protobuf/encoding/protowire"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor"

	"keelson.dev/keelson/controlplane/api"
)

// The representations that are cached as bytes.
const (
	mediaJSON = iota
	mediaProtobuf
	mediaCBOR
	mediaTypes
)

// maxEncodedBytes bounds the cached encodings; the oldest are dropped first.
const maxEncodedBytes = 32 << 20

// encodingCost is the bookkeeping overhead of one cached encoding, in bytes.
const encodingCost = 64

// encoded contains an object's cached bytes in each representation, nil if not requested yet.
type encoded [mediaTypes]atomic.Pointer[[]byte]

// form is an entry's object converted to a kind of another version than the cached one.
type form struct {
	kind    *api.Kind
	obj     api.Object
	encoded encoded
}

// form returns the entry's cached form for a kind; nil if none exists.
func (e *entry) form(k *api.Kind) *form {
	if all := e.forms.Load(); all != nil {
		for _, f := range *all {
			if f.kind == k {
				return f
			}
		}
	}
	return nil
}

// encodings bounds the bytes of cached encodings and forms of entries. It holds weak pointers only:
// when an entry is neither current nor in the history, its encodings are collected with it.
type encodings struct {
	mu    sync.Mutex
	most  int            // maximum of bytes
	queue []keptEncoding // oldest first
	bytes int
}

type keptEncoding struct {
	entry weak.Pointer[entry]
	form  weak.Pointer[form] // the encoded form; nil if the entry itself is encoded
	media int                // mediaTypes means the form as a whole
	size  int
}

// drop removes the encoding or form from its entry.
func (k *keptEncoding) drop() {
	e, f := k.entry.Value(), k.form.Value()
	switch {
	case e == nil:
	case k.form == weak.Pointer[form]{}:
		e.encoded[k.media].Store(nil)
	case f == nil:
	case k.media < mediaTypes:
		f.encoded[k.media].Store(nil)
	default:
		e.changeForms(func(have *form) bool { return have != f }, nil)
	}
}

// changeForms replaces the entry's forms by those for which keep returns true, plus add unless it
// is nil.
func (e *entry) changeForms(keep func(*form) bool, add *form) {
	for {
		was := e.forms.Load()
		var next []*form
		if was != nil {
			for _, f := range *was {
				if keep(f) {
					next = append(next, f)
				}
			}
		}
		if add != nil {
			next = append(next, add)
		}
		if e.forms.CompareAndSwap(was, &next) {
			return
		}
	}
}

// keepForm caches the converted object of an entry as a form and returns it. Forms of dropped kinds
// are removed. If two goroutines convert concurrently, either result may stay.
func (c *encodings) keepForm(s *served, e *entry, obj api.Object) api.Object {
	f, now := &form{kind: s.kind, obj: obj}, s.cache.routes.Load()
	e.changeForms(func(have *form) bool { return have.kind != s.kind && now.byKind[have.kind] != nil }, f)
	c.addForm(e, f, decodedTimes*len(e.value)+decodedBytes)
	return obj
}

// addForm accounts for a form of an entry.
func (c *encodings) addForm(e *entry, f *form, size int) {
	c.add(keptEncoding{entry: weak.Make(e), form: weak.Make(f), media: mediaTypes, size: size})
}

// keep caches an encoding at its place, and drops the oldest encodings above the limit.
func (c *encodings) keep(at place, media int, data []byte) {
	if !at.encoded()[media].CompareAndSwap(nil, &data) {
		return
	}
	kept := keptEncoding{entry: weak.Make(at.entry), media: media, size: len(data) + encodingCost}
	if at.form != nil {
		kept.form = weak.Make(at.form)
	}
	c.add(kept)
}

func (c *encodings) add(kept keptEncoding) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = append(c.queue, kept)
	c.bytes += kept.size
	for c.bytes > c.most {
		old := c.queue[0]
		c.queue[0] = keptEncoding{}
		c.queue = c.queue[1:]
		c.bytes -= old.size
		old.drop()
	}
}

// place is where the encodings of an object are cached: in its entry or in a form of it.
type place struct {
	entry *entry // nil for objects that are not cached
	form  *form
}

func (p place) encoded() *encoded {
	if p.form != nil {
		return &p.form.encoded
	}
	return &p.entry.encoded
}

// Encoded returns obj in the media type ("application/json", "application/vnd.kubernetes.protobuf",
// "application/cbor"). A cached object is encoded only once. The bytes are shared: do not modify
// them.
func (r *Registry) Encoded(obj runtime.Object, mediaType string) ([]byte, error) {
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
			"only JSON, protobuf and CBOR are produced, not "+mediaType, 0, false)
	}
	o, s := r.cache.objectOf(obj)
	if s == nil {
		data, err := encodeAs(obj, media)
		if err != nil {
			return nil, statusError(err, fmt.Sprintf("encoding a %T", obj))
		}
		return data, nil
	}
	at := s.place(o)
	if at.entry != nil {
		if data := at.encoded()[media].Load(); data != nil {
			return *data, nil
		}
	}
	whole, err := s.kind.Whole(o)
	if err != nil {
		return nil, statusError(err, fmt.Sprintf("encoding a %s", s.kind.GVK.Kind))
	}
	data, err := encodeAs(s.kind.Shown(whole), media)
	if err != nil {
		return nil, statusError(err, fmt.Sprintf("encoding a %s", s.kind.GVK.Kind))
	}
	if at.entry != nil {
		r.cache.encodings.keep(at, media, data)
	}
	return data, nil
}

// objectOf returns the served kind of an object by its apiVersion and kind; nil if it is not a
// stored kind.
func (c *cache) objectOf(obj runtime.Object) (api.Object, *served) {
	o, ok := obj.(api.Object)
	if !ok {
		return nil, nil
	}
	return o, c.routes.Load().byGVK[o.GetObjectKind().GroupVersionKind()]
}

// place returns where the encodings of exactly this object are cached.
func (s *served) place(o api.Object) place {
	if e := s.get(objectKey(s.kind, o.GetNamespace(), o.GetName())); e != nil {
		if e.obj == o {
			return place{entry: e}
		}
		if f := e.form(s.kind); f != nil && f.obj == o {
			if e.version == s.own {
				return place{entry: e} // o is the full object; the entry has its light form
			}
			return place{entry: e, form: f}
		}
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	return place{entry: s.recent[o]}
}

func encodeAs(obj runtime.Object, media int) ([]byte, error) {
	switch media {
	case mediaJSON:
		return encodeJSON(obj)
	case mediaCBOR:
		return encodeCBOR(obj)
	}
	m, ok := obj.(sizedMarshaler)
	if !ok {
		return nil, apierrors.NewGenericServerResponse(406, "get", schema.GroupResource{}, "", fmt.Sprintf("%T has no protobuf form", obj), 0, false)
	}
	gvk := obj.GetObjectKind().GroupVersionKind()
	return encodeEnvelope(envelopeHeader(gvk), m)
}

// encodeCBOR encodes an object with Kubernetes' CBOR serializer, which needs no scheme to encode.
func encodeCBOR(obj runtime.Object) ([]byte, error) {
	var buf bytes.Buffer
	if err := cbor.NewSerializer(nil, nil).Encode(obj, &buf); err != nil {
		return nil, err
	}
	return slices.Clip(buf.Bytes()), nil
}

// envelopeHeader returns the start of every envelope of a kind: magic and typeMeta.
func envelopeHeader(gvk schema.GroupVersionKind) []byte {
	apiVersion, kind := gvk.ToAPIVersionAndKind()
	var meta []byte
	meta = protowire.AppendTag(meta, 1, protowire.BytesType)
	meta = protowire.AppendString(meta, apiVersion)
	meta = protowire.AppendTag(meta, 2, protowire.BytesType)
	meta = protowire.AppendString(meta, kind)
	header := append([]byte(nil), envelopeMagic...)
	header = protowire.AppendTag(header, 1, protowire.BytesType)
	return protowire.AppendBytes(header, meta)
}
