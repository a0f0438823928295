package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"

	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// envelopeMagic is the prefix of every Kubernetes protobuf value. It is followed by a
// runtime.Unknown: typeMeta (1), raw (2), contentEncoding (3), contentType (4).
var envelopeMagic = []byte("k8s\x00")

// sizedMarshaler is implemented by generated protobuf types: it computes the size first, then
// encodes backward.
type sizedMarshaler interface {
	Size() int
	MarshalToSizedBuffer([]byte) (int, error)
}

type unmarshaler interface{ Unmarshal([]byte) error }

// codec encodes and decodes the objects of one storage. It writes them in the storage's hub version
// and reads every known version.
type codec struct {
	storage *api.Storage
	header  []byte // of the hub version: magic and typeMeta, the same for every object
}

func newCodec(s *api.Storage) codec { return codec{storage: s, header: envelopeHeader(s.Hub.GVK)} }

// version returns the decoding rules of a stored version; nil if it is unknown.
func (c codec) version(gvk schema.GroupVersionKind) *api.Version {
	if gvk == c.storage.Hub.GVK {
		return &c.storage.Hub
	}
	for i := range c.storage.Known {
		if c.storage.Known[i].GVK == gvk {
			return &c.storage.Known[i]
		}
	}
	return nil
}

// envelopeTail is an empty contentEncoding and contentType, as Kubernetes writes them.
var envelopeTail = []byte{0x1a, 0x00, 0x22, 0x00}

// encode returns the stored form of an object in the hub version.
func (c codec) encode(obj any) ([]byte, error) {
	if l := c.storage.Hub.Light; l != nil {
		if o, ok := obj.(api.Object); ok && l.Is(o) {
			return nil, fmt.Errorf("encoding a %T: it is in the form in which it is cached, which is not stored", obj)
		}
	}
	return encodeEnvelope(c.header, obj)
}

// encodeEnvelope encodes obj in one buffer. Types without generated protobuf code are encoded as
// JSON.
func encodeEnvelope(header []byte, obj any) ([]byte, error) {
	m, ok := obj.(sizedMarshaler)
	if !ok {
		data, err := encodeJSON(obj)
		if err != nil {
			return nil, fmt.Errorf("encoding a %T: %w", obj, err)
		}
		return data, nil
	}
	size := m.Size()
	total := len(header) + 1 + varintLen(uint64(size)) + size + len(envelopeTail)
	buf := make([]byte, 0, total)
	buf = append(buf, header...)
	buf = protowire.AppendTag(buf, 2, protowire.BytesType)
	buf = protowire.AppendVarint(buf, uint64(size))
	start := len(buf)
	buf = buf[:start+size]
	n, err := m.MarshalToSizedBuffer(buf[start:])
	if err != nil {
		return nil, fmt.Errorf("encoding a %T: %w", obj, err)
	}
	if n != size {
		return nil, fmt.Errorf("encoding a %T: wrote %d bytes of %d", obj, n, size)
	}
	return append(buf, envelopeTail...), nil
}

func varintLen(v uint64) int { return (bits.Len64(v|1) + 6) / 7 }

// decode returns a new object with apiVersion and kind, and its version. That is the hub version,
// unless the object was stored in a version without a local conversion to it. The object does not
// alias data.
func (c codec) decode(data []byte) (api.Object, *api.Version, error) {
	obj, v, err := c.read(data)
	if err != nil {
		return nil, nil, fmt.Errorf("decoding a stored %s: %w", c.storage.Hub.GVK.Kind, err)
	}
	if v.Default != nil {
		v.Default(obj)
	}
	if v.ToHub != nil {
		if obj, err = v.ToHub(obj); err != nil {
			return nil, nil, fmt.Errorf("converting a stored %s to %s: %w", v.GVK, c.storage.Hub.GVK, err)
		}
		v = &c.storage.Hub
	}
	obj.GetObjectKind().SetGroupVersionKind(v.GVK)
	return obj, v, nil
}

