package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"reflect"

	"google.golang.org/protobuf/encoding/protowire"

	"keelson.dev/keelson/controlplane/api"
)

// envelopeMagic begins every Kubernetes protobuf value; what follows is a
// runtime.Unknown: typeMeta (1), raw (2), contentEncoding (3), contentType (4).
var envelopeMagic = []byte("k8s\x00")

// sizedMarshaler is what generated types offer: sizes first, then one backward pass.
type sizedMarshaler interface {
	Size() int
	MarshalToSizedBuffer([]byte) (int, error)
}

type unmarshaler interface{ Unmarshal([]byte) error }

// kindCodec turns objects of one kind into stored bytes and back.
type kindCodec struct {
	kind   *api.Kind
	header []byte // magic and typeMeta, the same for every object
}

func newKindCodec(k *api.Kind) kindCodec {
	return kindCodec{kind: k, header: envelopeHeader(k.GVK)}
}

// envelopeTail is an empty contentEncoding and contentType, which Kubernetes writes too.
var envelopeTail = []byte{0x1a, 0x00, 0x22, 0x00}

// encode returns the envelope of obj, written once into one buffer. Types
// without generated protobuf are stored as JSON.
func (c kindCodec) encode(obj any) ([]byte, error) {
	m, ok := obj.(sizedMarshaler)
	if !ok {
		data, err := json.Marshal(obj)
		if err != nil {
			return nil, fmt.Errorf("encoding a %T: %w", obj, err)
		}
		return data, nil
	}
	size := m.Size()
	total := len(c.header) + 1 + varintLen(uint64(size)) + size + len(envelopeTail)
	buf := make([]byte, 0, total)
	buf = append(buf, c.header...)
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

// decode returns a new object. It does not keep data.
func (c kindCodec) decode(data []byte) (api.Object, error) {
	obj := c.kind.New()
	if !bytes.HasPrefix(data, envelopeMagic) {
		if err := json.Unmarshal(data, obj); err != nil {
			return nil, fmt.Errorf("decoding a stored %s: %w", c.kind.GVK.Kind, err)
		}
		return obj, nil
	}
	apiVersion, kind, raw, err := openEnvelope(data[len(envelopeMagic):])
	if err != nil {
		return nil, fmt.Errorf("decoding a stored %s: %w", c.kind.GVK.Kind, err)
	}
	if v, k := c.kind.GVK.ToAPIVersionAndKind(); v != apiVersion || k != kind {
		return nil, fmt.Errorf("decoding a stored %s: it is a %s of %s", c.kind.GVK.Kind, kind, apiVersion)
	}
	u, ok := obj.(unmarshaler)
	if !ok {
		return nil, fmt.Errorf("decoding a stored %s: the type has no protobuf form", c.kind.GVK.Kind)
	}
	if err := u.Unmarshal(raw); err != nil {
		return nil, fmt.Errorf("decoding a stored %s: %w", c.kind.GVK.Kind, err)
	}
	return obj, nil
}

// decodeNamed decodes what is stored under a key below the kind's prefix. Whatever is
// wrong with the value, and a decoder that crashes over it, is an error.
func (c kindCodec) decodeNamed(key string, data []byte) (obj api.Object, err error) {
	defer func() {
		if p := recover(); p != nil {
			obj, err = nil, fmt.Errorf("decoding a stored %s: the decoder crashed: %v", c.kind.GVK.Kind, p)
		}
	}()
	if obj, err = c.decode(data); err != nil {
		return nil, err
	}
	if has := objectKey(c.kind, obj.GetNamespace(), obj.GetName()); has != key {
		return nil, fmt.Errorf("decoding a stored %s: the object says that it is %q", c.kind.GVK.Kind, has)
	}
	return obj, nil
}

var errEnvelope = errors.New("malformed protobuf envelope")

// openEnvelope reads a runtime.Unknown; raw aliases b.
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

// eachField calls f with every length-delimited field of a message and skips the others.
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

// shallow returns a new struct with the fields of obj: what hangs below is
// shared. It is how an immutable object gets another resourceVersion.
func shallow(obj api.Object) api.Object {
	v := reflect.New(reflect.TypeOf(obj).Elem())
	v.Elem().Set(reflect.ValueOf(obj).Elem())
	return v.Interface().(api.Object)
}
