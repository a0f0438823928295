package registry

import (
	"encoding/json"
	"fmt"
	"reflect"
	"sync"
	"weak"

	"google.golang.org/protobuf/encoding/protowire"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// The representations whose bytes are kept.
const (
	mediaJSON = iota
	mediaProtobuf
	mediaTypes
)

// maxEncodedBytes bounds the encodings that are kept; the oldest go first.
const maxEncodedBytes = 32 << 20

// encodingCost is what accounting for an encoding takes.
const encodingCost = 64

// encodings accounts for the bytes that hang on entries. It does not keep the
// entries: one that is neither current nor history takes its encodings along.
type encodings struct {
	mu    sync.Mutex
	queue []keptEncoding // oldest first
	bytes int
}

type keptEncoding struct {
	entry weak.Pointer[entry]
	media int
	size  int
}

// keep stores an encoding on its entry and drops the oldest ones beyond the bound.
func (c *encodings) keep(e *entry, media int, data []byte) {
	if !e.encoded[media].CompareAndSwap(nil, &data) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := keptEncoding{weak.Make(e), media, len(data) + encodingCost}
	c.queue = append(c.queue, kept)
	c.bytes += kept.size
	for c.bytes > maxEncodedBytes {
		old := c.queue[0]
		c.queue[0] = keptEncoding{}
		c.queue = c.queue[1:]
		c.bytes -= old.size
		if e := old.entry.Value(); e != nil {
			e.encoded[old.media].Store(nil)
		}
	}
}

// Encoded returns obj in the media type ("application/json", "application/vnd.kubernetes.protobuf"), encoding once
// for all callers when obj is a cached one. The bytes are shared: do not modify them.
func (r *Registry) Encoded(obj runtime.Object, mediaType string) ([]byte, error) {
	var media int
	switch mediaType {
	case runtime.ContentTypeJSON:
		media = mediaJSON
	case runtime.ContentTypeProtobuf:
		media = mediaProtobuf
	default:
		return nil, apierrors.NewGenericServerResponse(406, "get", schema.GroupResource{}, "", "only JSON and protobuf are produced, not "+mediaType, 0, false)
	}
	e := r.cache.entryOf(obj)
	if e != nil {
		if data := e.encoded[media].Load(); data != nil {
			return *data, nil
		}
	}
	data, err := encodeAs(r.shown(obj), media)
	if err != nil {
		return nil, statusError(err, fmt.Sprintf("encoding a %T", obj))
	}
	if e != nil {
		r.cache.encodings.keep(e, media, data)
	}
	return data, nil
}

// shown is an object as clients see it.
func (r *Registry) shown(obj runtime.Object) runtime.Object {
	if o, ok := obj.(api.Object); ok {
		if kc := r.cache.byType[reflect.TypeOf(obj)]; kc != nil {
			return kc.kind.Shown(o)
		}
	}
	return obj
}

// entryOf finds the entry that holds exactly this object; nil when it is not a cached one.
func (c *cache) entryOf(obj runtime.Object) *entry {
	o, ok := obj.(api.Object)
	if !ok {
		return nil
	}
	kc := c.byType[reflect.TypeOf(obj)]
	if kc == nil {
		return nil
	}
	if e := kc.get(objectKey(kc.kind, o.GetNamespace(), o.GetName())); e != nil && e.obj == o {
		return e
	}
	kc.mu.RLock()
	defer kc.mu.RUnlock()
	return kc.recent[o]
}

func encodeAs(obj runtime.Object, media int) ([]byte, error) {
	if media == mediaJSON {
		return json.Marshal(obj)
	}
	m, ok := obj.(sizedMarshaler)
	if !ok {
		return nil, apierrors.NewGenericServerResponse(406, "get", schema.GroupResource{}, "", fmt.Sprintf("%T has no protobuf form", obj), 0, false)
	}
	gvk := obj.GetObjectKind().GroupVersionKind()
	return kindCodec{header: envelopeHeader(gvk)}.encode(m)
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