// read decodes the object in its stored version.
func (c codec) read(data []byte) (api.Object, *api.Version, error) {
	if !bytes.HasPrefix(data, envelopeMagic) {
		return c.readJSON(data)
	}
	v, rest := &c.storage.Hub, data[len(envelopeMagic):]
	if after, usual := bytes.CutPrefix(data, c.header); usual {
		rest = after
	}
	apiVersion, kind, raw, err := openEnvelope(rest)
	if err != nil {
		return nil, nil, err
	}
	if kind != "" || apiVersion != "" {
		if v = c.version(schema.FromAPIVersionAndKind(apiVersion, kind)); v == nil {
			return nil, nil, c.foreign(schema.FromAPIVersionAndKind(apiVersion, kind))
		}
	}
	obj := v.New()
	u, ok := obj.(unmarshaler)
	if !ok {
		return nil, nil, errors.New("the type has no protobuf form")
	}
	return obj, v, u.Unmarshal(raw)
}

func (c codec) readJSON(data []byte) (api.Object, *api.Version, error) {
	v := &c.storage.Hub
	obj := v.New()
	if err := decodeJSON(data, obj); err != nil {
		return nil, nil, err
	}
	is := obj.GetObjectKind().GroupVersionKind()
	if is.Empty() || is == v.GVK {
		return obj, v, nil
	}
	if v = c.version(is); v == nil {
		return nil, nil, c.foreign(is)
	}
	obj = v.New()
	return obj, v, decodeJSON(data, obj)
}

// droppedVersionError reports an object that is stored in a version which the storage does not
// know.
type droppedVersionError struct{ version schema.GroupVersionKind }

func (e *droppedVersionError) Error() string {
	return fmt.Sprintf("it is a %s of %s", e.version.Kind, e.version.GroupVersion())
}

// foreign returns the error for an object of an unknown version or kind.
func (c codec) foreign(is schema.GroupVersionKind) error {
	if is.GroupKind() == c.storage.Hub.GVK.GroupKind() {
		return &droppedVersionError{is}
	}
	return fmt.Errorf("it is a %s of %s", is.Kind, is.GroupVersion())
}

// decodeJSON and encodeJSON call the object's own JSON methods directly, because encoding/json
// would scan the text again.
func decodeJSON(data []byte, into api.Object) error {
	if own, ok := into.(api.JSONDecoder); ok {
		_, err := own.DecodeJSON(data, false)
		return err
	}
	return json.Unmarshal(data, into)
}

func encodeJSON(obj any) ([]byte, error) {
	if own, ok := obj.(json.Marshaler); ok {
		return own.MarshalJSON()
	}
	return json.Marshal(obj)
}

// decodeNamed decodes the value of a key, given relative to the storage's prefix. An invalid value,
// a panic of the decoder, and an object that does not belong to the key are errors.
func (c codec) decodeNamed(key string, data []byte) (obj api.Object, v *api.Version, err error) {
	defer func() {
		if p := recover(); p != nil {
			obj, err = nil, fmt.Errorf("decoding a stored %s: the decoder crashed: %v", c.storage.Hub.GVK.Kind, p)
		}
	}()
	if obj, v, err = c.decode(data); err != nil {
		return nil, nil, err
	}
	if has := storedKey(c.storage.Namespaced, obj.GetNamespace(), obj.GetName()); has != key {
		return nil, nil, fmt.Errorf("decoding a stored %s: the object says that it is %q", c.storage.Hub.GVK.Kind, has)
	}
	return obj, v, nil
}

var errEnvelope = errors.New("malformed protobuf envelope")

// openEnvelope parses a runtime.Unknown; raw aliases b.
func openEnvelope(b []byte) (apiVersion, kind string, raw []byte, err error) {
	err = eachField(b, func(n protowire.Number, v []byte) error {
		switch n {
		case 1:
			return eachField(v, func(n protowire.Number, v []byte) error {
				switch n {
				case 1:
					apiVersion = string(v)
				case 2:
					kind = string(v)
				}
				return nil
			})
		case 2:
			raw = v
		}
		return nil
	})
	return apiVersion, kind, raw, err
}

// eachField calls f for every length-delimited field of a protobuf message and skips the others.
func eachField(b []byte, f func(protowire.Number, []byte) error) error {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return errEnvelope
		}
		b = b[n:]
		if typ != protowire.BytesType {
			if n = protowire.ConsumeFieldValue(num, typ, b); n < 0 {
				return errEnvelope
			}
			b = b[n:]
			continue
		}
		v, n := protowire.ConsumeBytes(b)
		if n < 0 {
			return errEnvelope
		}
		if err := f(num, v); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}
