// Package storedform defines the stored form of objects: their keys in the store, and the encoding
// of their values in the API versions of a storage.
package storedform

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

// SizedMarshaler is implemented by generated protobuf types. They compute the size of the message
// first, and then encode it backward into a buffer of that size.
type SizedMarshaler interface {
	Size() int
	MarshalToSizedBuffer([]byte) (int, error)
}

type unmarshaler interface{ Unmarshal([]byte) error }

// Codec encodes and decodes the objects of one storage. It encodes them in the storage's hub
// version (the version in which new values are stored). It decodes every version that the storage
// knows.
type Codec struct {
	storage *api.Storage
	header  []byte // of the hub version: magic and typeMeta, the same for every object
}

// NewCodec returns the Codec of a storage.
func NewCodec(s *api.Storage) Codec { return Codec{storage: s, header: EnvelopeHeader(s.Hub.GVK)} }

// Version returns how objects stored in a version are decoded. It returns nil if the storage does
// not know the version.
func (c Codec) Version(gvk schema.GroupVersionKind) *api.Version {
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

// Encode returns the bytes to store for an object, which must be in the hub version.
func (c Codec) Encode(obj any) ([]byte, error) {
	if l := c.storage.Hub.Light; l != nil {
		if o, ok := obj.(api.Object); ok && l.Is(o) {
			return nil, fmt.Errorf("encoding a %T: the object is in the light form, which is never stored", obj)
		}
	}
	return EncodeEnvelope(c.header, obj)
}

// EncodeEnvelope returns header followed by the encoding of obj, in one buffer. Types without
// generated protobuf code are encoded as JSON.
func EncodeEnvelope(header []byte, obj any) ([]byte, error) {
	m, ok := obj.(SizedMarshaler)
	if !ok {
		data, err := EncodeJSON(obj)
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

// Decode decodes a stored value. It returns a new object with its apiVersion and kind, and the
// version of that object. The object is converted to the hub version, unless its stored version has
// no local conversion to it. The object does not alias data.
func (c Codec) Decode(data []byte) (api.Object, *api.Version, error) {
	obj, v, err := c.decodeVersion(data)
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

// decodeVersion returns a stored object in the version in which it is stored, and that version.
func (c Codec) decodeVersion(data []byte) (api.Object, *api.Version, error) {
	if !bytes.HasPrefix(data, envelopeMagic) {
		return c.decodeJSONVersion(data)
	}
	v, rest := &c.storage.Hub, data[len(envelopeMagic):]
	if after, usual := bytes.CutPrefix(data, c.header); usual {
		rest = after
	}
	apiVersion, kind, raw, err := parseEnvelope(rest)
	if err != nil {
		return nil, nil, err
	}
	if kind != "" || apiVersion != "" {
		if v = c.Version(schema.FromAPIVersionAndKind(apiVersion, kind)); v == nil {
			return nil, nil, c.unknownVersionError(schema.FromAPIVersionAndKind(apiVersion, kind))
		}
	}
	obj := v.New()
	u, ok := obj.(unmarshaler)
	if !ok {
		return nil, nil, errors.New("the type has no protobuf form")
	}
	return obj, v, u.Unmarshal(raw)
}

func (c Codec) decodeJSONVersion(data []byte) (api.Object, *api.Version, error) {
	v := &c.storage.Hub
	obj := v.New()
	if err := decodeJSON(data, obj); err != nil {
		return nil, nil, err
	}
	gvk := obj.GetObjectKind().GroupVersionKind()
	if gvk.Empty() || gvk == v.GVK {
		return obj, v, nil
	}
	if v = c.Version(gvk); v == nil {
		return nil, nil, c.unknownVersionError(gvk)
	}
	obj = v.New()
	return obj, v, decodeJSON(data, obj)
}

// DroppedVersionError is the error for an object that is stored in a version that the storage no
// longer knows. The CustomResourceDefinition may have dropped the version.
type DroppedVersionError struct{ Version schema.GroupVersionKind }

func (e *DroppedVersionError) Error() string {
	return fmt.Sprintf("it is a %s of %s", e.Version.Kind, e.Version.GroupVersion())
}

// unknownVersionError returns the error for a stored object of a version or kind that the storage
// does not know. It is a DroppedVersionError if only the version is unknown.
func (c Codec) unknownVersionError(gvk schema.GroupVersionKind) error {
	if gvk.GroupKind() == c.storage.Hub.GVK.GroupKind() {
		return &DroppedVersionError{gvk}
	}
	return fmt.Errorf("it is a %s of %s", gvk.Kind, gvk.GroupVersion())
}

// decodeJSON decodes JSON into target. It calls the object's own JSON method directly, because
// encoding/json would scan the text again.
func decodeJSON(data []byte, target api.Object) error {
	if own, ok := target.(api.JSONDecoder); ok {
		_, err := own.DecodeJSON(data, false)
		return err
	}
	return json.Unmarshal(data, target)
}

// EncodeJSON encodes an object as JSON. It calls the object's own method directly, because
// encoding/json would scan the text again.
func EncodeJSON(obj any) ([]byte, error) {
	if own, ok := obj.(json.Marshaler); ok {
		return own.MarshalJSON()
	}
	return json.Marshal(obj)
}

// DecodeNamed is like Decode, for the value of a key relative to the storage's prefix. It also
// returns an error if the decoder panics, or if the object's name or namespace differs from that in
// the key.
func (c Codec) DecodeNamed(key string, data []byte) (obj api.Object, v *api.Version, err error) {
	defer func() {
		if p := recover(); p != nil {
			obj, err = nil, fmt.Errorf("decoding a stored %s: the decoder crashed: %v", c.storage.Hub.GVK.Kind, p)
		}
	}()
	if obj, v, err = c.Decode(data); err != nil {
		return nil, nil, err
	}
	if has := joinKey(c.storage.Namespaced, obj.GetNamespace(), obj.GetName()); has != key {
		return nil, nil, fmt.Errorf("decoding a stored %s: the object has the key %q", c.storage.Hub.GVK.Kind, has)
	}
	return obj, v, nil
}

var errEnvelope = errors.New("malformed protobuf envelope")

// parseEnvelope returns the fields of b, an encoded runtime.Unknown. raw is the encoded object and
// aliases b.
func parseEnvelope(b []byte) (apiVersion, kind string, raw []byte, err error) {
	err = visitFields(b, func(n protowire.Number, v []byte) error {
		switch n {
		case 1:
			return visitFields(v, func(n protowire.Number, v []byte) error {
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

// visitFields calls visit with the number and content of every length-delimited field of a protobuf
// message. It skips fields of other wire types.
func visitFields(message []byte, visit func(protowire.Number, []byte) error) error {
	for len(message) > 0 {
		num, typ, n := protowire.ConsumeTag(message)
		if n < 0 {
			return errEnvelope
		}
		message = message[n:]
		if typ != protowire.BytesType {
			if n = protowire.ConsumeFieldValue(num, typ, message); n < 0 {
				return errEnvelope
			}
			message = message[n:]
			continue
		}
		v, n := protowire.ConsumeBytes(message)
		if n < 0 {
			return errEnvelope
		}
		if err := visit(num, v); err != nil {
			return err
		}
		message = message[n:]
	}
	return nil
}

// EnvelopeHeader returns the start of every stored value of a kind: the magic bytes, and the
// apiVersion and kind.
func EnvelopeHeader(gvk schema.GroupVersionKind) []byte {
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
