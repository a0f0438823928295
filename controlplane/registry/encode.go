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

// The representations whose bytes are kept.
const (
	mediaJSON = iota
	mediaProtobuf
	mediaCBOR
	mediaTypes
)

// maxEncodedBytes bounds the encodings that are kept; the oldest go first.
const maxEncodedBytes = 32 << 20

// encodingCost is what accounting for an encoding takes.
const encodingCost = 64

// encoded is an object in each representation, as far as somebody wanted it.
type encoded [mediaTypes]atomic.Pointer[[]byte]

// form is an entry in the version of a kind that is not the one it is cached in.
type form struct {
	kind    *api.Kind
	obj     api.Object
	encoded encoded
}

// form finds the form of a kind; nil when none exists.
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

// encodings accounts for the bytes that hang on entries, and for their forms. It does not keep the
// entries: one that is neither current nor history takes them along.
type encodings struct {
	mu    sync.Mutex
	most  int            // bytes that are kept
	queue []keptEncoding // oldest first
	bytes int
}

type keptEncoding struct {
	entry weak.Pointer[entry]
	form  weak.Pointer[form] // of which it is the encoding; nil for that of the entry itself
	media int                // mediaTypes stands for the form as a whole
	size  int
}

// drop lets the encoding or form go.
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

// changeForms keeps the forms that the rule keeps, and adds one unless it is nil.
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

// keepForm hangs the object that an entry was converted to on the entry, and returns it. Forms of kinds that were
// dropped go then. When two convert at once either's may stay.
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

// keep stores an encoding where it belongs and drops the oldest ones beyond the bound.
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

// place is where the encodings of an object are kept: with its entry, or with a form of it.
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

// Encoded returns obj in the media type ("application/json", "application/vnd.kubernetes.protobuf", "application/cbor"),
// encoding once for all callers when obj is a cached one. The bytes are shared: do not modify them.
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

// objectOf finds the kind of an object by what it says of itself; nil when it is no object of a stored kind.
func (c *cache) objectOf(obj runtime.Object) (api.Object, *served) {
	o, ok := obj.(api.Object)
	if !ok {
		return nil, nil
	}
	return o, c.routes.Load().byGVK[o.GetObjectKind().GroupVersionKind()]
}

// place finds where the encodings of exactly this object are kept.
func (s *served) place(o api.Object) place {
	if e := s.get(objectKey(s.kind, o.GetNamespace(), o.GetName())); e != nil {
		if e.obj == o {
			return place{entry: e}
		}
		if f := e.form(s.kind); f != nil && f.obj == o {
			if e.version == s.own {
				return place{entry: e} // the object itself, of which the entry has the light form
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

// encodeCBOR writes what Kubernetes' serializer writes, which needs no types to write.
func encodeCBOR(obj runtime.Object) ([]byte, error) {
	var buf bytes.Buffer
	if err := cbor.NewSerializer(nil, nil).Encode(obj, &buf); err != nil {
		return nil, err
	}
	return slices.Clip(buf.Bytes()), nil
}

// envelopeHeader is the beginning of every envelope of a kind: magic and typeMeta.
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
